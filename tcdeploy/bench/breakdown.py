"""GPU time of a decode step by kernel kind, and the gaps between kernels, from torch's profiler.

The profiler delays each kernel launch a little, so the gaps are longer than without it. Use the shares, and take the
step time from the benchmark row that holds the breakdown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from tcdeploy.bench.stats import median

REPLAYS = 5
TOP_KERNELS = 12
KINDS = ("gemm", "attention", "sampling", "other")
KERNEL_KINDS = tuple(  # the first match counts; FlashAttention's kernel names contain CUTLASS types
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("other", r"^triton_poi_"),  # pointwise: "mm" in its name refers to the producer of its input
        ("sampling", r"advance|argmax|sampl|logprob|multinomial|topk|sort|cumsum"),
        ("attention", r"flash|fmha"),
        (
            "gemm",
            r"gemm|gemv|dequantise|group_(many_)?pairs|top_k|nvjet|cutlass|cublas|xmma|splitk"
            r"|(^|_)(linear|vector|addmm|mm|bmm|mv)(_|$)",
        ),
        ("attention", r"^_\w+_kernel$"),  # kernels of this package; Inductor's names begin with triton_
    )
)


class KernelRun(NamedTuple):
    """One execution of a kernel. Times in microseconds from an arbitrary origin."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class KernelTime:
    name: str
    kind: str
    count: float  # executions per step
    us: float  # per step


@dataclass(frozen=True)
class Breakdown:
    """Microseconds per step, medians over replays. The four kinds and `gap_us` add up to `step_us`, except for noise.

    With programmatic dependent launch a kernel starts before its predecessor ends, and waits. The overlap counts for
    the predecessor. `gap_us` is the time in which no kernel ran.
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


def profile_replays(restore: Callable[[], object], step: Callable[[], object]) -> list[list[KernelRun]]:
    """The kernels of REPLAYS steps on a GPU. A step before them includes the profiler's own start, and is discarded."""
    replays = []
    for _ in range(REPLAYS + 1):
        restore()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize()
        replays.append(_kernels_of(profiled))
    return replays[1:]


def _kernels_of(profiled: profile) -> list[KernelRun]:
    """The events on the device, without the annotations that the profiler adds around them."""
    return [
        KernelRun(event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def trim_overlap(kernels: list[KernelRun]) -> list[KernelRun]:
    """Kernels in order of their ends, each starting no earlier than its predecessor ended."""
    trimmed, busy_until = [], float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.stop):
        trimmed.append(kernel._replace(start=max(kernel.start, busy_until)))
        busy_until = kernel.stop
    return trimmed


def summarize_replays(replays: list[list[KernelRun]]) -> Breakdown:
    """`replays`: the kernels of one step each, in any order."""
    replays = [trim_overlap(replay) for replay in replays]

    def busy_us(*kinds: str) -> float:
        return median(
            sum(kernel.stop - kernel.start for kernel in replay if kernel_kind(kernel.name) in kinds)
            for replay in replays
        )

    return Breakdown(
        replays=len(replays),
        step_us=median(_span_us(replay) for replay in replays),
        kernel_us=busy_us(*KINDS),
        gap_us=median(gap_us(replay) for replay in replays),
        **{f"{kind}_us": busy_us(kind) for kind in KINDS},
        top=_top_kernels(replays),
    )


def gap_us(kernels: list[KernelRun]) -> float:
    """Time between the first and the last kernel in which none ran."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    gap, busy_until = 0.0, ordered[0].start if ordered else 0.0
    for kernel in ordered:
        gap += max(0.0, kernel.start - busy_until)
        busy_until = max(busy_until, kernel.stop)
    return gap


def kernel_kind(name: str) -> str:
    return next((kind for kind, pattern in KERNEL_KINDS if pattern.search(name)), "other")


def _span_us(kernels: list[KernelRun]) -> float:
    if not kernels:
        return 0.0
    return max(kernel.stop for kernel in kernels) - min(kernel.start for kernel in kernels)


def _top_kernels(replays: list[list[KernelRun]]) -> tuple[KernelTime, ...]:
    """The kernels with the longest total time per step, averaged over the replays."""
    runs = ((kernel.name, kernel.stop - kernel.start) for replay in replays for kernel in replay)
    longest = rank_by_time(runs, len(replays))[:TOP_KERNELS]
    return tuple(KernelTime(name, kernel_kind(name), count, us) for name, count, us in longest)


def rank_by_time(runs: Iterable[tuple[str, float]], steps: int) -> list[tuple[str, float, float]]:
    """(name, executions per step, us per step), longest first. `runs`: name and us of each execution in all steps."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, us in runs:
        times[name].append(us)
    rows = [(name, len(values) / steps, sum(values) / steps) for name, values in times.items()]
    return sorted(rows, key=lambda row: -row[2])
