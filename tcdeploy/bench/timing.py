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

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._timestamps: list[Any] = []
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
    filler = _Filler(device)
    for _ in range(WARMUP_STEPS):
        restore()
        step()
    seconds = []
    for _ in range(repeats):
        restore()
        synchronize()
        filler.run()
        seconds.append(_time_once(device, step))
    return seconds


def _time_once(device: str, step: Callable[[], object]) -> float:
    if device != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class _Filler:
    """Device work that hides the launch latency of the work enqueued after it. Does nothing on a CPU."""

    def __init__(self, device: str) -> None:
        self._halves = None
        if device == "cuda":
            self._halves = torch.empty(2, FILLER_BYTES // 2, dtype=torch.uint8, device=device)

    def run(self) -> None:
        if self._halves is not None:
            for _ in range(FILLER_COPIES):
                self._halves[0].copy_(self._halves[1])
