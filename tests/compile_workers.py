"""The compile workers of a process, and whether they have ended."""

from __future__ import annotations

import time

import psutil


def compile_workers(process_id: int) -> list[psutil.Process]:
    """The compile workers that a process has started and that are still running."""
    workers = []
    for child in psutil.Process(process_id).children():
        try:
            if any("start.workers.worker" in argument for argument in child.cmdline()):
                workers.append(child)
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return workers


def wait_until_ended(workers: list[psutil.Process]) -> None:
    """Fail if a worker is still running after 10 seconds. A process that waits to be reaped has ended."""
    deadline = time.monotonic() + 10
    while running := [worker for worker in workers if _is_running(worker)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.05)


def _is_running(worker: psutil.Process) -> bool:
    try:
        return worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
