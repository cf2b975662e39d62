"""Packages that another process builds: after the jit programs of `warm`, and beside a server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.cache.folder.layout import LEASES_DIR
from tcdeploy.cache.folder.leases import build_lock, folder_lock, is_folder_locked
from tcdeploy.cache.record.manifest import read_manifests
from tcdeploy.host import die_with_parent
from tcdeploy.host.progress import NullProgress
from tcdeploy.planning.environment import AOT_PACKAGES
from tcdeploy.planning.plan import make_plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.package_build import PackageBuild, build_packages
from tcdeploy.start.planned import Planned
from tests.bundle.fake_caches import flipped_on_disk
from tests.conftest import TINY, RunCLI
from tests.machines import LAPTOP, LLAMA_8B, make_recipe

FLAGS = ("--device", "cpu", "--buckets", "32", "--batch-sizes", "4")  # of the packages, without --programs


def planned_for(recipe: Recipe, **environment: Any) -> Planned:
    machine = dataclasses.replace(LAPTOP, **environment)
    plan = make_plan(recipe, machine, LLAMA_8B)
    return Planned(
        recipe=recipe, environment=machine, architecture=LLAMA_8B, plan=plan, generation_defaults=None,  # type: ignore[arg-type]
    )  # fmt: skip


def test_warm_starts_with_jit_programs_and_leaves_packages_too(
    run_cli: RunCLI, filled_packages: Path, filled_cache: Path, tmp_path: Path
) -> None:
    """The folder has packages and programs already, so this test makes none; tests/test_prewarm.py does."""
    folder = Path(shutil.copytree(filled_cache, tmp_path / "cache"))
    other_plans = set(read_manifests(folder))
    shutil.copytree(filled_packages, folder, dirs_exist_ok=True)
    arguments = ("warm", TINY, *FLAGS, "--cache-dir", str(folder), "--json")
    done = run_cli(*arguments)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["plan"]["programs"] == "jit"
    assert {bucket["outcome"] for bucket in document["buckets"]} == {"hit"}
    added = [manifest for key, manifest in read_manifests(folder).items() if key not in other_plans]
    manifests = {manifest.plan["programs"]: manifest for manifest in added}
    packages = document["packages"]
    assert (packages["plan_key"], packages["failure"]) == (manifests["aot"].plan["key"], "")
    assert packages["bytes"] == manifests["aot"].total_bytes and packages["seconds"] > 0
    assert [line.split()[0] for line in done.stderr.splitlines()].count("packages") >= 1, "a stage of the progress"
    assert document["cache_bytes"] == manifests["jit"].total_bytes

    again = json.loads(run_cli(*arguments, "--require-hit").stdout)
    assert again["packages"] == {**packages, "seconds": 0}, "with --require-hit they are only looked for"
    damaged = next(file.path for file in manifests["aot"].files if file.path.startswith("aot/"))
    with flipped_on_disk(folder / damaged, 9):
        refused = run_cli(*arguments, "--require-hit")
        assert refused.returncode == 5 and "are damaged" in refused.stderr, refused.stderr
    Path(folder, "manifests", f"{packages['plan_key']}.json").unlink()
    without = run_cli(*arguments, "--require-hit")
    assert without.returncode == 0 and json.loads(without.stdout)["packages"]["bytes"] == 0
    assert "warning: later starts use jit programs: no packages of this plan in the cache" in without.stderr


def test_a_build_that_fails_gives_the_message_of_its_error(tmp_path: Path) -> None:
    recipe = Recipe(model=TINY, device="none such", buckets=(32,))
    lines: list[str] = []
    result = PackageBuild(recipe, str(tmp_path / "cache"), on_message=lines.append).wait()
    assert "none such" in result.failure and not result.failure.startswith("error")
    assert (result.plan_key, result.bytes) == ("", 0) and any(line.startswith("error: ") for line in lines)


def test_a_model_without_packages_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcdeploy.start.package_build.PackageBuild", None)
    recipe = make_recipe(cache_dir=str(tmp_path))

    def reason(planned: Planned, folder: str = str(tmp_path)) -> str:
        return build_packages(planned.recipe, planned, folder, NullProgress()).failure

    assert "--region layer" in reason(planned_for(dataclasses.replace(recipe, region="blocks")))
    assert AOT_PACKAGES in reason(planned_for(recipe, missing_internals=((AOT_PACKAGES, "none"),)))
    assert reason(planned_for(recipe), "/private/copy") == f"{tmp_path} cannot be written"


@pytest.fixture
def sleeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageBuild]:
    """A build whose process, and a child of it, sleep."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsleep 600 & echo $! >&2; wait\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    lines: list[str] = []
    build = PackageBuild(Recipe(model=TINY), str(tmp_path), is_background=True, on_message=lines.append)
    while not lines:
        time.sleep(0.01)
    build.child = int(lines[0])  # type: ignore[attr-defined]
    yield build
    build.stop()


def state(pid: int) -> str:
    """R, S, T (stopped), Z (a zombie), or "" after its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for_state(pid: int, states: str) -> None:
    deadline = time.monotonic() + 30
    while (state(pid) or "-") not in states:
        assert time.monotonic() < deadline, state(pid)
        time.sleep(0.01)


def test_a_background_build_has_the_lowest_priority_and_is_paused_and_killed_with_its_children(sleeping: Any) -> None:
    pid, child = sleeping._process.pid, sleeping.child
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19 and os.sched_getscheduler(pid) == os.SCHED_IDLE
    assert os.getpgid(pid) == pid == os.getpgid(child)
    sleeping.pause()
    for each in (pid, child):
        wait_for_state(each, "T")
    assert sleeping.is_running
    sleeping.resume()
    for each in (pid, child):
        wait_for_state(each, "SR")
    sleeping.pause()
    sleeping.stop()
    wait_for_state(child, "-Z")
    assert sleeping.wait().failure == f"the process was killed by signal {signal.SIGKILL:d}"


PAUSED_BUILD = """
import sys, time
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.package_build import PackageBuild
lines = []
build = PackageBuild(Recipe(model={model!r}), {folder!r}, is_background=True, on_message=lines.append)
while not lines:
    time.sleep(0.01)
build.pause()
print(build._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_build_ends_with_the_process_that_started_it_even_while_paused(
    number: signal.Signals, tmp_path: Path
) -> None:
    script = PAUSED_BUILD.format(model=TINY, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for_state(pid, "T")
        parent.send_signal(number)
    try:
        wait_for_state(pid, "-Z")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def test_a_child_whose_parent_has_ended_already_does_nothing() -> None:
    not_the_parent = str(os.getppid())
    words = [sys.executable, "-m", "tcdeploy.host.die_with_parent", not_the_parent, "tcdeploy", "--version"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    words = die_with_parent.command("tcdeploy", "--version")
    assert subprocess.run(words, capture_output=True, text=True).stdout.startswith("tcdeploy ")


def test_warm_fails_if_the_folder_has_damaged_packages_which_later_starts_refuse(
    run_cli: RunCLI, filled_packages: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(filled_packages, tmp_path / "cache")
    package = min(folder.glob("aot/*/*.pt2"))
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 1
    package.write_bytes(content)
    done = run_cli("warm", TINY, *FLAGS, "--cache-dir", str(folder))
    assert done.returncode == 5, done.stderr
    assert f"{package.name} does not match its recorded sha256" in done.stderr
    assert "to build the packages again: --on-bad-cache rebuild" in done.stderr
    served = run_cli("generate", TINY, "x", *FLAGS, "--cache-dir", str(folder))
    assert served.returncode == 5, "so a warning of `warm` would not be enough"


def test_one_process_builds_the_packages_of_a_plan(tmp_path: Path) -> None:
    (tmp_path / LEASES_DIR).mkdir()
    with build_lock(tmp_path, "a") as first, build_lock(tmp_path, "a") as second, build_lock(tmp_path, "b") as other:
        assert (first, second, other) == (True, False, True)
    with build_lock(tmp_path, "a") as later:
        assert later
    with build_lock(tmp_path / "none", "a") as unwritable:
        assert not unwritable


def test_the_lock_of_a_folder_is_seen(tmp_path: Path) -> None:
    assert not is_folder_locked(tmp_path)
    with folder_lock(tmp_path):
        assert is_folder_locked(tmp_path)
    assert not is_folder_locked(tmp_path)
