"""Reruns fixed prompts through the warmed buckets and compares the results with recorded ones.

This is a known-answer test. The same program on the same inputs gives the same logits, so a later difference means that
weights, programs, KV blocks or the device have changed: a flipped bit in GPU memory, a block table that points to
another block, a damaged graph. Results that were already wrong when recorded are left to parity_check.py.

Each case is a batch of fixed prompts in a fixed bucket, run by `ModelRunner` directly. The scheduler would choose
buckets by load, and would reuse keys and values of the prefix cache instead of computing them. KV blocks come from the
engine's allocator, differ between runs, and are never registered in the prefix cache; state slots come from the
scheduler. Prompts are short even in large buckets: a graph computes its whole size anyway. Of a dynamic bucket, three
of the graphs without decode rows are checked; those of mixed steps are not.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Iterator
from collections.abc import Sequence as ListLike
from typing import NamedTuple, TypeAlias

import torch

from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.engine.schedule.step_batch import NewRow, RowBlocks, StepBatch, prefilled_rows, prompt_chunk
from tcdeploy.engine.step.batch import StepOutput
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.programs.stances import fail_on_recompile

DECODE_STEPS = 4
MAX_PROMPT_BLOCKS = 4  # a prompt of a single prefill step also reaches into a fifth block
LONG_ROW_BLOCKS = 2  # the first row of a decode batch also reaches into a third block
CHECKED_SIZES = (512,)  # of a dynamic bucket, beside its largest size and the smallest that holds the prompt
SEED = 77
ROWS_PER_PASS = 16  # of the log-probabilities: 8 MB of float32 at a vocabulary of 128,256
# Nats, by compute dtype, also for near ties. 200 runs on other blocks gave equal bits (an 8B shape in bfloat16, H100).
# The tolerance allows for sums in another order, as in a matrix product on a CPU whose inputs have another alignment.
LOGPROB_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}


StepResult: TypeAlias = "list[tuple[int, float]]"  # the greedy token of each row, and its log-probability


class CanaryCase(NamedTuple):
    """Fixed prompts for one bucket. Only the first prompt is prefilled."""

    name: str
    bucket: Bucket
    prompts: tuple[tuple[int, ...], ...]
    chunk_size: int  # most tokens of a prefill step
    min_step_tokens: int = 0  # each prefill step is padded to a captured size of at least so many tokens


class CanaryStep(NamedTuple):
    """A step that has run. Its output is valid until the next step, which may overwrite it."""

    phase: str
    output: StepOutput
    rows: int
    feeds_next: bool  # whether the tokens are inputs of the next step

    def result(self) -> StepResult:
        """The result of the step, for which the host waits."""
        tokens = self.output.tokens[: self.rows]
        return list(zip(tokens.tolist(), self.logprobs(tokens), strict=True))

    @torch.no_grad()
    def logprobs(self, tokens: torch.Tensor) -> list[float]:
        """The log-probability of one token in each row. Their normalisation depends on every logit."""
        values: list[float] = []
        for start in range(0, self.rows, ROWS_PER_PASS):
            part = slice(start, min(start + ROWS_PER_PASS, self.rows))
            logits = self.output.logits[part].float()
            chosen = logits.gather(1, tokens[part, None])[:, 0]
            values += (chosen - logits.logsumexp(dim=-1)).tolist()
        return values


class CanaryDifference(NamedTuple):
    """The first value that differs from the recorded one."""

    case: CanaryCase
    phase: str  # of the step that differs
    step: int  # counts the steps of the case
    row: int
    expected: tuple[int, float]  # token, log-probability
    actual: tuple[int, float]

    def __str__(self) -> str:
        (expected, expected_logprob), (actual, logprob) = self.expected, self.actual
        return (
            f"prompt {self.row} of {self.case.name} (bucket {self.case.bucket.name}), {self.phase} step {self.step}: "
            f"expected token {expected} with log-probability {expected_logprob:.6f}, "
            f"got token {actual} with {logprob:.6f}"
        )


class Canary:
    """The cases of an engine and their recorded results. The engine must be idle while a case is recorded or runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._runner = engine, engine.runner
        self._tolerance = LOGPROB_TOLERANCE[engine.plan.compute_dtype]
        self.unrecorded = make_cases(engine.plan, engine.vocab_size, engine.allocator.capacity)
        self.cases: list[CanaryCase] = []  # recorded
        self.unrepeatable: list[CanaryDifference] = []  # of cases that are not used
        self.num_steps = 0  # since the start, recording included
        self._recorded: list[list[StepResult]] = []

    def record_next(self) -> Generator[None, None, CanaryDifference | None]:
        """Runs the first unrecorded case twice, and yields after each step. If the results differ, it is not used.

        Returns the first difference, or None. Raises RecompileError if a step would compile. Closing the generator has
        the same effect as for `check`; the case is then still unrecorded.
        """
        case, results = self.unrecorded[0], list[StepResult]()
        with contextlib.closing(self._run(case)) as steps:
            for step in steps:
                results.append(step.result())
                yield
        difference = yield from self._compare(case, results)
        self.unrecorded.pop(0)
        if difference is not None:
            self.unrepeatable.append(difference)
        else:
            self.cases.append(case)
            self._recorded.append(results)
        return difference

    def check(self, number: int) -> Generator[None, None, CanaryDifference | None]:
        """Runs recorded case `number` and yields after each step. Returns the first difference, or None.

        Closing the generator between two steps releases blocks and rows, so the engine can run a request at once.
        Raises RecompileError if a step would compile.
        """
        return self._compare(self.cases[number], self._recorded[number])

    def _compare(self, case: CanaryCase, recorded: list[StepResult]) -> Generator[None, None, CanaryDifference | None]:
        """Run a case and compare each step, up to the first difference.

        After a near tie that went the other way, a row has another context, and is not compared any more.
        """
        diverged: set[int] = set()
        with contextlib.closing(self._run(case)) as steps:
            for number, (expected, step) in enumerate(zip(recorded, steps, strict=True)):
                result = step.result()
                differing = self._differing_rows(expected, result, step) - diverged
                if differing:
                    row = min(differing)
                    return CanaryDifference(case, step.phase, number, row, expected[row], result[row])
                if step.feeds_next:
                    diverged |= {row for row in range(step.rows) if expected[row][0] != result[row][0]}
                yield
        return None

    def _differing_rows(self, expected: StepResult, result: StepResult, step: CanaryStep) -> set[int]:
        """Rows whose token's log-probability differs, or that have another token and no near tie.

        In a near tie, the recorded token and the new one both have the recorded log-probability, up to the tolerance.
        """
        tokens, compared = [token for token, _ in expected], [[logprob for _, logprob in result]]
        if tokens != [token for token, _ in result]:
            compared.append(step.logprobs(torch.tensor(tokens, device=step.output.logits.device)))
        return {
            row
            for logprobs in compared
            for row, ((_, logprob), actual) in enumerate(zip(expected, logprobs, strict=True))
            if not abs(logprob - actual) <= self._tolerance  # NaN is a difference
        }

    def _run(self, case: CanaryCase) -> Generator[CanaryStep]:
        """Run the case, one step per item."""
        assert not self._engine.has_work, "requests and a canary would overwrite each other's rows"
        allocator, slots = self._engine.allocator, self._engine.scheduler.slots
        sequences = [Sequence(0, list(prompt), len(prompt), SamplingParams()) for prompt in case.prompts]
        try:
            for sequence in sequences:
                sequence.blocks = allocator.allocate(self._blocks_for(sequence.token_ids))
                sequence.slot = slots.allocate()
            yield from self._prefill(case, sequences[0])
            if not case.bucket.is_prefill:
                self._runner.row_assignment.apply(prefilled_rows(sequences))
            for _ in range(1 if case.bucket.is_prefill else DECODE_STEPS):
                yield self._step("decode", StepBatch(num_decoding=len(sequences)), len(sequences), True)
        finally:
            for sequence in sequences:
                allocator.release(sequence.blocks)
                slots.release(sequence.slot)
            self._runner.row_assignment.clear()

    def _prefill(self, case: CanaryCase, sequence: Sequence) -> Iterator[CanaryStep]:
        """Prefill the whole prompt; without its last token, which the first decode step feeds, in a decode case."""
        is_prefill = case.bucket.is_prefill
        end = len(sequence.token_ids) if is_prefill else len(sequence.token_ids) - 1
        for start in range(0, end, case.chunk_size):
            chunk = Chunk(sequence, start, min(start + case.chunk_size, end))
            feeds_next = is_prefill and chunk.stop == end
            batch = StepBatch(
                rows=[NewRow(slot=sequence.slot)] if start == 0 else None,
                blocks=[RowBlocks(0, 0, sequence.blocks.copy())] if start == 0 else [],
                chunks=[prompt_chunk(chunk, row=0 if feeds_next else None)],
                bucket=case.bucket if is_prefill else None,
                early_size_from=case.min_step_tokens,
            )
            yield self._step("prefill", batch, 1, feeds_next)

    def _step(self, phase: str, batch: StepBatch, rows: int, feeds_next: bool) -> CanaryStep:
        with fail_on_recompile(), self._runner.uncounted_steps():
            output = self._runner.run(batch)
        self.num_steps += 1
        return CanaryStep(phase, output, rows, feeds_next)

    def _blocks_for(self, prompt: ListLike[int]) -> int:
        return self._engine.allocator.blocks_for(len(prompt) + DECODE_STEPS)


def make_cases(plan: Plan, vocab_size: int, num_blocks: int) -> list[CanaryCase]:
    """One case for each bucket, or three for a dynamic one, and a prompt in two chunks in the smallest prefill bucket.

    A prefill case also decodes one token, so that the keys and values it wrote are read through the block table. A
    decode bucket that needs more rows than `num_blocks` is left out: no load can fill it either.
    """
    source = random.Random(SEED)
    longest = max(1, min(plan.context, num_blocks * plan.block_size) - DECODE_STEPS)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(source.randrange(vocab_size) for _ in range(min(length, longest)))

    cases = []
    for bucket in plan.prefill_buckets:
        length = min(bucket.size, MAX_PROMPT_BLOCKS * plan.block_size + 5)
        cases.append(CanaryCase(bucket.name, bucket, (prompt(length),), bucket.size))
        if bucket.min_size and plan.uses_cuda_graph(bucket):
            sizes = sorted({size for size in CHECKED_SIZES if length < size < bucket.size} | {bucket.size})
            cases += [
                CanaryCase(f"{bucket.name} at {size} tokens", bucket, (prompt(length),), bucket.size, size)
                for size in sizes
            ]
    smallest = plan.prefill_buckets[0]
    chunk_size = min(smallest.size, MAX_PROMPT_BLOCKS * plan.block_size)
    two_chunks = prompt(2 * chunk_size - 1)
    if len(two_chunks) > chunk_size:
        cases.append(CanaryCase(f"{smallest.name} in two chunks", smallest, (two_chunks,), chunk_size))
    for bucket in plan.decode_buckets:
        long_row = min(LONG_ROW_BLOCKS * plan.block_size + 5, longest)
        long_row_blocks = -(-(long_row + DECODE_STEPS) // plan.block_size)
        if bucket.size - 1 + long_row_blocks > num_blocks:
            long_row, long_row_blocks = 1, 1
        if bucket.size - 1 + long_row_blocks <= num_blocks:
            prompts = (prompt(long_row), *(prompt(1) for _ in range(bucket.size - 1)))
            cases.append(CanaryCase(bucket.name, bucket, prompts, plan.prefill_buckets[-1].size))
    return cases
