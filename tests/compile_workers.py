"""The compile workers of a process, and whether they have ended."""

from __future__ import annotations

import os
import time
from pathlib import Path


def compile_workers(process_id: int) -> list[int]:
    """The process ids of the compile workers that a process has started."""
    return [
        int(child)
        for task in Path(f"/proc/{process_id}/task").iterdir()
        for child in (task / "children").read_text().split()
        if b"compile_worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def wait_until_ended(process_id: int) -> None:
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{process_id}") and "Z" not in Path(f"/proc/{process_id}/stat").read_text():
        assert time.monotonic() < deadline, f"process {process_id} still runs"
        time.sleep(0.05)
