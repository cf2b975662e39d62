"""The cache folder through the real command: moved, shared, killed, read-only and full."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.cache.record.manifest import read_manifests
from tests.conftest import COMPILER_CACHE_VARIABLE, RunCLI, cli_command, cli_environment, mounted_tmpfs, remove_headers
from tests.fork_server import ForkServer
from tests.model_families import save_config

BUCKETS = ("--buckets", "16,48", "--batch-sizes", "3", "--programs", "jit")  # kernels that test_why.py compiles too
NUMBER_OF_BUCKETS = 3
COMPILES = {COMPILER_CACHE_VARIABLE: ""}  # no cached kernels: the process is killed while g++ runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of a small llama: each process compiles in seconds."""
    return save_config("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def warm(model: str, cache: Path, *more: str) -> list[str]:
    return ["warm", model, "--load-format", "dummy", *BUCKETS, "--cache-dir", str(cache), "--json", *more]


def outcomes(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode in (0, 6), result.stderr
    return [record["outcome"] for record in json.loads(result.stdout)["buckets"]]


@pytest.fixture(scope="module")
def warmed(model: str, tmp_path_factory: pytest.TempPathFactory, run_cli_in: RunCLI) -> tuple[Path, Path]:
    """A cache folder that a cold run filled, and the HOME of that run."""
    home, cache = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("filled") / "cache"
    result = run_cli_in(home, *warm(model, cache, "--require-hit"))
    assert result.returncode == 6, "a cold run cannot meet --require-hit: " + result.stderr
    assert "3 of 3 buckets had to compile" in result.stderr
    assert outcomes(result) == ["miss"] * NUMBER_OF_BUCKETS
    assert list(cache.glob("precompiled_headers/*.gch"))
    remove_headers(cache)
    return cache, home


def test_a_moved_cache_under_another_home_hits_in_every_bucket(
    run_cli: Any, model: str, warmed: tuple[Path, Path], tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere" / "deeper" / "cache"
    shutil.copytree(warmed[0], moved)
    result = run_cli(*warm(model, moved, "--require-hit"))
    assert result.returncode == 0, result.stderr
    assert outcomes(result) == ["hit"] * NUMBER_OF_BUCKETS
    document = json.loads(result.stdout)
    (manifest,) = read_manifests(warmed[0]).values()
    cold_seconds = {record.bucket: record.compile_seconds for record in manifest.buckets}
    for record in document["buckets"]:
        assert record["cache_misses"] == 0 and record["cache_hits"] == record["programs"] == 1
        assert record["cold_seconds"] == cold_seconds[record["bucket"]], "the manifest keeps the cold run's time"
    assert document["plan"]["cache_dir"] == str(moved)


def test_all_files_are_in_the_cache_folder_and_none_in_home(warmed: tuple[Path, Path]) -> None:
    cache, home = warmed
    assert {path.name for path in cache.iterdir()} >= {"fxgraph", "aotautograd", "manifests"}
    assert not list(home.rglob("*.so"))


def test_the_folder_of_torchinductor_cache_dir_is_used(run_cli: Any, model: str, warmed: tuple[Path, Path]) -> None:
    arguments = [
        item for item in warm(model, warmed[0], "--require-hit") if item not in ("--cache-dir", str(warmed[0]))
    ]
    result = run_cli(*arguments, TORCHINDUCTOR_CACHE_DIR=str(warmed[0]))
    assert result.returncode == 0, result.stderr
    assert outcomes(result) == ["hit"] * NUMBER_OF_BUCKETS


def test_other_buckets_are_misses_and_with_another_context_the_old_ones_stay_hits(
    run_cli: Any, model: str, warmed: tuple[Path, Path], tmp_path: Path
) -> None:
    """Programs must not depend on the size of the KV cache."""
    cache = tmp_path / "cache"
    shutil.copytree(warmed[0], cache)
    more = {"16,48": "16,32,48", "3": "3,5"}
    result = run_cli(*(more.get(item, item) for item in warm(model, cache, "--require-hit", "--context", "200")))
    assert result.returncode == 6
    assert "2 of 5 buckets had to compile: prefill:32, decode:5" in result.stderr
    assert outcomes(result) == ["hit", "miss", "hit", "hit", "miss"]


@pytest.mark.long  # two cold starts
def test_two_processes_may_warm_one_folder_at_once(
    run_cli: Any, run_cli_in: RunCLI, model: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor() as pool:
        homes = (tmp_path / "home0", tmp_path / "home1")
        runs = list(pool.map(lambda home: run_cli_in(home, *warm(model, cache)), homes))
    assert all("miss" in outcomes(run) for run in runs), "the processes did not compile at the same time"
    after = run_cli(*warm(model, cache, "--require-hit"))
    assert after.returncode == 0, after.stderr


def files_in(folder: Path) -> set[Path]:
    return {Path(parent, name) for parent, _, names in os.walk(folder) for name in names}


@pytest.mark.parametrize(
    ("finished_buckets", "number", "environ"),
    [
        pytest.param(0, signal.SIGKILL, COMPILES, marks=pytest.mark.long),
        (1, signal.SIGINT, {}),
        pytest.param(2, signal.SIGKILL, {}, marks=pytest.mark.long),
    ],
    ids=["0", "1", "2"],
)
def test_the_run_after_a_kill_recovers(
    run_cli: Any,
    fork_server: ForkServer,
    model: str,
    tmp_path: Path,
    finished_buckets: int,
    number: signal.Signals,
    environ: dict[str, str],
) -> None:
    """A signal when the bucket after `finished_buckets` begins to write: the finished buckets hit afterwards.

    After Ctrl-C, exit handlers run; after kill -9, none do.
    """
    cache = tmp_path / "cache"
    # A process that a shell has started in the background ignores Ctrl-C, and its children do too.
    script = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = fork_server.popen(*warm(model, cache), environ=cli_environment(tmp_path, **environ), script=script)
    assert run.stderr is not None
    expected_line = f"[{finished_buckets}/" if finished_buckets else "compile ..."
    for line in run.stderr:
        if line.startswith(expected_line):
            break
    before = files_in(cache)
    while run.poll() is None and files_in(cache) == before:
        time.sleep(0.01)
    os.killpg(run.pid, number)
    run.wait()
    assert run.returncode == (-number if number == signal.SIGKILL else 130), "the run ended before the signal"
    assert not list((cache / "manifests").glob("*.json")), "a manifest is written after the last bucket"
    assert len(list(cache.glob(".start-*"))) == 1
    again = run_cli(*warm(model, cache))
    assert not list(cache.glob(".start-*")), "the staging folder of the killed run"
    assert ("buckets or packages reused from starts that did not finish" in again.stderr) == (finished_buckets > 0)
    assert ("had no buckets or packages to reuse" in again.stderr) == (finished_buckets == 0)
    assert outcomes(again).count("hit") >= finished_buckets
    assert outcomes(again).count("miss") >= 1, "the kill came before the last compilation"
    last = run_cli(*warm(model, cache, "--require-hit"))
    assert last.returncode == 0, last.stderr


def test_a_corrupt_manifest_is_named_and_without_it_nothing_is_used(
    run_cli: Any, model: str, warmed: tuple[Path, Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(warmed[0], cache)
    (manifest,) = (cache / "manifests").glob("*.json")
    manifest.write_bytes(manifest.read_bytes()[:200])
    result = run_cli(*warm(model, cache))
    assert result.returncode == 5
    assert f"error: the manifest {manifest} is corrupt" in result.stderr and "--on-bad-cache rebuild" in result.stderr
    manifest.unlink()
    result = run_cli(*warm(model, cache))
    assert outcomes(result) == ["miss"] * NUMBER_OF_BUCKETS


@contextlib.contextmanager
def read_only(folder: Path, filled: Path) -> Iterator[Path]:
    """A tmpfs with a copy of `filled`, mounted read-only, for root too."""
    with mounted_tmpfs(folder):
        shutil.copytree(filled, folder, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, modification time and content of every folder and file."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"",
        )
        for path in [folder, *folder.rglob("*")]
    }  # fmt: skip


def report_of(arguments: list[str]) -> list[str]:
    """The same command without --json."""
    return [item for item in arguments if item != "--json"]


def check_served_from_a_copy(result: subprocess.CompletedProcess[str], folder: Path, temporary: Path) -> None:
    assert result.returncode == 0, result.stderr
    assert f"{NUMBER_OF_BUCKETS} of {NUMBER_OF_BUCKETS} buckets were cache hits" in result.stdout
    assert f"cache folder {folder} (read-only: used a private copy)" in result.stdout.splitlines()
    assert not list(temporary.glob("tcdeploy-*")), "the copy was deleted at exit"


def test_a_read_only_cache_folder_serves_from_a_private_copy(
    run_cli: Any, model: str, warmed: tuple[Path, Path], tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with read_only(tmp_path / "read-only", warmed[0]) as folder:
        before = state_of(folder)
        result = run_cli(*report_of(warm(model, folder, "--require-hit")), TMPDIR=str(temporary))
        assert state_of(folder) == before
    check_served_from_a_copy(result, folder, temporary)


def test_a_cache_folder_without_write_permission_serves_from_a_private_copy(
    model: str, warmed: tuple[Path, Path], tmp_path: Path
) -> None:
    """Root respects file modes only without the capabilities to override them."""
    without_override = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if subprocess.run([*without_override, "true"], capture_output=True).returncode:
        pytest.skip("needs root and setpriv")
    folder, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    shutil.copytree(warmed[0], folder)
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = state_of(folder)
    result = subprocess.run(
        [*without_override, *cli_command(*report_of(warm(model, folder, "--require-hit")))],
        capture_output=True, text=True, env=cli_environment(tmp_path, TMPDIR=str(temporary)),
    )  # fmt: skip
    assert state_of(folder) == before
    for path in paths:
        path.chmod(0o755)
    check_served_from_a_copy(result, folder, temporary)


def test_a_read_only_cache_folder_without_the_plan_is_a_clear_error(
    run_cli: Any, model: str, warmed: tuple[Path, Path], tmp_path: Path
) -> None:
    with read_only(tmp_path / "read-only", warmed[0]) as folder:
        result = run_cli(*[item if item != "16,48" else "16,64" for item in warm(model, folder)])
    assert result.returncode == 1
    assert f"error: the cache folder {folder} is on a read-only file system" in result.stderr
    assert "hint:" in result.stderr and "--cache-dir" in result.stderr and "Traceback" not in result.stderr


def test_a_read_only_cache_folder_without_room_for_a_copy_is_a_clear_error(
    run_cli: Any, model: str, warmed: tuple[Path, Path], tmp_path: Path
) -> None:
    """TMPDIR has some space, too little for the copy: Python would skip a full one."""
    with (
        read_only(tmp_path / "read-only", warmed[0]) as folder,
        mounted_tmpfs(tmp_path / "tmp", "-o", "size=512k") as small,
    ):
        result = run_cli(*warm(model, folder), TMPDIR=str(small))
        left = list(small.glob("tcdeploy-*"))
    assert result.returncode == 7, result.stderr
    [error] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    match = re.search(rf"the cache folder {folder} cannot be written, and {small} has no room .* of (\d+) bytes", error)
    assert match is not None and int(match[1]) > 512 << 10, error
    assert "TMPDIR" in result.stderr and "Traceback" not in result.stderr
    assert left == []


def test_a_cache_folder_that_is_a_file_is_a_clear_error(run_cli: Any, model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    result = run_cli(*warm(model, tmp_path / "file"))
    assert result.returncode == 1
    assert f"error: the cache folder {tmp_path / 'file'} cannot be written" in result.stderr
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_folder_without_room_for_the_buckets_is_refused_before_compiling(
    run_cli: Any, model: str, tmp_path: Path
) -> None:
    with mounted_tmpfs(tmp_path / "small", "-o", "size=2m") as folder:
        result = run_cli(*warm(model, folder))
        left = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    assert result.returncode == 7
    assert "MiB free" in result.stderr and "may need" in result.stderr
    assert left == [], "nothing was compiled"


def test_a_disk_that_fills_up_while_warming_keeps_cached_buckets(
    run_cli: Any, model: str, warmed: tuple[Path, Path], tmp_path: Path
) -> None:
    """A valid cache on a disk with 300 KB free: a new bucket cannot be written, the others still hit."""
    with mounted_tmpfs(tmp_path / "full", "-o", "size=60m") as folder:
        shutil.copytree(warmed[0], folder, dirs_exist_ok=True)
        free = shutil.disk_usage(folder).free
        (folder / "filler").write_bytes(b"x" * (free - 300_000))
        arguments = [item if item != "16,48" else "16,48,64" for item in warm(model, folder)]
        result = run_cli(*arguments)
        assert result.returncode == 7, result.stderr
        assert f"error: the disk of the cache folder {folder} is full" in result.stderr
        assert "Traceback" not in result.stderr
        (folder / "filler").unlink()
        again = run_cli(*warm(model, folder, "--require-hit"))
    assert again.returncode == 0, again.stderr
