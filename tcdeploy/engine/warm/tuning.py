"""Choose the variant of a bucket: the first that compiles and passes the parity check, or the fastest of several.

Without `--tune-seconds` the first one is compiled and none is timed; the next ones are tried only if it fails.
`--tune-seconds` bounds the time spent on variants beyond the first, which has to be compiled in any case. A variant is
timed once: a warm start takes the trials from the manifest of the earlier run, and loads the selected variant only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import resource
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from tcdeploy.engine.check.inputs import WarmupBatch
from tcdeploy.engine.check.parity_check import ParityCheck, ParityChecker, describe_parity
from tcdeploy.engine.warm.timing import measure_step_ms, synchronize
from tcdeploy.planning.bucket_record import Trial
from tcdeploy.planning.variants import Variant, untimed_variants
from tcdeploy.programs.compile_stats import CompileStats, measure_compiles
from tcdeploy.torch_compat.dynamo.compile_threads import without_compile_workers

RUNS_BEFORE_CAPTURE = 2
MAX_ERROR_CHARS = 200
log = logging.getLogger("tcdeploy.engine")


class CompiledVariant(NamedTuple):
    """What compiling and capturing one variant took."""

    compilation: CompileStats
    capture_seconds: float
    graph_memory_bytes: int | None  # None without a GPU


class TuningRun(NamedTuple):
    """Trials of a bucket. `compiled` and `seconds` cover this run only."""

    trials: tuple[Trial, ...] = ()  # of this and earlier runs; empty if no variant was timed, and none failed
    compiled: Mapping[Variant, CompiledVariant] = MappingProxyType({})  # in the order of compilation, failures included
    seconds: float = 0.0  # spent beyond the first variant that could be timed


class SelectedVariant(NamedTuple):
    """The variant that serves, with its parity check."""

    variant: Variant
    compiled: CompiledVariant
    trials: tuple[Trial, ...]
    check: ParityCheck
    check_seconds: float
    peak_memory_bytes: int


def tune(batch: WarmupBatch, known_trials: Iterable[Trial], has_more_time: bool, seconds: float) -> TuningRun:
    """Time the bucket's variants for at most `seconds`, except those that the `known_trials` of an earlier run cover.

    Nothing is timed unless this run `has_more_time` than the earlier one. A variant that cannot be compiled on this
    torch or GPU is recorded with its error. Time spent before the first variant that can be timed does not count, and
    the last error is raised if none can.
    """
    variants = _variants_by_name(batch)
    if len(variants) == 1:
        return TuningRun()
    trials = [trial for trial in known_trials if trial.variant in variants]
    if not has_more_time or seconds <= 0:
        return TuningRun(tuple(trials))
    compiled: dict[Variant, CompiledVariant] = {}
    spent = 0.0
    latest_error: Exception | None = None
    tried = {trial.variant for trial in trials}
    for variant in (variant for name, variant in variants.items() if name not in tried):
        is_required = not any_timed(trials)
        if not is_required and spent >= seconds:
            break
        trial, compiled[variant], error = _try_variant(batch, variant, is_timed=True)
        trials.append(trial)
        latest_error = error or latest_error
        spent += 0.0 if is_required else trial.seconds
    if latest_error is not None and not any_timed(trials):
        raise latest_error
    return TuningRun(tuple(trials), compiled, spent)


def select_variant(
    batch: WarmupBatch, tuning: TuningRun, checker: ParityChecker, programs_cached: bool
) -> SelectedVariant:
    """Compile and check the preferred variant; if that fails, record it in the trials, and take the next one.

    If none is left, the last one's error is raised, or it is returned with its failed check.
    """
    variants, trials, compiled = _variants_by_name(batch), tuning.trials, dict(tuning.compiled)
    selected: SelectedVariant | None = None
    error: Exception | None = None
    while (variant := preferred_variant(trials, variants)) is not None:
        with without_compile_workers() if programs_cached else contextlib.nullcontext():
            # A variant that was timed is compiled again here, because the runner keeps only the variant set last.
            trial, latest, error = _try_variant(batch, variant, is_timed=False)
        compiled.setdefault(variant, latest)
        if error is None:
            latest = latest._replace(compilation=total_compilation(variant, compiled))
            selected = check_variant(batch, variant, latest, trials, checker)
            if selected.check.parity.passed:
                return selected
            parity = describe_parity(selected.check.parity)
            trial = dataclasses.replace(trial, error=f"failed the parity check: {parity}")
        log.warning("%s: variant %s is not used: %s", batch.bucket.name, variant.name, trial.error)
        trials = (*(known for known in trials if known.variant != variant.name), trial)
    if error is not None:
        raise error
    assert selected is not None, "a bucket has at least one variant"
    return selected


def preferred_variant(trials: tuple[Trial, ...], variants: Mapping[str, Variant]) -> Variant | None:
    """The fastest variant, or the first one that has not failed if none was timed. None if no variant is left."""
    if any_timed(trials):
        return variants[fastest(trials, variants).variant]
    failed = {trial.variant for trial in trials}
    untimed = untimed_variants(tuple(variants.values()))
    return next((variant for variant in untimed if variant.name not in failed), None)


def check_variant(
    batch: WarmupBatch, variant: Variant, compiled: CompiledVariant, trials: tuple[Trial, ...], checker: ParityChecker
) -> SelectedVariant:
    """Check the bucket, which already runs `variant`. The returned check may have failed."""
    # On a GPU, since the bucket's warm-up began; on a CPU, since the start of the process.
    peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if batch.plan.device == "cuda":
        peak_memory_bytes = torch.cuda.max_memory_allocated()
    start = time.perf_counter()
    check = checker.check(batch.bucket)
    return SelectedVariant(variant, compiled, trials, check, time.perf_counter() - start, peak_memory_bytes)


def compile_variant(batch: WarmupBatch, variant: Variant) -> CompiledVariant:
    """Compile the bucket's step with `variant`, and capture it if the plan uses a CUDA graph for it."""
    # Before the engine or Inductor captures a graph, an extra run completes lazy initialisation of jit programs.
    uses_graph = batch.plan.graphs == "region" or batch.plan.uses_cuda_graph(batch.bucket, variant)
    runs = RUNS_BEFORE_CAPTURE if uses_graph and batch.plan.programs == "jit" else 1
    return capture_variant(batch, variant, run_variant(batch, variant, runs))


def run_variant(batch: WarmupBatch, variant: Variant, runs: int) -> CompileStats:
    """Run the bucket with `variant` from now on: compile or load its programs by running the batch `runs` times."""
    batch.runner.set_variant(batch.bucket, variant)
    with measure_compiles() as compilation:
        for _ in range(runs):
            batch.run()
        synchronize()
    return compilation


def capture_variant(batch: WarmupBatch, variant: Variant, compilation: CompileStats) -> CompiledVariant:
    """Capture the bucket's step, which has run with `variant`, if the plan uses a CUDA graph for it."""
    runner, bucket, plan = batch.runner, batch.bucket, batch.plan
    free_before, start = _free_bytes(), time.perf_counter()
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
    return min(trials, key=lambda trial: (trial.step_ms or math.inf) * variants[trial.variant].required_speedup)


def total_compilation(selected: Variant, compiled: Mapping[Variant, CompiledVariant]) -> CompileStats:
    """The first compilation of `selected`, and of the first earlier variant that shares programs with it."""
    earlier = itertools.takewhile(lambda variant: variant != selected, compiled)
    sharing = (compiled[variant].compilation for variant in earlier if variant.shares_programs_with(selected))
    return next(sharing, CompileStats()) + compiled[selected].compilation


def _try_variant(
    batch: WarmupBatch, variant: Variant, is_timed: bool
) -> tuple[Trial, CompiledVariant, Exception | None]:
    """If the variant fails, returns its error, and what had been compiled until then."""
    start = time.perf_counter()
    step_ms: float | None = None
    error: Exception | None = None
    with measure_compiles() as attempted:
        try:
            compiled = compile_variant(batch, variant)
            step_ms = measure_step_ms(batch.runner, batch.bucket) if is_timed else None
        except OSError:
            raise  # a full or unwritable cache folder, not a fault of the variant
        except Exception as exception:  # Triton, Inductor, Dynamo and CUDA errors share no base class
            if not batch.runner.has_model:
                raise  # a start from packages has no other variant to try
            error = exception
    message = ""
    if error is not None:
        compiled = CompiledVariant(attempted, 0.0, None)
        message = (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_ERROR_CHARS]
    trial = Trial(variant.name, step_ms, time.perf_counter() - start, message)
    return trial, compiled, error


def _variants_by_name(batch: WarmupBatch) -> dict[str, Variant]:
    return {variant.name: variant for variant in batch.plan.variants(batch.bucket)}


def _free_bytes() -> int | None:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
