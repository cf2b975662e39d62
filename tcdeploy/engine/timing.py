"""Median milliseconds of one bucket's step, on the host's clock between two device synchronisations."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from tcdeploy.compiler.stances import force_eager
from tcdeploy.engine.graphs import StepOutput
from tcdeploy.engine.runner import ModelRunner
from tcdeploy.engine.warmup_inputs import make_timing_batch
from tcdeploy.planning.plan import Bucket

TIMED_RUNS = 20
UNTIMED_RUNS = 2
MAX_TIMED_SECONDS = 2.0  # per measurement, once three runs are timed


class StepTimes(NamedTuple):
    eager_ms: float
    compiled_ms: float


def measure_step_times(runner: ModelRunner, bucket: Bucket) -> StepTimes:
    """Median ms of the bucket's step: eager, and as it will serve (compiled, replayed from its graph if captured)."""
    with force_eager():
        eager_ms = measure_step_ms(runner, bucket, captured=False)
    return StepTimes(eager_ms, measure_step_ms(runner, bucket))


def measure_step_ms(runner: ModelRunner, bucket: Bucket, captured: bool = True) -> float:
    """Median ms of the bucket's step on its timing batch; `captured=False` runs the programs without the graph."""
    batch = make_timing_batch(runner, bucket)
    batch.run()
    if bucket.min_size:  # a dynamic bucket has no static buffers to run again
        return _median_ms(batch.run)
    rerun = runner.rerun if captured else runner.rerun_uncaptured
    if bucket.is_prefill:
        return _median_ms(lambda: rerun(bucket))
    return _median_ms(lambda: rerun(bucket), reset=lambda: runner.row_assignment.assign_prefilled(batch.sequences))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _median_ms(step: Callable[[], StepOutput], reset: Callable[[], None] = lambda: None) -> float:
    """`reset` runs before each step, outside the timed interval: a decode step advances its rows."""
    seconds: list[float] = []
    for number in range(TIMED_RUNS + UNTIMED_RUNS):
        reset()
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        if number >= UNTIMED_RUNS:
            seconds.append(time.perf_counter() - start)
        if len(seconds) >= 3 and sum(seconds) > MAX_TIMED_SECONDS:
            break
    return sorted(seconds)[len(seconds) // 2] * 1e3
