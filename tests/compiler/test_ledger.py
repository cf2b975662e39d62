"""What is counted as timed: what this process timed, and not what a hit says of the day its program was made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.benchmarking import benchmarker

from tcdeploy.cache.contents import FileAccessTracker
from tcdeploy.compiler.ledger import measure_compiles, read_counts


def test_a_kernel_that_is_timed_counts_once() -> None:
    read_counts()
    with measure_compiles() as found:
        benchmarker.benchmark_cpu(lambda: None)
        benchmarker.benchmark(lambda: None, device=torch.device("cpu"))
    assert found.counts.kernels_timed == 2


def test_what_a_hit_adds_to_torch_s_counter_does_not() -> None:
    read_counts()
    with measure_compiles() as found:
        counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"] += 85
    assert found.counts.kernels_timed == 0


def test_a_library_that_is_compiled_beside_a_hit_makes_it_a_miss(tmp_path: Path) -> None:
    """Inductor's entry was found, and one of its C++ libraries was gone: it compiles that without a word."""
    for target, expected in (("ab/kernel.main.so", (1, "miss")), ("header.i", (0, "hit"))):
        with FileAccessTracker(tmp_path).track(), measure_compiles() as found:
            counters["inductor"]["fxgraph_cache_hit"] += 1
            subprocess.run(["true", "kernel.cpp", "-shared", "-o", str(tmp_path / target)], check=True)
        assert (found.counts.kernels_compiled, found.counts.outcome) == expected
