"""Warm every bucket of the plan: compile its step, capture it, check it against the reference, and record the result.

The largest bucket goes first: CUDA graphs share one memory pool, which the first graph sizes. Other processes may
compile the rest meanwhile (start/workers/parallel.py); this process then loads what they have compiled.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from tcdeploy.engine.check.inputs import WarmupBatch, make_small_batch, make_timing_batch, timed_context
from tcdeploy.engine.check.parity_check import ParityChecker, raise_if_failed
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.warm.timing import measure_step_times
from tcdeploy.engine.warm.tuning import (
    CompiledVariant,
    SelectedVariant,
    capture_variant,
    check_variant,
    run_variant,
    select_variant,
    tune,
)
from tcdeploy.errors import SpaceError
from tcdeploy.host.progress import Progress
from tcdeploy.planning.bucket_record import BucketRecord, Trial
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.programs.compile_stats import CompileCounts, CompileStats, read_counts
from tcdeploy.programs.errors import translate_compile_errors
from tcdeploy.programs.stances import naming_refusal

SHORT_RUN_TOKENS = 64
log = logging.getLogger("tcdeploy.engine")


@dataclass(frozen=True)
class PreviousRun:
    """What the manifest of an earlier run says, by bucket name."""

    # Whose programs are in the cache; empty if their sources or settings changed.
    cached_buckets: frozenset[str] = frozenset()
    cold_seconds: dict[str, float] = field(default_factory=dict)
    trials: dict[str, tuple[Trial, ...]] = field(default_factory=dict)
    tune_seconds: float = 0.0  # the longest time that a run was allowed for tuning

    def with_programs(self, compiled: Mapping[str, BucketRecord]) -> PreviousRun:
        """The same run, after other processes have compiled these buckets, or loaded them, in an unknown cold time."""
        seconds = {
            name: record.compile_seconds if record.cold_seconds is None else record.cold_seconds
            for name, record in compiled.items()
        }
        cold_seconds = {**seconds, **self.cold_seconds}
        return dataclasses.replace(
            self, cached_buckets=self.cached_buckets | frozenset(seconds), cold_seconds=cold_seconds
        )


def prepare_buckets(
    runner: ModelRunner, cache_dir: str, progress: Progress, before_captures: Callable[[], object] = lambda: None
) -> dict[Bucket, CompiledVariant]:
    """Load and run the step of each bucket, call `before_captures`, and then capture all.

    For a start from packages, while the weights are read: the results of the steps are ignored, but the weights must be
    finite. The KV cache contains arbitrary values afterwards. Raises as `PackagedForward`, and CompileError.
    """
    prepared: dict[Bucket, CompiledVariant] = {}
    with translate_compile_errors(runner.plan, cache_dir), runner.uncounted_steps():
        runs: list[tuple[WarmupBatch, CompileStats]] = []
        order = warmup_order(runner.plan)
        for number, bucket in enumerate(order, 1):
            progress.step(number, len(order), f"load {bucket.name}")
            # One short run is enough to load the programs, and captures load the kernels of other sizes.
            batch = make_timing_batch(runner, bucket, min(SHORT_RUN_TOKENS, bucket.size) if bucket.min_size else None)
            runs.append((batch, run_variant(batch, runner.variants[bucket], runs=1)))
        before_captures()
        for number, (batch, compilation) in enumerate(runs, 1):
            progress.step(number, len(order), f"capture {batch.bucket.name}")
            prepared[batch.bucket] = capture_variant(batch, runner.variants[batch.bucket], compilation)
    runner.row_assignment.clear()
    return prepared


def warmup_order(plan: Plan) -> list[Bucket]:
    return sorted(plan.buckets, key=lambda bucket: bucket.size, reverse=True)


def warm_bucket(
    runner: ModelRunner, bucket: Bucket, previous: PreviousRun, checker: ParityChecker, cache_dir: str
) -> BucketRecord:
    """Warm one bucket while the engine is paused; no variant is timed. Raises CompileError if it fails its check."""
    with translate_compile_errors(runner.plan, cache_dir), runner.uncounted_steps():
        record, _ = _warm_bucket(runner, bucket, previous, checker, 0.0, compiled=None)
    raise_if_failed(record.parity, bucket)
    return record


def warm_buckets(
    runner: ModelRunner, checker: ParityChecker, previous: PreviousRun, cache_dir: str, measure: bool,
    progress: Progress, on_finished: Callable[[BucketRecord], None] = lambda record: None,
    prepared: Mapping[Bucket, CompiledVariant] | None = None,
    wait_for_worker: Callable[[Bucket], BucketRecord | None] = lambda bucket: None,
    names: Collection[str] | None = None,
) -> list[BucketRecord]:  # fmt: skip
    """Warm all buckets, or those with these names; returns their records in the plan's order.

    With `measure` the step of each bucket is timed at the end, eager and compiled. `on_finished` is called for each
    bucket that has passed its parity check. `prepared`: the result of `prepare_buckets`, if it was called.
    `wait_for_worker` returns how another process has compiled a bucket; None if none has. Raises CompileError for a
    bucket that fails its parity check, and SpaceError if torch could not write all entries.
    """
    plan = runner.plan
    records: dict[Bucket, BucketRecord] = {}
    order = [bucket for bucket in warmup_order(plan) if names is None or bucket.name in names]
    tuning_left = plan.tune_seconds
    for number, bucket in enumerate(order, 1):
        progress.step(number, len(order), bucket.name)
        worker_record = wait_for_worker(bucket)
        known = previous if worker_record is None else previous.with_programs({bucket.name: worker_record})
        tune_seconds = tuning_left / (len(order) - number + 1)  # an equal share for each bucket left
        with naming_refusal(plan, bucket.name), translate_compile_errors(plan, cache_dir):
            compiled = prepared[bucket] if prepared else None
            record, tuning_seconds = _warm_bucket(runner, bucket, known, checker, tune_seconds, compiled)
        if worker_record is not None:
            record = _with_compilation(record, worker_record)
        records[bucket] = record
        tuning_left -= tuning_seconds
        try:
            raise_if_failed(record.parity, bucket)
            on_finished(record)  # first, so that a bucket that is reported as finished is kept after a kill
        finally:
            progress.bucket_finished(record)
    if measure:  # at the end, when no other process compiles on this machine
        progress.stage("time steps")
        with translate_compile_errors(plan, cache_dir):
            for number, (bucket, record) in enumerate(list(records.items()), 1):
                progress.step(number, len(records), f"time {bucket.name}")
                records[bucket] = _with_step_times(runner, bucket, record)
    runner.row_assignment.clear()
    raise_if_entries_are_missing(cache_dir)
    return [records[bucket] for bucket in plan.buckets if bucket in records]


def _with_compilation(record: BucketRecord, worker_record: BucketRecord) -> BucketRecord:
    """The record of a bucket that another process has compiled. Warns if this process had to compile it again."""
    if record.cache_misses:
        log.warning(
            "%s: compiled %d programs that the compile worker's short copy of the model did not have",
            record.bucket, record.cache_misses,
        )  # fmt: skip
    return record.with_compilation(worker_record)


def _with_step_times(runner: ModelRunner, bucket: Bucket, record: BucketRecord) -> BucketRecord:
    context = None if bucket.is_prefill else timed_context(runner.plan, bucket)
    return dataclasses.replace(record, timed_context=context, **measure_step_times(runner, bucket))


def _warm_bucket(
    runner: ModelRunner, bucket: Bucket, previous: PreviousRun, checker: ParityChecker, tune_seconds: float,
    compiled: CompiledVariant | None,
) -> tuple[BucketRecord, float]:  # fmt: skip
    """Returns the record, and the seconds spent on tuning. `compiled`: from `prepare_buckets`; None if not prepared."""
    plan = runner.plan
    if plan.device == "cuda" and compiled is None:  # otherwise the peak of preparing all buckets counts too
        torch.cuda.reset_peak_memory_stats()
    before = read_counts()
    batch = checker.make_batch(bucket)
    has_more_time = plan.tune_seconds > previous.tune_seconds
    tuning = tune(batch, previous.trials.get(bucket.name, ()), has_more_time, tune_seconds)
    if compiled is not None:
        selected = check_variant(batch, runner.variants[bucket], compiled, tuning.trials, checker)
    else:
        selected = select_variant(batch, tuning, checker, bucket.name in previous.cached_buckets)
    is_captured = runner.graphs.is_captured(bucket)
    if bucket.min_size and not is_captured:  # otherwise the captures of small sizes load these kernels
        make_small_batch(runner, bucket).run_in_two_chunks()  # attention has other kernels for few tokens
    kernels_compiled = (read_counts() - before).kernels_compiled  # trials and checks included
    if compiled is not None:
        kernels_compiled += compiled.compilation.counts.kernels_compiled
    counts = dataclasses.replace(selected.compiled.compilation.counts, kernels_compiled=kernels_compiled)
    # Of the run that filled the cache: this one after a miss.
    compilation, cold_seconds = selected.compiled.compilation, previous.cold_seconds.get(bucket.name)
    if compilation.counts.cache_misses or (cold_seconds is None and counts.outcome == "miss"):
        cold_seconds = compilation.seconds
    return _make_record(bucket, selected, counts, is_captured, cold_seconds), tuning.seconds


def _make_record(
    bucket: Bucket, selected: SelectedVariant, counts: CompileCounts, is_captured: bool, cold_seconds: float | None
) -> BucketRecord:
    return BucketRecord(
        bucket=bucket.name,
        outcome=counts.outcome,
        compile_seconds=selected.compiled.compilation.seconds,
        capture_seconds=selected.compiled.capture_seconds,
        check_seconds=selected.check_seconds,
        compiles=counts.compiles,
        programs=counts.programs,
        cache_hits=counts.cache_hits,
        cache_misses=counts.cache_misses + counts.cache_bypasses,
        graph_breaks=counts.graph_breaks,
        cudagraph_skips=counts.cudagraph_skips,
        kernels_timed=counts.kernels_timed,
        kernels_compiled=counts.kernels_compiled,
        captured=is_captured,
        parity=selected.check.parity,
        eager_greedy_tokens=selected.check.eager_greedy_tokens,
        greedy_tokens=selected.check.greedy_tokens,
        peak_memory_bytes=selected.peak_memory_bytes,
        variant=selected.variant.name,
        trials=selected.trials,
        graph_memory_bytes=selected.compiled.graph_memory_bytes,
        cold_seconds=cold_seconds,
    )


def raise_if_entries_are_missing(cache_dir: str) -> None:
    write_errors = read_counts().cache_write_errors
    if write_errors:
        raise SpaceError(
            f"torch could not write {write_errors} entries into the cache folder {cache_dir}",
            "the next start will compile them again: check the folder's free space and permissions",
        )
