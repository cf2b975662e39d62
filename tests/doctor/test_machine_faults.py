"""`tcdeploy doctor` on this machine with one deliberate fault: the first line names it, and the exit code is 6.

The command runs in the test process. The process that imports torch runs once, with the first test.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from tcdeploy.cli import app as cli
from tcdeploy.cli import process
from tests.bundle.fake_caches import make_small, path_of
from tests.conftest import PACKAGES, mounted_tmpfs

FINDINGS = 6  # exit code


class Outcome(NamedTuple):
    code: int
    lines: list[str]
    stderr: str

    @property
    def first_line(self) -> str:
        return self.lines[0]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def doctor(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Call the command, without the variables of the tests."""
    for name in [name for name in os.environ if name.startswith(("TCDEPLOY_", "TORCHINDUCTOR_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(tempfile, "tempdir", None)  # where Python caches TMPDIR
    monkeypatch.setattr(process, "configure_process", lambda: None)
    monkeypatch.setattr(cli, "configure_process", lambda: None)

    def run(*arguments: str) -> Outcome:
        stdout, stderr = io.StringIO(), io.StringIO()
        command = ["tcdeploy", "doctor", "--cache-dir", str(cache), "--port", "0", *arguments]
        with (
            patch.object(sys, "argv", command), redirect_stdout(stdout), redirect_stderr(stderr),
            pytest.raises(SystemExit) as exit_,
        ):  # fmt: skip
            cli.main()
        assert isinstance(exit_.value.code, int)
        return Outcome(exit_.value.code, stdout.getvalue().splitlines(), stderr.getvalue())

    return run


def make_program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_without_a_fault_there_is_no_finding(doctor: Callable[..., Outcome]) -> None:
    done = doctor()
    assert (done.code, done.stderr) == (0, ""), done.lines
    assert done.first_line.startswith("no findings: ")
    assert not any(line.startswith("finding") for line in done.lines)


def test_json_has_stable_keys(doctor: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    done = doctor("--json")
    document = json.loads("\n".join(done.lines))
    assert (done.code, document["command"], document["findings"]) == (FINDINGS, "doctor", 1)
    assert set(document) == {"schema", "command", "created", "findings", "results", "report"}
    worst = document["results"][0]
    assert set(worst) == {"check", "state", "summary", "cure", "is_blocking"}
    assert (worst["check"], worst["state"], worst["cure"]) == ("variables", "finding", "unset TORCH_COMPILE_DISABLE")
    assert {item["state"] for item in document["results"]} <= {"ok", "note", "finding"}
    assert "finding: variables: TORCH_COMPILE_DISABLE=1" in document["report"]


def check_fault(done: Outcome, first_line: str, cure: str) -> None:
    assert done.code == FINDINGS, done.lines
    assert done.first_line.startswith(first_line)
    table = " ".join(done.lines).split("note ")[0]
    assert f"cure: {cure}" in " ".join(table.split())
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_no_compiler(doctor: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_fault(doctor(), "C++ compiler: the C++ compiler g++ is missing (it is not on PATH)", "install g++")


def test_a_broken_compiler(doctor: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_program(tmp_path / "bin", "broken++", "echo 'cc1plus: error: no such file' >&2; exit 1")
    monkeypatch.setenv("CXX", str(tmp_path / "bin" / "broken++"))
    check_fault(
        doctor(),
        f"C++ compiler: {tmp_path}/bin/broken++ cannot link a library: cc1plus: error: no such file",
        "install g++ again",
    )


def test_a_compiler_that_links_its_runtime_statically(
    doctor: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(tmp_path / "bin", "static++", 'exec g++ -static-libstdc++ "$@"')
    monkeypatch.setenv("CXX", str(tmp_path / "bin" / "static++"))
    done = doctor()
    check_fault(done, "C++ compiler: ", "set CXX to a compiler")
    assert "links libstdc++ statically" in done.first_line


def test_a_cache_folder_that_others_can_write(doctor: Callable[..., Outcome], cache: Path) -> None:
    cache.chmod(0o777)
    check_fault(
        doctor(), f"cache folder: the cache folder {cache} can be changed by every user", "use a folder that only"
    )
    assert doctor("--trust-cache-dir").code == 0


def test_a_cache_folder_on_a_read_only_disk(doctor: Callable[..., Outcome], cache: Path) -> None:
    with mounted_tmpfs(cache, "-o", "ro"):
        check_fault(
            doctor(),
            f"cache folder: the cache folder {cache} is on a read-only file system",
            "choose a writable folder",
        )


def test_a_read_only_cache_folder_with_a_plan_is_used(doctor: Callable[..., Outcome], cache: Path) -> None:
    with mounted_tmpfs(cache):
        make_small(cache)
        remounted = subprocess.run(["mount", "-o", "remount,ro", str(cache)], capture_output=True, text=True)
        if remounted.returncode:
            pytest.skip(f"cannot remount a tmpfs here: {remounted.stderr}")
        done = doctor()
        text = " ".join(" ".join(done.lines).split())  # a table wraps long results
        assert done.code == 0 and f"{cache} is on a read-only file system; starts use a private" in text


def test_a_full_disk(doctor: Callable[..., Outcome], cache: Path) -> None:
    with mounted_tmpfs(cache, "-o", "size=64k"):
        (cache / "large").write_bytes(b"x" * (64 << 10))
        check_fault(
            doctor(),
            f"cache folder: the disk of the cache folder {cache} is full",
            "free space, or choose another --cache-dir",
        )


def test_a_disk_that_is_nearly_full(doctor: Callable[..., Outcome], cache: Path) -> None:
    with mounted_tmpfs(cache, "-o", "size=8m"):
        check_fault(doctor(), "disk space: 8.0 MiB free for the cache folder", "free space on this disk")


def test_a_taken_port(doctor: Callable[..., Outcome]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_fault(doctor("--port", str(port)), f"port: port {port} is in use", "pass another --port")
    assert doctor("--port", str(port)).code == 0


def test_a_torch_that_is_too_old(
    doctor: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "packages" / "torch-2.9.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    check_fault(doctor(), "torch: torch 2.9.1 is too old; tested are 2.11 to", "pip install 'torch>=2.11'")


@pytest.mark.parametrize(
    ("name", "value", "effect"),
    [
        ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1", "torch's caches are disabled"),
        ("TORCHINDUCTOR_FX_GRAPH_CACHE", "0", "Inductor's cache is disabled"),
        ("TRITON_INTERPRET", "true", "Triton kernels run in Python"),
    ],
)
def test_a_variable_that_disables_caches_or_compilation(
    name: str, value: str, effect: str, doctor: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    check_fault(doctor(), f"variables: {name}={value}: {effect}", f"unset {name}")


def test_variables_without_harm_are_notes(doctor: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    done = doctor()
    assert done.code == 0
    [line] = [line for line in done.lines if line.split()[1:2] == ["variables"]]
    assert line.startswith("note") and line.rstrip().endswith(": TORCHINDUCTOR_MAX_AUTOTUNE")


def test_an_unknown_variable_of_tcdeploy(doctor: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCDEPLOY_BATCH_SIZE", "1")
    done = doctor()
    assert done.first_line == "variables: unknown variable TCDEPLOY_BATCH_SIZE; the nearest is TCDEPLOY_BATCH_SIZES"
    assert done.code == FINDINGS


def test_a_truncated_manifest(doctor: Callable[..., Outcome], cache: Path) -> None:
    path = path_of(cache, make_small(cache))
    path.write_text(path.read_text()[:-400])
    check_fault(doctor(), f"plans: the manifest {path} is corrupt", "start its plan with --on-bad-cache rebuild")


def test_a_plan_of_another_machine_is_a_note(doctor: Callable[..., Outcome], cache: Path) -> None:
    manifest = make_small(cache)
    done = doctor()
    assert done.code == 0
    text = " ".join(" ".join(done.lines).split())
    assert "1 of 1 were made for another machine or version, and their programs would be compiled again: " in text
    assert f"{manifest.plan['key']} ({manifest.plan['model']}): " in text


def test_a_folder_for_temporary_files_that_cannot_be_written(
    doctor: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    check_fault(
        doctor(),
        f"temporary files: TMPDIR={tmp_path}/missing cannot be written: No such file or directory; /",
        "create the folder, or set TMPDIR",
    )


def test_a_folder_for_temporary_files_without_execution(
    doctor: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted_tmpfs(tmp_path / "noexec", "-o", "noexec") as folder:
        monkeypatch.setenv("TMPDIR", str(folder))
        check_fault(doctor(), f"temporary files: {folder} is mounted with noexec", "set TMPDIR to a folder")


def test_a_cache_folder_without_execution(doctor: Callable[..., Outcome], cache: Path) -> None:
    with mounted_tmpfs(cache, "-o", "noexec"):
        check_fault(
            doctor(),
            f"cache folder: the cache folder {cache} is mounted with noexec",
            "choose a folder on another disk",
        )


def test_leftovers_of_killed_starts_are_a_note(doctor: Callable[..., Outcome], cache: Path) -> None:
    (cache / ".unpack-killed").mkdir()
    (cache / ".unpack-killed" / "file").write_bytes(b"x" * (1 << 20))
    done = doctor()
    assert done.code == 0
    [line] = [line for line in done.lines if line.split()[1:2] == ["leftovers"]]
    assert line.startswith("note") and "1 folders of starts or unpacks that did not finish, 1.0 MiB" in line


def test_a_hub_that_does_not_answer(doctor: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    done = doctor()
    check_fault(done, "Hub: HF_ENDPOINT cannot be reached: Connection refused", "check the network")
    assert doctor("--offline").code == 0


def run_new(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a new process, which finds packages in PYTHONPATH first."""
    command = [sys.executable, "-m", "tcdeploy", "doctor", "--offline", "--port", "0", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": PACKAGES, **environ}
    )


def make_package(folder: Path, name: str, sources: dict[str, str]) -> str:
    """A package that hides an installed one. Returns the search path for it."""
    for file, source in sources.items():
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_text(source)
    return f"{folder}{os.pathsep}{PACKAGES}"


def test_a_torch_that_cannot_be_imported(tmp_path: Path, cache: Path) -> None:
    source = "raise ImportError('libcudart.so.13: cannot open shared object file')"
    done = run_new("--cache-dir", str(cache), PYTHONPATH=make_package(tmp_path, "torch", {"__init__.py": source}))
    lines = done.stdout.splitlines()
    assert (done.returncode, "Traceback" in done.stderr) == (FINDINGS, False)
    assert lines[0].startswith("torch: torch 2.") and "cannot be imported: ImportError: libcudart.so.13" in lines[0]
    states = {line.split("  ")[0]: line for line in lines if line.startswith(("finding", "note", "ok"))}
    assert states["note"] and "C++ compiler" in done.stdout and "could not be checked" in done.stdout


def test_packages_without_bytecode(tmp_path: Path, cache: Path) -> None:
    """The package has 250 empty modules, and then imports the installed one of its name."""
    names = [f"module_{number}" for number in range(250)]
    source = f"""
import importlib, sys
for name in {names}:
    importlib.import_module("transformers." + name)
sys.path.remove({str(tmp_path)!r})
for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
    del sys.modules[name]
import transformers
"""
    path = make_package(tmp_path, "transformers", {"__init__.py": source, **{f"{name}.py": "" for name in names}})
    environ = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = run_new("--json", "--cache-dir", str(cache), **environ)
    document: dict[str, Any] = json.loads(done.stdout)
    worst = document["results"][0]
    assert (done.returncode, document["findings"], worst["check"]) == (FINDINGS, 1, "bytecode")
    assert "imported modules have no bytecode (transformers 25" in worst["summary"]
    assert "python -m compileall" in worst["cure"]
