"""Warm every bucket: run it until it is compiled, record its graph, and check it against eager.

The largest bucket goes first, because graphs share a pool that the first one sizes. A bucket is warm when its step
has run on packed, unequal, padded sequences and its logits are those of transformers' own attention. What this pass
leaves behind is measured too: compile seconds apart from capture and check, and torch's counters beside them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch._dynamo

from tcdeploy.cache.manifest import BucketRecord, GreedyTokens, Parity, Trial
from tcdeploy.compiler.ledger import CompileStats, measure_compiles, read_counts
from tcdeploy.compiler.programs import force_eager, translate_compile_errors, without_compile_workers
from tcdeploy.engine.blocks import BlockAllocator
from tcdeploy.engine.graphs import StepOutput
from tcdeploy.engine.parity import check_parity, greedy_tokens, reference_attn_implementation, reference_logits
from tcdeploy.engine.runner import ModelRunner
from tcdeploy.engine.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.errors import CompileError, SpaceError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.plan import Bucket
from tcdeploy.planning.variants import Variant
from tcdeploy.progress import Progress

RUNS_BEFORE_CAPTURE = 2
MAX_CHECKED_ROWS = 4  # the first, the last and two between: each costs a whole eager pass
MAX_TIMED_CONTEXT = 512
TIMED_RUNS = 20
UNTIMED_RUNS = 2
MAX_TIMED_SECONDS = 2.0
SEED = 20


@dataclass(frozen=True)
class PreviousRun:
    """What an earlier run left in the manifest, by bucket name.

    `buckets` are those whose programs are there: none where they would be made from other sources or settings now.
    """

    buckets: frozenset[str] = frozenset()
    cold_seconds: dict[str, float] = field(default_factory=dict)
    trials: dict[str, tuple[Trial, ...]] = field(default_factory=dict)
    tune_seconds: float = 0.0  # that it had for trying


def warm_buckets(
    runner: ModelRunner,
    architecture: Architecture,
    previous: PreviousRun,
    cache_dir: str,
    measure: bool,
    progress: Progress,
) -> list[BucketRecord]:
    """Warm all buckets of the plan; returns their records in the plan's order.

    `measure` times eager and compiled steps as well. Raises CompileError for a bucket that differs from eager.
    """
    plan = runner.plan
    records: dict[Bucket, BucketRecord] = {}
    order = sorted(plan.buckets, key=lambda bucket: bucket.size, reverse=True)
    tuning_left = plan.tune_seconds
    for number, bucket in enumerate(order, 1):
        progress.bucket_started(bucket.name, number, len(order))
        warmer = _BucketWarmer(runner, bucket, reference_attn_implementation(architecture), architecture.vocab_size)
        # what is left is shared by the buckets that are left
        share = tuning_left / (len(order) - number + 1)
        with translate_compile_errors(plan, cache_dir):
            records[bucket] = warmer.warm(previous, share, measure)
        tuning_left -= warmer.tuning_seconds
        progress.bucket_finished(records[bucket])
        _raise_if_parity_failed(records[bucket].parity, bucket)
    runner.row_assignment.clear()
    if read_counts().cache_write_errors:
        raise SpaceError(
            f"torch could not write {read_counts().cache_write_errors} entries into the cache folder {cache_dir}",
            "the next start will compile them again: look at the folder's free space and permissions",
        )
    return [records[bucket] for bucket in plan.buckets]


def _raise_if_parity_failed(parity: Parity, bucket: Bucket) -> None:
    if not parity.passed:
        raise CompileError(
            f"bucket {bucket.name} is not the eager model: logits differ by {parity.max_difference:.3g} "
            f"({parity.relative_difference:.2g} of the largest, tolerance {parity.tolerance:g}), "
            f"KL {parity.kl:.2g} (tolerance {parity.kl_tolerance:g})",
            "--attention reference and --mode default --region blocks tell which part is wrong",
        )


class _CompiledVariant(NamedTuple):
    """A candidate that was compiled and recorded on this bucket."""

    compilation: CompileStats
    capture_seconds: float
    graph_memory_bytes: int | None


class _ParityCheck(NamedTuple):
    """A bucket against the eager model, and what both answered."""

    parity: Parity
    eager_greedy_tokens: GreedyTokens
    greedy_tokens: GreedyTokens


class _SelectedVariant(NamedTuple):
    """The candidate that serves, and what it took to know that it is right."""

    variant: Variant
    compiled: _CompiledVariant
    trials: tuple[Trial, ...]
    checked: _ParityCheck
    check_seconds: float
    peak_memory_bytes: int


class _BucketWarmer:
    """The sequences that one bucket is warmed with, and the steps of warming it."""

    def __init__(self, runner: ModelRunner, bucket: Bucket, reference: str, vocab_size: int) -> None:
        self.runner, self.plan, self.bucket, self.reference = runner, runner.plan, bucket, reference
        self.random = random.Random(SEED)
        self.vocab_size = vocab_size
        self.variants = {variant.name: variant for variant in self.plan.variants(bucket)}
        self.compiled: dict[Variant, _CompiledVariant] = {}  # in trials of this run
        self.tuning_seconds = 0.0  # that trying took beyond the one candidate there must be
        self.allocator = BlockAllocator(self.plan.kv_blocks, self.plan.block_size)

    def warm(self, previous: PreviousRun, tune_seconds: float, measure: bool) -> BucketRecord:
        if self.plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = read_counts()
        sequences = self._make_sequences()
        if not self.bucket.is_prefill:
            self._prefill_kv_cache(sequences)
        is_cached = self.bucket.name in previous.buckets
        selected = self._select_variant(self._get_trials(sequences, previous, tune_seconds), sequences, is_cached)
        compiled = selected.compiled
        kernels_compiled = (read_counts() - before).kernels_compiled  # in trials and checks too
        counts = dataclasses.replace(compiled.compilation.counts, kernels_compiled=kernels_compiled)
        cold_seconds = previous.cold_seconds.get(self.bucket.name)
        if compiled.compilation.counts.cache_misses or (cold_seconds is None and counts.outcome == "miss"):
            cold_seconds = compiled.compilation.seconds
        eager_ms, compiled_ms = self._time() if measure else (None, None)
        return BucketRecord(
            bucket=self.bucket.name,
            outcome=counts.outcome,
            compile_seconds=compiled.compilation.seconds,
            capture_seconds=compiled.capture_seconds,
            check_seconds=selected.check_seconds,
            compiles=counts.compiles,
            programs=counts.programs,
            cache_hits=counts.cache_hits,
            cache_misses=counts.cache_misses + counts.cache_bypasses,
            graph_breaks=counts.graph_breaks,
            cudagraph_skips=counts.cudagraph_skips,
            kernels_timed=counts.kernels_timed,
            kernels_compiled=kernels_compiled,
            captured=self.runner.is_captured(self.bucket),
            **selected.checked._asdict(),
            peak_memory_bytes=selected.peak_memory_bytes,
            variant=selected.variant.name,
            trials=selected.trials,
            graph_memory_bytes=compiled.graph_memory_bytes,
            cold_seconds=cold_seconds,
            eager_ms=eager_ms,
            compiled_ms=compiled_ms,
            timed_context=self._timed_context() if measure and not self.bucket.is_prefill else None,
        )

    def _select_variant(
        self, trials: tuple[Trial, ...], sequences: list[Sequence], is_cached: bool
    ) -> _SelectedVariant:
        """Make the only candidate, or the fastest of those timed, and check it.

        One that is not the eager model is passed over, and shown, as long as there is another that was timed.
        """
        while True:
            name = _fastest(trials, self.variants).variant if trials else next(iter(self.variants))
            variant = self.variants[name]
            with without_compile_workers() if is_cached else contextlib.nullcontext():
                again = self._compile_and_capture(variant, sequences)  # the last one made stands
            compiled = again._replace(compilation=_total_compilation(variant, again.compilation, self.compiled))
            if trials and not self.bucket.is_prefill:
                self._prefill_kv_cache(sequences)  # timing wrote over it
            peak_memory_bytes, start = self._peak_memory_bytes(), time.perf_counter()
            checked = self._check_parity(sequences)
            parity = checked.parity
            others = tuple(
                _with_parity_failure(trial, parity) if trial.variant == variant.name else trial for trial in trials
            )
            if parity.passed or not _any_timed(others):
                seconds = time.perf_counter() - start
                return _SelectedVariant(variant, compiled, trials, checked, seconds, peak_memory_bytes)
            trials = others

    def _get_trials(self, sequences: list[Sequence], previous: PreviousRun, seconds: float) -> tuple[Trial, ...]:
        """Of the candidates, earlier and now; none where there is but one.

        What an earlier run timed is not timed again. What it left out is tried only if there is more time than it had.
        """
        if len(self.variants) == 1:
            return ()
        known = tuple(trial for trial in previous.trials.get(self.bucket.name, ()) if trial.variant in self.variants)
        if _any_timed(known) and self.plan.tune_seconds <= previous.tune_seconds:
            return known
        tried = {trial.variant for trial in known}
        untried = [variant for name, variant in self.variants.items() if name not in tried]
        return known + self._time_variants(untried, sequences, seconds, must_succeed=not _any_timed(known))

    def _time_variants(
        self, variants: list[Variant], sequences: list[Sequence], seconds: float, must_succeed: bool
    ) -> tuple[Trial, ...]:
        """Make and time one candidate after another until the seconds are over; fills `self.compiled`.

        What it takes to have one that can be timed, where there must be, does not count: it is made in any case.
        A setting that this torch or this GPU cannot compile with is passed over, and shown. Where one must succeed and
        none does, the last one's error is raised.
        """
        trials: list[Trial] = []
        failure = None
        for variant in variants:
            is_needed = must_succeed and not _any_timed(tuple(trials))
            if not is_needed and self.tuning_seconds >= seconds:
                break
            start, step_ms, problem = time.perf_counter(), None, ""
            try:
                self.compiled[variant] = self._compile_and_capture(variant, sequences)
                step_ms = self._step_ms()
            except OSError:
                raise  # the disk, not the candidate
            except Exception as error:  # of Triton, Inductor, Dynamo, CUDA: they share no class
                failure, problem = error, (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            trials.append(Trial(variant.name, step_ms, time.perf_counter() - start, problem))
            self.tuning_seconds += 0.0 if is_needed else trials[-1].seconds
        if must_succeed and failure is not None and not _any_timed(tuple(trials)):
            raise failure
        return tuple(trials)

    def _compile_and_capture(self, variant: Variant, sequences: list[Sequence]) -> _CompiledVariant:
        """Compile the bucket's step this way, and record it."""
        self.runner.set_variant(self.bucket, variant)
        with measure_compiles() as compilation:
            for _ in range(RUNS_BEFORE_CAPTURE if self._uses_cuda_graph(variant) else 1):
                self._run(sequences)
            _synchronize()
        free = _free_bytes()
        start = time.perf_counter()
        if self.plan.uses_cuda_graph(self.bucket, variant):
            self.runner.capture(self.bucket)
            _synchronize()
        seconds = time.perf_counter() - start
        return _CompiledVariant(compilation, seconds, None if free is None else free - (_free_bytes() or 0))

    def _uses_cuda_graph(self, variant: Variant) -> bool:
        """By us or by torch: then nothing lazy may be left, which takes more than one run."""
        return self.plan.graphs == "region" or self.plan.uses_cuda_graph(self.bucket, variant)

    def _make_sequences(self) -> list[Sequence]:
        """Unequal lengths that leave some padding: prefill packs three prompts where they fit, decode one per row."""
        return [
            self._make_sequence(length)
            for length in (self._prefill_lengths() if self.bucket.is_prefill else self._decode_lengths())
        ]

    def _prefill_lengths(self) -> list[int]:
        size = self.bucket.size
        packed = [size - size // 4 - size // 8 - 1, size // 4, size // 8]
        blocks = sum(self.allocator.blocks_for(length) for length in packed)
        fits = size >= 8 and self.plan.max_prefill_sequences >= len(packed) and blocks <= self.allocator.free
        return packed if fits else [size]

    def _decode_lengths(self) -> list[int]:
        """One block each; the first row crosses into a third block where there is room."""
        longest = min(self.plan.block_size, self.plan.context)
        lengths = [2 + 7 * row % (longest - 1) for row in range(self.bucket.size)]
        first = min(2 * self.plan.block_size + 5, self.plan.context)
        if self.allocator.blocks_for(first) + self.bucket.size - 1 <= self.allocator.free:
            lengths[0] = first
        return lengths

    def _make_sequence(self, length: int) -> Sequence:
        ids = [self.random.randrange(self.vocab_size) for _ in range(length)]
        sequence = Sequence(0, ids, length, SamplingParams())
        sequence.blocks = self.allocator.allocate(self.allocator.blocks_for(length))
        return sequence

    def _prefill_kv_cache(self, sequences: list[Sequence]) -> None:
        """The keys of all but each last token, by uncompiled packed prefills."""
        largest = self.plan.prefill_buckets[-1].size
        chunks: list[Chunk] = []
        with force_eager():
            for sequence in sequences:
                for start in range(0, len(sequence.token_ids) - 1, largest):
                    chunk = Chunk(sequence, start, min(start + largest, len(sequence.token_ids) - 1))
                    used = sum(stop - begin for _, begin, stop in chunks)
                    if chunks and (
                        used + chunk.stop - chunk.start > largest or len(chunks) == self.plan.max_prefill_sequences
                    ):
                        self.runner.prefill(chunks)
                        chunks = []
                    chunks.append(chunk)
            self.runner.prefill(chunks)

    def _run(self, sequences: list[Sequence]) -> StepOutput:
        if self.bucket.is_prefill:
            return self.runner.prefill([Chunk(one, 0, len(one.token_ids)) for one in sequences], bucket=self.bucket)
        self.runner.row_assignment.assign_prefilled(sequences)
        return self.runner.decode(sequences)

    def _peak_memory_bytes(self) -> int:
        """Of device memory since the bucket began; on a CPU, of the process since it began: no other is kept."""
        if self.plan.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _check_parity(self, sequences: list[Sequence]) -> _ParityCheck:
        """The bucket as it will serve (from its graph if it has one) against transformers' own attention."""
        rows = self._checked_rows(len(sequences))
        ours = list(self._run(sequences).logits[rows].clone())
        inputs = [sequences[row].token_ids for row in rows]
        references = [reference_logits(self.runner.model, token_ids, self.reference) for token_ids in inputs]
        if self.bucket.is_prefill and len(sequences[0].token_ids) > 1:
            inputs.append(sequences[0].token_ids)
            ours.append(self._logits_in_two_chunks(sequences[0]))
            references.append(references[0])
        found, wanted = torch.stack(ours), torch.stack(references)
        return _ParityCheck(
            check_parity(found, wanted, self.plan.compute_dtype), greedy_tokens(inputs, wanted), greedy_tokens(inputs, found)
        )

    def _checked_rows(self, count: int) -> list[int]:
        last = count - 1
        if self.bucket.is_prefill or count <= MAX_CHECKED_ROWS:
            return list(range(count))
        return sorted({0, last // 3, 2 * last // 3, last})

    def _logits_in_two_chunks(self, sequence: Sequence) -> torch.Tensor:
        """The last logits of a prompt taken in two chunks: the second attends to the first through its pages."""
        length = len(sequence.token_ids)
        self.runner.prefill([Chunk(sequence, 0, length // 2)], bucket=self.bucket)
        return self.runner.prefill([Chunk(sequence, length // 2, length)], bucket=self.bucket).logits[0].clone()

    def _time(self) -> tuple[float, float]:
        """Median ms of a step, eager and as served; decode stands at a context of MAX_TIMED_CONTEXT or what fits."""
        with force_eager():
            eager_ms = self._step_ms(captured=False)
        return eager_ms, self._step_ms()

    def _step_ms(self, captured: bool = True) -> float:
        sequences = self._timed_sequences()
        self._run(sequences)
        if self.bucket.min_size:  # a dynamic bucket keeps no buffers to run again
            return _median_ms(lambda: None, lambda: self._run(sequences))
        again = self.runner.rerun if captured else self.runner.rerun_uncaptured
        restore = (
            (lambda: None)
            if self.bucket.is_prefill
            else (lambda: self.runner.row_assignment.assign_prefilled(sequences))
        )
        return _median_ms(restore, lambda: again(self.bucket))

    def _timed_sequences(self) -> list[Sequence]:
        """Prefill: one prompt that fills the bucket. Decode: full rows; their keys are whatever the cache holds.

        Candidates are judged by this alone: not by many short prompts in a bucket, nor by chunks behind a prefix.
        """
        self.allocator = BlockAllocator(self.plan.kv_blocks, self.plan.block_size)
        if self.bucket.is_prefill:
            return [self._make_sequence(self.bucket.size)]
        return [self._make_sequence(self._timed_context()) for _ in range(self.bucket.size)]

    def _timed_context(self) -> int:
        """Tokens that each sequence of a decode bucket holds while a step is timed."""
        held = (self.plan.kv_blocks - 1) // self.bucket.size * self.plan.block_size
        return min(MAX_TIMED_CONTEXT, self.plan.context, held)


def _any_timed(trials: tuple[Trial, ...]) -> bool:
    return any(trial.step_ms is not None for trial in trials)


def _with_parity_failure(trial: Trial, parity: Parity) -> Trial:
    return dataclasses.replace(trial, step_ms=None, error=f"not the eager model: KL {parity.kl:.2g}")


def _fastest(trials: tuple[Trial, ...], variants: dict[str, Variant]) -> Trial:
    def time_of(trial: Trial) -> float:
        return math.inf if trial.step_ms is None else trial.step_ms * variants[trial.variant].required_speedup

    return min(trials, key=time_of)


def _total_compilation(winner: Variant, again: CompileStats, compiled: dict[Variant, _CompiledVariant]) -> CompileStats:
    """What it took to make the winner in this run, with the programs that an earlier candidate left it.

    `again` is of making it once more, the last of all, when the programs of those in `compiled` were there.
    """
    before = itertools.takewhile(lambda variant: variant != winner, compiled)
    shared = next((compiled[one].compilation for one in before if one.shares_programs_with(winner)), CompileStats())
    return shared + (compiled[winner].compilation if winner in compiled else again)


def _median_ms(restore: Callable[[], None], step: Callable[[], StepOutput]) -> float:
    """`restore` restores what a step moves on, outside of the time."""
    times: list[float] = []
    for number in range(TIMED_RUNS + UNTIMED_RUNS):
        restore()
        _synchronize()
        start = time.perf_counter()
        step()
        _synchronize()
        if number >= UNTIMED_RUNS:
            times.append(time.perf_counter() - start)
        if len(times) >= 3 and sum(times) > MAX_TIMED_SECONDS:
            break
    return sorted(times)[len(times) // 2] * 1e3


def _free_bytes() -> int | None:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
