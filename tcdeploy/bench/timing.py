"""Timing in seconds: CUDA events on a GPU, `time.perf_counter` on a CPU.

The device timestamps an event when it reaches it, so host work is included only if the device waits for it. To exclude
launch latency, `step_seconds` first enqueues filler copies, which still run while the host launches the step. A step of
hundreds of kernel launches (without a CUDA graph) outlasts the filler; its launch gaps are then measured, as they occur
in production.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from tcdeploy.engine.warm.timing import synchronize

FILLER_BYTES = 256 << 20  # one half is copied onto the other; four copies take a third of a ms on an H100
FILLER_COPIES = 4
WARMUP_STEPS = 2


class Timestamps:
    """Timestamps on the device's stream. Recording one does not synchronize."""

    def __init__(self, device: str, waits: bool = True) -> None:
        """`waits`: for the work that has been enqueued before."""
        self._is_cuda = device == "cuda"
        self._timestamps: list[Any] = []
        if waits:
            synchronize()
        self.record()

    def record(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._timestamps.append(event)
        else:
            self._timestamps.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds from construction to each recorded timestamp. Waits for the device."""
        first, *later = self._timestamps
        if not self._is_cuda:
            return [timestamp - first for timestamp in later]
        torch.cuda.synchronize()
        return [first.elapsed_time(event) / 1e3 for event in later]


def step_seconds(device: str, restore: Callable[[], object], step: Callable[[], object], repeats: int) -> list[float]:
    """Time `step` in isolation `repeats` times. `restore` resets the state before each step, and is not timed."""
    num_copies = FILLER_COPIES if device == "cuda" else 0
    filler = torch.empty(2, FILLER_BYTES // 2 if num_copies else 0, dtype=torch.uint8, device=device)
    for _ in range(WARMUP_STEPS):
        restore()
        step()
    seconds = []
    for _ in range(repeats):
        restore()
        synchronize()
        for _ in range(num_copies):
            filler[0].copy_(filler[1])
        timestamps = Timestamps(device, waits=False)
        step()
        timestamps.record()
        seconds += timestamps.seconds()
    return seconds
