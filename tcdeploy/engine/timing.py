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


class TimingLimits(NamedTuple):
    """How often a step is timed: `max_runs` times, or fewer once `min_runs` are timed and `seconds` are spent."""

    untimed_runs: int
    min_runs: int
    max_runs: int
    seconds: float


THOROUGH = TimingLimits(untimed_runs=2, min_runs=3, max_runs=20, seconds=2.0)  # to compare variants
BRIEF = TimingLimits(untimed_runs=0, min_runs=1, max_runs=5, seconds=0.3)  # at each start, for step_costs.py


class StepTimes(NamedTuple):
    eager_ms: float
    compiled_ms: float


def measure_step_times(runner: ModelRunner, bucket: Bucket) -> StepTimes:
    """Median ms of the bucket's step: eager, and as it will serve (compiled, replayed from its graph if captured)."""
    with force_eager():
        eager_ms = measure_step_ms(runner, bucket, captured=False)
    return StepTimes(eager_ms, measure_step_ms(runner, bucket))


def measure_step_ms(
    runner: ModelRunner, bucket: Bucket, captured: bool = True, limits: TimingLimits = THOROUGH
) -> float:
    """Median ms of the bucket's step on its timing batch; `captured=False` runs the programs without the graph."""
    batch = make_timing_batch(runner, bucket)
    first_seconds = _seconds(batch.run)
    if limits.min_runs == 1 and first_seconds > limits.seconds:  # a slow step runs once
        return first_seconds * 1e3
    if bucket.min_size:  # a dynamic bucket has no static buffers to run again
        return _median_ms(batch.run, limits)
    rerun = runner.rerun if captured else runner.rerun_uncaptured
    if bucket.is_prefill:
        return _median_ms(lambda: rerun(bucket), limits)
    return _median_ms(
        lambda: rerun(bucket), limits, reset=lambda: runner.row_assignment.assign_prefilled(batch.sequences)
    )


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _median_ms(step: Callable[[], StepOutput], limits: TimingLimits, reset: Callable[[], None] = lambda: None) -> float:
    """`reset` runs before each step, outside the timed interval: a decode step advances its rows."""
    for _ in range(limits.untimed_runs):
        reset()
        step()
    seconds: list[float] = []
    while len(seconds) < limits.max_runs and (len(seconds) < limits.min_runs or sum(seconds) <= limits.seconds):
        reset()
        seconds.append(_seconds(step))
    return sorted(seconds)[len(seconds) // 2] * 1e3


def _seconds(step: Callable[[], StepOutput]) -> float:
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start
