"""Count the kernel variants that this process times.

torch's own counter cannot be used: a cache hit adds to it what was timed when the program was compiled. So the two
timing methods of Inductor's benchmarker are wrapped. tests/programs/test_compile_stats.py fails when torch uses others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tcdeploy.torch_compat.internal import find, internal, is_imported

INDUCTOR = "torch._inductor"
BENCHMARKER = "torch._inductor.runtime.benchmarking:benchmarker"
TIMING_METHODS = ("benchmark_cpu", "benchmark_gpu")

kernels_timed = 0  # by this process since `count_kernel_timings`


@internal("kernel timings", "torch._inductor.runtime.benchmarking.benchmarker",
          "timed kernels are not counted, and kernels_timed stays 0")  # fmt: skip
def supported() -> bool:
    benchmarker = find(BENCHMARKER)
    return hasattr(benchmarker, "__dict__") and all(callable(getattr(benchmarker, name, 0)) for name in TIMING_METHODS)


def count_kernel_timings() -> None:
    """Wrap the methods, once per process and if Inductor is imported."""
    if not is_imported(INDUCTOR) or not supported():
        return
    benchmarker = find(BENCHMARKER)
    for name in TIMING_METHODS:
        if name not in vars(benchmarker):
            setattr(benchmarker, name, _with_count(getattr(benchmarker, name)))


def _with_count(benchmark: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(benchmark)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global kernels_timed
        kernels_timed += 1
        return benchmark(*args, **kwargs)

    return counted
