"""Choose the variant of a bucket: compile and time several, select the fastest that passes the parity check.

Trials come from the manifest of an earlier run, if any, and from this run. A variant is timed once: a warm start loads
the selected variant only, and repeats no timing. `--tune-seconds` bounds the time spent on variants beyond the first,
which has to be compiled in any case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import resource
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from tcdeploy.cache.manifest import Parity, Trial
from tcdeploy.compiler.compile_stats import CompileStats, measure_compiles
from tcdeploy.engine.parity_check import ParityCheck, ParityChecker, describe_parity
from tcdeploy.engine.timing import measure_step_ms, synchronize
from tcdeploy.engine.warmup_inputs import WarmupBatch
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.variants import Variant
from tcdeploy.torch_compat.compile_threads import without_compile_workers

RUNS_BEFORE_CAPTURE = 2
MAX_ERROR_CHARS = 200


class CompiledVariant(NamedTuple):
    """What compiling and capturing one variant took."""

    compilation: CompileStats
    capture_seconds: float
    graph_memory_bytes: int | None  # None without a GPU


class TuningRun(NamedTuple):
    """Trials of a bucket. `compiled` and `seconds` cover this run only."""

    trials: tuple[Trial, ...] = ()  # of this and earlier runs; empty if the bucket has one variant
    compiled: Mapping[Variant, CompiledVariant] = MappingProxyType({})  # in the order of compilation
    seconds: float = 0.0  # spent beyond the first variant that could be timed


class SelectedVariant(NamedTuple):
    """The variant that serves, with its parity check."""

    variant: Variant
    compiled: CompiledVariant
    trials: tuple[Trial, ...]
    check: ParityCheck
    check_seconds: float
    peak_memory_bytes: int


class _Attempt(NamedTuple):
    trial: Trial
    compiled: CompiledVariant | None
    error: Exception | None


def tune(batch: WarmupBatch, known_trials: Iterable[Trial], has_more_time: bool, seconds: float) -> TuningRun:
    """Time the bucket's variants for at most `seconds`, except those that the `known_trials` of an earlier run cover.

    Variants that the earlier run did not reach are tried only if `has_more_time`: the time allowed has grown since.
    """
    variants = _variants_by_name(batch)
    if len(variants) == 1:
        return TuningRun()
    trials = tuple(trial for trial in known_trials if trial.variant in variants)
    if any_timed(trials) and not has_more_time:
        return TuningRun(trials)
    tried = {trial.variant for trial in trials}
    untried = [variant for name, variant in variants.items() if name not in tried]
    tuning = time_variants(batch, untried, seconds, must_succeed=not any_timed(trials))
    return tuning._replace(trials=trials + tuning.trials)


def time_variants(batch: WarmupBatch, variants: list[Variant], seconds: float, must_succeed: bool) -> TuningRun:
    """Compile and time one variant after another until `seconds` are spent.

    A variant that cannot be compiled on this torch or GPU is recorded with its error and skipped. With `must_succeed`,
    time spent before the first variant that can be timed does not count, and the last error is raised if none can.
    """
    trials: list[Trial] = []
    compiled: dict[Variant, CompiledVariant] = {}
    spent = 0.0
    error: Exception | None = None
    for variant in variants:
        is_required = must_succeed and not any_timed(trials)
        if not is_required and spent >= seconds:
            break
        attempt = _try_variant(batch, variant)
        trials.append(attempt.trial)
        if attempt.compiled:
            compiled[variant] = attempt.compiled
        error = attempt.error or error
        spent += 0.0 if is_required else attempt.trial.seconds
    if must_succeed and error is not None and not any_timed(trials):
        raise error
    return TuningRun(tuple(trials), compiled, spent)


def select_variant(
    batch: WarmupBatch, tuning: TuningRun, checker: ParityChecker, programs_cached: bool
) -> SelectedVariant:
    """Compile and check the fastest variant, or the only one.

    A variant that fails the parity check is marked in the trials, and the next fastest is taken. The last one left is
    returned with its failed check.
    """
    variants, trials = _variants_by_name(batch), tuning.trials
    while True:
        name = fastest(trials, variants).variant if trials else next(iter(variants))
        variant = variants[name]
        with without_compile_workers() if programs_cached else contextlib.nullcontext():
            # A variant that was tried is compiled again here, because the runner keeps only the variant set last.
            compiled = compile_variant(batch, variant)
        peak_memory_bytes, start = _peak_memory_bytes(batch.plan), time.perf_counter()
        check = checker.check(batch.bucket)
        remaining = trials if check.parity.passed else _mark_failed(trials, name, check.parity)
        if check.parity.passed or not any_timed(remaining):
            compiled = compiled._replace(compilation=total_compilation(variant, compiled.compilation, tuning.compiled))
            check_seconds = time.perf_counter() - start
            return SelectedVariant(variant, compiled, trials, check, check_seconds, peak_memory_bytes)
        trials = remaining


def compile_variant(batch: WarmupBatch, variant: Variant) -> CompiledVariant:
    """Compile the bucket's step with `variant`, and capture it if the plan uses a CUDA graph for it."""
    runner, bucket, plan = batch.runner, batch.bucket, batch.plan
    runner.set_variant(bucket, variant)
    with measure_compiles() as compilation:
        for _ in range(RUNS_BEFORE_CAPTURE if _uses_any_graph(batch, variant) else 1):
            batch.run()
        synchronize()
    free_before = _free_bytes()
    start = time.perf_counter()
    if plan.uses_cuda_graph(bucket, variant):
        runner.graphs.capture(bucket)
        synchronize()
    seconds = time.perf_counter() - start
    graph_memory_bytes = None if free_before is None else free_before - (_free_bytes() or 0)
    return CompiledVariant(compilation, seconds, graph_memory_bytes)


def any_timed(trials: Iterable[Trial]) -> bool:
    return any(trial.step_ms is not None for trial in trials)


def fastest(trials: Iterable[Trial], variants: Mapping[str, Variant]) -> Trial:
    """The trial with the lowest median, scaled by the speedup that its variant is required to bring."""

    def scaled_ms(trial: Trial) -> float:
        return math.inf if trial.step_ms is None else trial.step_ms * variants[trial.variant].required_speedup

    return min(trials, key=scaled_ms)


def total_compilation(
    selected: Variant, final_compilation: CompileStats, compiled: Mapping[Variant, CompiledVariant]
) -> CompileStats:
    """What this run compiled for `selected`: its own trial, and the first earlier trial that shares programs with it.

    `final_compilation`, made after all trials, is used only if `selected` was not tried in this run; otherwise it
    compiled nothing.
    """
    earlier = itertools.takewhile(lambda variant: variant != selected, compiled)
    sharing = (compiled[variant].compilation for variant in earlier if variant.shares_programs_with(selected))
    return next(sharing, CompileStats()) + (
        compiled[selected].compilation if selected in compiled else final_compilation
    )


def _try_variant(batch: WarmupBatch, variant: Variant) -> _Attempt:
    start = time.perf_counter()
    compiled: CompiledVariant | None = None
    step_ms: float | None = None
    error: Exception | None = None
    try:
        compiled = compile_variant(batch, variant)
        step_ms = measure_step_ms(batch.runner, batch.bucket)
    except OSError:
        raise  # a full or unwritable cache folder, not a fault of the variant
    except Exception as exception:  # Triton, Inductor, Dynamo and CUDA errors share no base class
        error = exception
    trial = Trial(variant.name, step_ms, time.perf_counter() - start, _first_line(error) if error else "")
    return _Attempt(trial, compiled, error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_ERROR_CHARS]


def _variants_by_name(batch: WarmupBatch) -> dict[str, Variant]:
    return {variant.name: variant for variant in batch.plan.variants(batch.bucket)}


def _mark_failed(trials: tuple[Trial, ...], name: str, parity: Parity) -> tuple[Trial, ...]:
    error = f"failed the parity check: {describe_parity(parity)}"
    return tuple(
        dataclasses.replace(trial, step_ms=None, error=error) if trial.variant == name else trial for trial in trials
    )


def _uses_any_graph(batch: WarmupBatch, variant: Variant) -> bool:
    """Whether the engine or Inductor captures a graph, before which an extra run completes lazy initialisation."""
    return batch.plan.graphs == "region" or batch.plan.uses_cuda_graph(batch.bucket, variant)


def _peak_memory_bytes(plan: Plan) -> int:
    """GPU memory since the bucket's warm-up began. On a CPU, the peak of the process since its start (getrusage)."""
    if plan.device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _free_bytes() -> int | None:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
