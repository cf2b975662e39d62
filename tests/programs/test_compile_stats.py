"""What the compile statistics count: kernels timed or compiled by this process; the outcome is never a false hit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.benchmarking import benchmarker

from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.programs.compile_stats import CompileCounts, measure_compiles, read_counts


def test_a_kernel_that_is_timed_counts_once() -> None:
    read_counts()
    with measure_compiles() as stats:
        benchmarker.benchmark_cpu(lambda: None)
        benchmarker.benchmark(lambda: None, device=torch.device("cpu"))
    assert stats.counts.kernels_timed == 2


def test_timings_that_a_cache_hit_adds_to_torch_s_counter_are_not_counted() -> None:
    read_counts()
    with measure_compiles() as stats:
        counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"] += 85
    assert stats.counts.kernels_timed == 0


def test_a_library_that_is_compiled_beside_a_hit_makes_it_a_miss(tmp_path: Path) -> None:
    """Inductor finds its entry, but a C++ library of the program is gone: it compiles that without a message."""
    for target, expected in (("ab/kernel.main.so", (1, "miss")), ("header.i", (0, "hit"))):
        with FileAccessTracker(tmp_path).track(), measure_compiles() as stats:
            counters["inductor"]["fxgraph_cache_hit"] += 1
            subprocess.run(["true", "kernel.cpp", "-shared", "-o", str(tmp_path / target)], check=True)
        assert (stats.counts.kernels_compiled, stats.counts.outcome) == expected


@pytest.mark.parametrize(
    ("counts", "outcome"),
    [
        (CompileCounts(programs=1, cache_hits=1), "hit"),
        (CompileCounts(), "reused"),
        (CompileCounts(programs=1, cache_misses=1), "miss"),
        (CompileCounts(programs=1, cache_hits=1, is_complete=False), "unknown"),
        (CompileCounts(is_complete=False), "unknown"),
        (CompileCounts(programs=1, cache_misses=1, is_complete=False), "miss"),
    ],
)
def test_counts_that_are_not_complete_are_never_a_hit(counts: CompileCounts, outcome: str) -> None:
    assert counts.outcome == outcome
    assert (counts + CompileCounts()).outcome == (CompileCounts() + counts).outcome == outcome
    assert (counts - CompileCounts()).is_complete == counts.is_complete
