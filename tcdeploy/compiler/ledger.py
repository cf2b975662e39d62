"""Count what torch really did: programs, compiles, cache hits, graph breaks, and the seconds beside them.

The counters are torch's own; this is the one file that knows their names. Kernels that are timed we count ourselves: a
hit adds to torch's counter what was timed when the program was made. A bucket is a *hit* when it compiled
something and every program came from the cache, a *miss* when anything had to be generated, and *reused* when the
process held its programs already. Seconds stand beside the counts because a hit can still be slow.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch._dynamo.callback
import torch._dynamo.utils
from torch._inductor.runtime.benchmarking import benchmarker

from tcdeploy.cache import contents

_compile_starts = 0
_kernels_timed = 0


def _count_compile_start(args: object) -> None:
    global _compile_starts
    _compile_starts += 1


def _install_hooks() -> None:
    """Be called at every Dynamo compile, hit or miss. torch._dynamo.reset() forgets its listeners, so ask each time."""
    if _count_compile_start not in torch._dynamo.callback.callback_handler.start_callbacks:
        torch._dynamo.callback.on_compile_start(_count_compile_start)
    for name in ("benchmark_cpu", "benchmark_gpu"):  # what torch 2.11 to 2.13 time in this process
        if name not in vars(benchmarker):
            setattr(benchmarker, name, _with_count(getattr(benchmarker, name)))


def _with_count(benchmark: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(benchmark)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _kernels_timed
        _kernels_timed += 1
        return benchmark(*args, **kwargs)

    return counted


@dataclass(frozen=True)
class CompileCounts:
    """A reading, or the difference of two. `cache_*` count Inductor's graph cache."""

    compiles: int = 0
    programs: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bypasses: int = 0
    cache_write_errors: int = 0
    graph_breaks: int = 0
    cudagraph_skips: int = 0  # regions that torch's own CUDA graphs (graphs region) passed over
    kernels_timed: int = 0  # variants of kernels that torch timed to choose one; a warm start should need none
    kernels_compiled: int = 0  # beside programs that were found, too

    def __sub__(self, earlier: CompileCounts) -> CompileCounts:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(earlier)
        return CompileCounts(*(a - b for a, b in zip(mine, theirs, strict=True)))

    def __add__(self, other: CompileCounts) -> CompileCounts:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return CompileCounts(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def outcome(self) -> str:
        if self.cache_misses or self.cache_bypasses or self.kernels_compiled > 0 or self.cache_hits < self.programs:
            return "miss"
        return "hit" if self.cache_hits else "reused"


def read_counts() -> CompileCounts:
    """What has happened so far; compiles and timings are counted from the first reading on."""
    _install_hooks()
    counters = torch._dynamo.utils.counters
    inductor = counters["inductor"]
    return CompileCounts(
        compiles=_compile_starts,
        programs=counters["stats"]["unique_graphs"],
        cache_hits=inductor["fxgraph_cache_hit"],
        cache_misses=inductor["fxgraph_cache_miss"],
        cache_bypasses=inductor["fxgraph_cache_bypass"],
        cache_write_errors=inductor["fxgraph_cache_write_error"],
        cudagraph_skips=inductor["cudagraph_skips"],
        graph_breaks=sum(counters["graph_break"].values()),
        kernels_timed=_kernels_timed,
        kernels_compiled=_count_compiled_kernels(),
    )


def _count_compiled_kernels() -> int:
    """That Triton or a C++ compiler made for this process, Triton's launchers too; Inductor's workers aside.

    Inductor's entry of a program may be found while a kernel that it names is not: that is compiled beside the hit.
    Where programs are read back there are no workers (`programs.reading`).
    """
    triton = sys.modules.get("tcdeploy.torch_compat.triton_cache")  # Triton imports it, where there is one
    return contents.libraries_compiled + (triton.kernels_compiled if triton else 0)


@dataclass
class CompileStats:
    """Filled when the `with measure_compiles()` block ends."""

    seconds: float = 0.0
    counts: CompileCounts = field(default_factory=CompileCounts)

    def __add__(self, other: CompileStats) -> CompileStats:
        return CompileStats(self.seconds + other.seconds, self.counts + other.counts)


@contextmanager
def measure_compiles() -> Iterator[CompileStats]:
    """Wall seconds and counts of a block; the caller synchronises the device inside it."""
    found, before, start = CompileStats(), read_counts(), time.perf_counter()
    try:
        yield found
    finally:
        found.seconds = time.perf_counter() - start
        found.counts = read_counts() - before
