"""The compile workers of a process, and whether they have ended."""

from __future__ import annotations

import psutil


def compile_workers(process_id: int) -> list[psutil.Process]:
    """The compile workers that a process has started and that are still running."""
    workers = []
    for child in psutil.Process(process_id).children():
        try:
            if any("compile_worker" in argument for argument in child.cmdline()):
                workers.append(child)
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return workers


def wait_until_ended(workers: list[psutil.Process]) -> None:
    """Fail if a worker is still running after 10 seconds."""
    _, running = psutil.wait_procs(workers, timeout=10)
    assert not running
