"""Leases and the folder lock between real processes, killed ones included."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tcdeploy.cache.folder import leases
from tcdeploy.errors import TcdeployError
from tests.conftest import ROOT


@contextlib.contextmanager
def another_process(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed its first line; killed on exit."""
    run = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    try:
        yield run
    finally:
        kill(run)


def kill(run: subprocess.Popen[str]) -> None:
    run.send_signal(signal.SIGKILL)
    run.wait()


HOLD_LEASE = """
import sys, time
from tcdeploy.cache.folder import leases
leases.acquire_lease(sys.argv[1], "plan")
leases.acquire_lease(sys.argv[1], "plan")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(60)  # instead of LOCK_TIMEOUT_S
def test_a_plan_is_leased_until_the_last_process_with_a_lease_ends(tmp_path: Path) -> None:
    assert not leases.is_leased(tmp_path, "plan")
    with another_process(HOLD_LEASE, tmp_path) as first:
        assert leases.is_leased(tmp_path, "plan") and leases.is_leased(tmp_path, "plan")
        assert not leases.is_leased(tmp_path, "another plan")
        with another_process(HOLD_LEASE, tmp_path) as second:
            kill(first)
            assert leases.is_leased(tmp_path, "plan"), "the second process still holds its lease"
            kill(second)
            assert not leases.is_leased(tmp_path, "plan")


def test_this_process_s_own_lease_counts(tmp_path: Path) -> None:
    leases.acquire_lease(str(tmp_path), "plan")
    assert leases.is_leased(tmp_path, "plan")


ENTER_FIVE_TIMES = """
import os, sys, time, traceback
from tcdeploy.cache.folder import leases
folder = sys.argv[1]
children = []
for _ in range(8):
    if child := os.fork():
        children.append(child)
        continue
    try:
        for _ in range(5):
            with leases.folder_lock(folder):
                os.close(os.open(f"{folder}/inside", os.O_CREAT | os.O_EXCL))
                time.sleep(0.01)
                os.unlink(f"{folder}/inside")
                with open(f"{folder}/done", "a") as file:
                    file.write("x")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
print("ready", flush=True)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


@pytest.mark.timeout(60)
def test_eight_processes_enter_the_lock_one_at_a_time(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with leases.folder_lock(tmp_path):  # all eight wait before the first enters
            run = stack.enter_context(another_process(ENTER_FIVE_TIMES, tmp_path))
            time.sleep(0.1)
            assert not (tmp_path / "done").exists()
        assert run.wait(timeout=60) == 0
    assert (tmp_path / "done").read_text() == "x" * 40


STAY_INSIDE = """
import sys, time
from tcdeploy.cache.folder import leases
with leases.folder_lock(sys.argv[1]):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.timeout(60)
def test_killing_a_process_inside_the_lock_releases_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LOCK_TIMEOUT_S", 5.0)
    with another_process(STAY_INSIDE, tmp_path) as run:
        kill(run)
        with leases.folder_lock(tmp_path):
            assert (tmp_path / leases.LOCK_FILE).exists()


@pytest.mark.timeout(60)
def test_waiting_for_the_lock_is_logged_and_waiting_too_long_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "LOCK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(leases, "WARN_AFTER_S", 0.05)
    with another_process(STAY_INSIDE, tmp_path):
        start = time.monotonic()
        with pytest.raises(TcdeployError, match="another process has held the cache folder") as caught, (
            leases.folder_lock(tmp_path)
        ):  # fmt: skip
            pytest.fail("two processes are inside")
        assert str(tmp_path) in caught.value.message and time.monotonic() - start >= 0.2
    # Exporters of other tests may log at any time.
    [warning] = [record.getMessage() for record in caplog.records if record.name == "tcdeploy.cache"]
    assert warning.startswith("waiting for another process") and warning.endswith(f"the cache folder {tmp_path}")


def test_an_exception_inside_the_lock_releases_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LOCK_TIMEOUT_S", 0.2)
    with pytest.raises(ValueError), leases.folder_lock(tmp_path):
        raise ValueError
    with leases.folder_lock(tmp_path):
        pass
