"""Where a decode step's time goes on the GPU: its kernels by kind, and the gaps between them.

torch's profiler names every kernel that a replayed graph launches. Under it each kernel takes a little longer to start,
so the gaps here are longer than in life: read the shares, and take the step's time from the row they stand in.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from tcdeploy.bench.stats import median

REPLAYS = 5
TOP_KERNELS = 12
KERNEL_KINDS = tuple(  # the first that is found in a kernel's name; FlashAttention's names hold CUTLASS types
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("other", r"^triton_poi_"),  # pointwise: a product in its name is where its input came from
        ("sampling", r"advance|^_argmax_kernel$|argmax|sampl|multinomial|topk|sort|cumsum"),
        ("attention", r"flash|fmha"),
        ("gemm", r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|(^|_)(linear|vector|addmm|mm|bmm|mv)(_|$)"),
        ("attention", r"^_\w+_kernel$"),  # ours; Inductor's begin with triton_
    )
)


class Kernel(NamedTuple):
    """One run of a kernel, in microseconds since some beginning."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class KernelTime:
    name: str
    kind: str
    count: float  # of runs in a step
    us: float  # in a step


@dataclass(frozen=True)
class Breakdown:
    """Microseconds in one step, medians over replays; the four kinds and `gap_us` are parts, and add up but for noise.

    A kernel that is launched early (programmatic dependent launch) waits for the one before it: that time is counted
    for the one before. `gap_us` is when none was running.
    """

    replays: int
    step_us: float  # from the first kernel's start to the last one's end
    kernel_us: float
    gap_us: float
    gemm_us: float
    attention_us: float
    sampling_us: float
    other_us: float
    top: tuple[KernelTime, ...]


def profile_step(restore: Callable[[], object], step: Callable[[], object]) -> Breakdown:
    """Profile `step` alone a few times. The first profile of a process starts the machinery and is thrown away."""
    replays = []
    for _ in range(REPLAYS + 1):
        restore()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize()
        replays.append(_kernels_of(profiled))
    return summarise_kernels(replays[1:])


def _kernels_of(profiled: profile) -> list[Kernel]:
    """What ran on the device, without the ranges that torch draws around it."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def trim_overlap(kernels: list[Kernel]) -> list[Kernel]:
    """Each kernel from the end of the one before, in the order of their ends: what it added to the step."""
    trimmed, busy_until = [], float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.stop):
        trimmed.append(kernel._replace(start=max(kernel.start, busy_until)))
        busy_until = kernel.stop
    return trimmed


def summarise_kernels(replays: list[list[Kernel]]) -> Breakdown:
    """Each replay is the kernels of one step, in any order."""
    replays = [trim_overlap(replay) for replay in replays]
    kinds = ("gemm", "attention", "sampling", "other")
    by_kind = {kind: median(_busy_us(_of_kind(replay, kind)) for replay in replays) for kind in kinds}
    return Breakdown(
        replays=len(replays),
        step_us=median(_span_us(replay) for replay in replays),
        kernel_us=median(_busy_us(replay) for replay in replays),
        gap_us=median(gap_us(replay) for replay in replays),
        **{f"{kind}_us": us for kind, us in by_kind.items()},
        top=_top_kernels(replays),
    )


def gap_us(kernels: list[Kernel]) -> float:
    """When no kernel was running, between the first and the last: overlapping ones leave no gap."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    gap, busy_until = 0.0, ordered[0].start if ordered else 0.0
    for kernel in ordered:
        gap += max(0.0, kernel.start - busy_until)
        busy_until = max(busy_until, kernel.stop)
    return gap


def kernel_kind(name: str) -> str:
    return next((kind for kind, pattern in KERNEL_KINDS if pattern.search(name)), "other")


def _of_kind(kernels: list[Kernel], kind: str) -> list[Kernel]:
    return [kernel for kernel in kernels if kernel_kind(kernel.name) == kind]


def _busy_us(kernels: list[Kernel]) -> float:
    return sum(kernel.stop - kernel.start for kernel in kernels)


def _span_us(kernels: list[Kernel]) -> float:
    if not kernels:
        return 0.0
    return max(kernel.stop for kernel in kernels) - min(kernel.start for kernel in kernels)


def _top_kernels(replays: list[list[Kernel]]) -> tuple[KernelTime, ...]:
    """The longest by total time in a step, averaged over the replays."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for kernel in (kernel for replay in replays for kernel in replay):
        total[kernel.name] += kernel.stop - kernel.start
        count[kernel.name] += 1
    longest = sorted(total, key=total.__getitem__, reverse=True)[:TOP_KERNELS]
    return tuple(
        KernelTime(name, kernel_kind(name), count[name] / len(replays), total[name] / len(replays)) for name in longest
    )
