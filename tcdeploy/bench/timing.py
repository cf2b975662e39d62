"""How time is taken: on a GPU by CUDA events, on a CPU by the process's clock. Both give seconds.

An event is stamped by the device when it gets there, so what the host does meanwhile is not in the figure, unless the
device has to wait for it. To keep the launch of a step out of the step's own time, `step_seconds` first gives the
device something else to do: the launch is over before that ends. A step of hundreds of launches (no CUDA graph)
outlasts it, and then its gaps are in the figure, as they are in life.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

FILLER_BYTES = 256 << 20  # half of it copied onto the other half, and four times: a third of a ms on an H100
FILLER_COPIES = 4
WARMUP_STEPS = 2


class Timestamps:
    """Points in time along a run, without making the host wait at any of them."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._timestamps: list[Any] = []
        synchronize(device)
        self.record()

    def record(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._timestamps.append(event)
        else:
            self._timestamps.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of every mark since the first, which is when this began. Waits for the device."""
        first, *later = self._timestamps
        if not self._is_cuda:
            return [record - first for record in later]
        torch.cuda.synchronize()
        return [first.elapsed_time(record) / 1e3 for record in later]


def step_seconds(device: str, restore: Callable[[], object], step: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of `step` alone, `repeats` times; `restore` puts back what a step changes, and is not timed."""
    filler = _Filler(device)
    for _ in range(WARMUP_STEPS):
        restore()
        step()
    found = []
    for _ in range(repeats):
        restore()
        synchronize(device)
        filler.run()
        found.append(_time_once(device, step))
    return found


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
    """Work that hides the launch of what comes after it; nothing on a CPU, where a call is the work."""

    def __init__(self, device: str) -> None:
        self._halves = None
        if device == "cuda":
            self._halves = torch.empty(2, FILLER_BYTES // 2, dtype=torch.uint8, device=device)

    def run(self) -> None:
        if self._halves is not None:
            for _ in range(FILLER_COPIES):
                self._halves[0].copy_(self._halves[1])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
