"""What is counted as timed: what this process timed, and not what a hit says of the day its program was made."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.benchmarking import benchmarker

from tcdeploy.compiler.ledger import measured, read_counts


def test_a_kernel_that_is_timed_counts_once() -> None:
    read_counts()
    with measured() as found:
        benchmarker.benchmark_cpu(lambda: None)
        benchmarker.benchmark(lambda: None, device=torch.device("cpu"))
    assert found.counts.kernels_timed == 2


def test_what_a_hit_adds_to_torch_s_counter_does_not() -> None:
    read_counts()
    with measured() as found:
        counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"] += 85
    assert found.counts.kernels_timed == 0
