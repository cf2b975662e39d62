"""Median milliseconds of steps, on the host's clock between two device synchronisations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median_high
from typing import Any, NamedTuple

import torch

from tcdeploy.engine.check.inputs import make_timing_batch, timed_context
from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.sequence import Chunk
from tcdeploy.engine.schedule.step_batch import prefilled_rows, prompt_batch
from tcdeploy.engine.schedule.step_costs import StepCosts
from tcdeploy.engine.step.batch import StepOutput
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.step.step_graphs import never
from tcdeploy.kernels.attention.metadata import do_nothing
from tcdeploy.planning.plan import Bucket
from tcdeploy.programs.stances import force_eager


class TimingLimits(NamedTuple):
    """How often a step is timed: `max_runs` times, or fewer once `min_runs` are timed and `seconds` are spent."""

    untimed_runs: int
    min_runs: int
    max_runs: int
    seconds: float


THOROUGH = TimingLimits(untimed_runs=2, min_runs=3, max_runs=20, seconds=2.0)  # to compare variants
ROUND = TimingLimits(untimed_runs=1, min_runs=3, max_runs=10, seconds=0.7)  # one of ROUNDS
ROUNDS = 3
BRIEF = TimingLimits(untimed_runs=0, min_runs=1, max_runs=3, seconds=0.1)  # at each start, for step_costs.py
SLOW_STEP_SECONDS = 3.0  # from here on, an interruption is a small part of a step
SHORT_CONTEXT = 16  # tokens of each row in the shorter of two timed decode steps
MAX_TIMED_PREFIX = 16_384  # tokens before a timed chunk
SMALL_CHUNK = 16  # tokens


def measure_step_times(runner: ModelRunner, bucket: Bucket) -> dict[str, Any]:
    """The step's times for a BucketRecord, by its fields: uncompiled with the same attention, and as it serves.

    The two are timed alternately, so that a slowly changing load affects both.
    """
    eager, compiled = [], []
    for _ in range(ROUNDS):
        with force_eager():
            eager.append(measure_step_ms(runner, bucket, captured=False, limits=ROUND))
        compiled.append(measure_step_ms(runner, bucket, limits=ROUND))
    return {
        "eager_ms": median_high(eager),
        "compiled_ms": median_high(compiled),
        "eager_spread_ms": (max(eager) - min(eager)) / 2,
        "compiled_spread_ms": (max(compiled) - min(compiled)) / 2,
    }


def measure_step_ms(
    runner: ModelRunner, bucket: Bucket, captured: bool = True, limits: TimingLimits = THOROUGH,
    length: int | None = None,
) -> float:  # fmt: skip
    """Median milliseconds of the bucket's step on its timing batch of the given length.

    `captured`: replay the CUDA graph; False: run the programs without it, for prefill only with the default length.
    """
    batch = make_timing_batch(runner, bucket, length)
    first_seconds = _seconds(batch.run)
    if limits.min_runs == 1 and first_seconds > limits.seconds:  # a slow step runs once, an interrupted one again
        return min(first_seconds, _seconds(batch.run) if first_seconds < SLOW_STEP_SECONDS else math.inf) * 1e3
    # Each size of a dynamic bucket has buffers of its own, and `rerun` uses those of the largest.
    assert captured or length is None or not bucket.is_prefill
    if bucket.min_size and (captured or not runner.graphs.is_captured(bucket)):
        return _median_ms(batch.run, limits)
    rerun = runner.rerun if captured else runner.rerun_uncaptured
    if bucket.is_prefill:
        return _median_ms(lambda: rerun(bucket), limits)
    rows = prefilled_rows(batch.sequences)
    return _median_ms(lambda: rerun(bucket), limits, lambda: runner.row_assignment.apply(rows))


def time_next_size(
    runner: ModelRunner, costs: StepCosts, allocator: BlockAllocator, timed: set[int],
    must_stop: Callable[[], bool] = never,
) -> StepCosts | None:  # fmt: skip
    """`costs` with the time of one more captured size, which is added to `timed`; None if all that fit are in it.

    The sizes that were timed at start-up are timed again, because an idle GPU has higher clocks. Once `must_stop`
    returns True, no further step is timed: `costs` are returned unchanged, and a later call times the size.
    """
    fitting = allocator.num_allocatable * allocator.block_size
    for bucket in runner.plan.prefill_buckets:
        if bucket.min_size and runner.graphs.is_captured(bucket):
            for size in runner.graphs.captured_sizes(bucket, 0):
                if size <= fitting and size not in timed:
                    ms = _measure_prefill_ms(runner, bucket, size, allocator, must_stop)
                    if ms is None:
                        return costs
                    timed.add(size)
                    return costs.with_prefill_ms(size, ms)
    return None


def _measure_prefill_ms(
    runner: ModelRunner, bucket: Bucket, size: int, allocator: BlockAllocator, must_stop: Callable[[], bool]
) -> float | None:
    """Milliseconds of a prefill step of `size` tokens: the smallest of three times. None if it must stop before."""
    batch = make_timing_batch(runner, bucket, size, allocator)
    try:
        seconds = []
        for _ in range(3):
            if must_stop():
                return None
            seconds.append(_seconds(batch.run))
        return min(seconds) * 1e3
    finally:
        for sequence in batch.sequences:
            allocator.release(sequence.blocks)


def measure_step_costs(runner: ModelRunner, before_timing: Callable[[], None] = do_nothing) -> StepCosts:
    """Time the steps of all buckets briefly, dynamic ones at each captured size, and the effect of a long context.

    `before_timing` is called before each of some 20 timings, and may raise to end the measurement.
    """
    plan = runner.plan

    def step_ms(bucket: Bucket, length: int) -> float:
        before_timing()
        return measure_step_ms(runner, bucket, limits=BRIEF, length=length)

    prefill_ms: dict[int, float] = {}
    for bucket in plan.prefill_buckets:
        captured = runner.step_sizes(0) if bucket.min_size and runner.graphs.is_captured(bucket) else ()
        for size in captured or (bucket.size,):
            prefill_ms[size] = step_ms(bucket, size)
    largest = plan.decode_buckets[-1]
    context = timed_context(plan, largest)
    decode_ms = {bucket.size: step_ms(bucket, context) for bucket in plan.decode_buckets}
    before_timing()
    prefix_pair_ms, prefix_token_ms = _measure_prefix(runner)
    costs = StepCosts(
        prefill_ms=tuple(sorted(prefill_ms.items())),
        decode_ms_by_rows=tuple(sorted(decode_ms.items())),
        timed_context=context,
        decode_context_ms=_decode_context_ms(runner, largest, context, decode_ms[largest.size]),
        prefix_pair_ms=prefix_pair_ms,
        prefix_token_ms=prefix_token_ms,
    )
    runner.row_assignment.clear()
    return costs


def _decode_context_ms(runner: ModelRunner, bucket: Bucket, context: int, ms: float) -> float:
    """Additional ms of a decode step per token in the KV cache; 0 if `context` is too short to compare."""
    if context < 2 * SHORT_CONTEXT:
        return 0.0
    shorter_ms = measure_step_ms(runner, bucket, limits=BRIEF, length=SHORT_CONTEXT)
    return max(0.0, ms - shorter_ms) / (bucket.size * (context - SHORT_CONTEXT))


def _measure_prefix(runner: ModelRunner) -> tuple[float, float]:
    """Returns (prefix_pair_ms, prefix_token_ms) of StepCosts; zeros if no prompt with a prefix fits.

    A large and a small chunk are each timed after a prefix and after half of it. The prefix has up to MAX_TIMED_PREFIX
    tokens; with reference attention, which is slow, only as many as the largest bucket.
    """
    plan, largest = runner.plan, runner.plan.prefill_buckets[-1].size
    max_prefix = largest if plan.prefill_attention == "reference" else MAX_TIMED_PREFIX
    longest = min(plan.context, (plan.kv_blocks - 1) * plan.block_size, largest + max_prefix)
    prefix = longest - largest
    if prefix < largest:
        return 0.0, 0.0
    [sequence] = make_timing_batch(runner, plan.prefill_buckets[-1], longest).sequences

    def step_ms(start: int, tokens: int) -> float:
        batch = prompt_batch([Chunk(sequence, start, start + tokens)])
        return _median_ms(lambda: runner.run(batch), BRIEF)

    large, small = largest, min(largest, SMALL_CHUNK)
    half = prefix // 2
    large_ms, small_ms = (  # ms per token of the prefix
        max(0.0, step_ms(prefix, tokens) - step_ms(half, tokens)) / (prefix - half) for tokens in (large, small)
    )
    pair_ms = max(0.0, large_ms - small_ms) / max(large - small, 1)
    return pair_ms, max(0.0, small_ms - small * pair_ms)


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
    return median_high(seconds) * 1e3


def _seconds(step: Callable[[], StepOutput]) -> float:
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start
