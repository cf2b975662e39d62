"""Compile statistics: counts of programs, compilations, cache hits and graph breaks, and seconds.

A bucket is a *hit* when it compiled something and every program came from the cache, a *miss* when any code was
generated, *uncached* when torch did not store that code, and *reused* when the process already had its programs. Where
the installed torch or Triton does not let us count (torch_compat), the outcome is *unknown*, never a hit. Seconds are
recorded too, because a hit can still be slow.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tcdeploy.cache.files import usage
from tcdeploy.torch_compat.dynamo import compile_counters
from tcdeploy.torch_compat.inductor import benchmarker
from tcdeploy.torch_compat.internal import is_imported

# Of this process: packages loaded from the cache folder, and packages compiled. programs/packages.py and aot.py count.
packages_loaded = packages_compiled = 0


@dataclass(frozen=True)
class CompileCounts:
    """A reading, or the difference of two. `cache_*` count Inductor's graph cache and ahead-of-time packages."""

    compiles: int = 0  # also of programs that came from the cache, but not of packages that were loaded
    programs: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bypasses: int = 0
    cache_write_errors: int = 0
    graph_breaks: int = 0
    cudagraph_skips: int = 0  # regions that torch's own CUDA graphs (--graphs region) did not capture
    kernels_timed: int = 0  # kernel variants that torch timed to choose one; a warm start should need none
    kernels_compiled: int = 0  # also those of programs that were cache hits
    is_complete: bool = True  # False if hits or compiled kernels could not be counted

    def __sub__(self, earlier: CompileCounts) -> CompileCounts:
        return self._combine(earlier, -1)

    def __add__(self, other: CompileCounts) -> CompileCounts:
        return self._combine(other, 1)

    def _combine(self, other: CompileCounts, sign: int) -> CompileCounts:
        names = [item.name for item in dataclasses.fields(self) if item.name != "is_complete"]
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in names}
        return CompileCounts(**sums, is_complete=self.is_complete and other.is_complete)

    @property
    def outcome(self) -> str:
        """hit, miss, uncached, reused or unknown."""
        if self.is_complete and (self.cache_bypasses or self.cache_hits + self.cache_misses < self.programs):
            return "uncached"
        if self.cache_misses or self.cache_bypasses or self.kernels_compiled > 0 or self.cache_hits < self.programs:
            return "miss"
        if not self.is_complete:
            return "unknown"
        return "hit" if self.cache_hits else "reused"


def read_counts() -> CompileCounts:
    """Totals of this process; timings count from the first call on."""
    benchmarker.count_kernel_timings()
    loaded, compiled = packages_loaded, packages_compiled
    packages = CompileCounts(compiles=compiled, programs=loaded + compiled, cache_hits=loaded, cache_misses=compiled)
    kernels_compiled, can_count_kernels = _count_compiled_kernels()
    return packages + CompileCounts(
        **compile_counters.read_counters(),
        kernels_timed=benchmarker.kernels_timed,
        kernels_compiled=kernels_compiled,
        is_complete=compile_counters.can_count() and can_count_kernels,
    )


def _count_compiled_kernels() -> tuple[int, bool]:
    """Kernels and libraries that Triton or a C++ compiler built in this process, and whether all were counted.

    Inductor may find a program in its cache while a kernel of that program is missing: it then compiles the kernel,
    although it counts a hit. Excludes kernels that Inductor's workers compiled (dynamo/compile_threads.py).
    """
    if not is_imported("triton"):  # then Triton has compiled nothing
        return usage.libraries_compiled, True
    from tcdeploy.torch_compat.triton import cache as triton_cache  # imports Triton

    can_count = not torch.cuda.is_available() or triton_cache.supported()
    return usage.libraries_compiled + triton_cache.kernels_compiled, can_count


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
    stats, before, start = CompileStats(), read_counts(), time.perf_counter()
    try:
        yield stats
    finally:
        stats.seconds = time.perf_counter() - start
        stats.counts = read_counts() - before
