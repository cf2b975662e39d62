"""The token sequences that a bucket is compiled, checked and timed on.

Check batches (check_prompts.py) have unequal lengths and leave padding in the bucket, so that the parity check covers
packing and padding rows. Timing batches are random tokens that fill the bucket. Neither goes through the scheduler.
Without a given allocator, each batch takes its KV blocks from a new one, so batches overwrite each other's cache. While
a server has requests, these are the blocks that `Engine.paused` reserves. State slots are always those of a new
allocator: no request has a slot while a batch runs. A batch writes its state before it reads it, so a batch may run
several times, but a check reads only the first run of a decode step after `fill_state`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tcdeploy.engine.check.check_prompts import CheckPrompts, PromptPrefix, checked_rows
from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.engine.schedule.slots import SlotAllocator
from tcdeploy.engine.schedule.step_batch import StepBatch, prefilled_rows, prompt_batch, prompt_chunk
from tcdeploy.engine.step.batch import StepOutput
from tcdeploy.engine.step.filled_state import FilledState
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.programs.stances import force_eager

MAX_TIMED_CONTEXT = 512  # tokens
SMALL_PROMPT_TOKENS = 16
SEED = 20


class WarmupBatch(NamedTuple):
    """A bucket and the sequences that its step runs on."""

    runner: ModelRunner
    bucket: Bucket
    sequences: list[Sequence]

    @property
    def plan(self) -> Plan:
        return self.runner.plan

    def run(self) -> StepOutput:
        """One step: the whole prompts in a prefill bucket, the next token of each sequence in a decode bucket."""
        if self.bucket.is_prefill:
            chunks = [Chunk(sequence, 0, len(sequence.token_ids)) for sequence in self.sequences]
            return self.runner.run(prompt_batch(chunks, self.bucket))
        filled = self.runner.filled_state
        self.runner.row_assignment.apply(prefilled_rows(self.sequences))
        output = self.runner.run(StepBatch(num_decoding=len(self.sequences)))
        if filled is not None and filled.is_kept_by(self.sequences):
            self.runner.filled_state = filled
        return output

    def fill_state(self) -> None:
        """Write the keys, values and slots of all but each sequence's last token, by eager packed prefills.

        Rows whose logits are not compared share sequences (`_joined_rows`), so their blocks have the keys and values of
        other tokens. Nothing is written if the check of a larger bucket has already filled the cache.
        """
        checked = set(checked_rows(self.bucket, len(self.sequences)))
        compared, others = list[Sequence](), list[Sequence]()
        for row, sequence in enumerate(self.sequences):
            (compared if row in checked else others).append(sequence)
        blocks = {block for sequence in self.sequences for block in sequence.blocks}
        state = FilledState({tuple(sequence.blocks): tuple(sequence.token_ids) for sequence in compared}, blocks)
        filled = self.runner.filled_state
        if filled is not None and filled.includes(state):
            return
        sequences = [*compared, *_joined_rows(others, self.plan)]
        self._fill_state(sequences, [len(sequence.token_ids) - 1 for sequence in sequences])
        if not self.plan.slots:  # a decode step changes the state in a slot
            self.runner.filled_state = state

    def run_in_two_chunks(self) -> StepOutput:
        """Prefill the first sequence: its beginning eagerly, and the rest, at most half of it, in the bucket.

        The other sequences decode one token each in the same step.
        """
        sequence, *decoding = self.sequences
        length = len(sequence.token_ids)
        start = length - min(self.bucket.size - len(decoding), length // 2)
        self._fill_state(self.sequences, [start, *(len(other.token_ids) - 1 for other in decoding)])
        self.runner.row_assignment.apply(prefilled_rows(decoding))
        return self.runner.run(
            StepBatch(
                num_decoding=len(decoding),
                chunks=[prompt_chunk(Chunk(sequence, start, length))],
                lengths=[len(other.token_ids) for other in decoding],
                bucket=self.bucket,
                early_size_from=self._early_size_from,
            )
        )

    def _fill_state(self, sequences: list[Sequence], lengths: list[int]) -> None:
        with force_eager():
            for chunks in _packed_chunks(sequences, lengths, self.plan):
                self.runner.run(prompt_batch(chunks, early_size_from=self._early_size_from))

    @property
    def _early_size_from(self) -> int | None:
        """0 without the model: such starts cannot run eagerly, so steps are padded to sizes captured at start-up."""
        return None if self.runner.has_model else 0


def make_check_batch(
    runner: ModelRunner, bucket: Bucket, prompts: CheckPrompts, prefixes: list[PromptPrefix]
) -> WarmupBatch:
    """Compared rows have the same blocks in all decode buckets, so that `fill_state` need not fill them again."""
    token_ids = [prompts.token_ids(prefix) for prefix in prefixes]
    return _make_batch(runner, bucket, token_ids, blocks_first=checked_rows(bucket, len(prefixes)))


def make_small_batch(runner: ModelRunner, bucket: Bucket) -> WarmupBatch:
    """A prompt of SMALL_PROMPT_TOKENS, and a decode row beside it if steps are mixed and the KV cache has a block."""
    plan, prompt = runner.plan, min(SMALL_PROMPT_TOKENS, runner.plan.context)
    allocator = BlockAllocator(plan.kv_blocks, plan.block_size)
    has_row = plan.mixed_steps and allocator.blocks_for(prompt) < allocator.num_allocatable
    return _make_batch(runner, bucket, [[0] * length for length in (prompt, *[2] * has_row)])


def make_timing_batch(
    runner: ModelRunner, bucket: Bucket, length: int | None = None, allocator: BlockAllocator | None = None
) -> WarmupBatch:
    """A batch of random tokens. The keys and values that are in the KV cache before the step are not initialized.

    `length`: of the one prompt (default: the bucket's size), or of each decode row (default: `timed_context`).
    `allocator`: source of the KV blocks, which the caller releases; default: a new one.
    """
    if bucket.is_prefill:
        lengths = [length or bucket.size]
    else:
        lengths = [length or timed_context(runner.plan, bucket)] * bucket.size
    source = random.Random(SEED)
    token_ids = [[source.randrange(runner.vocab_size) for _ in range(n)] for n in lengths]
    return _make_batch(runner, bucket, token_ids, allocator)


def timed_context(plan: Plan, bucket: Bucket) -> int:
    """Tokens per sequence while a decode bucket is timed: MAX_TIMED_CONTEXT, or what the context or KV blocks allow."""
    available = (plan.kv_blocks - 1) // bucket.size * plan.block_size
    return min(MAX_TIMED_CONTEXT, plan.context, available)


def _make_batch(
    runner: ModelRunner, bucket: Bucket, token_ids: list[list[int]], allocator: BlockAllocator | None = None,
    blocks_first: Iterable[int] = (),
) -> WarmupBatch:  # fmt: skip
    """`blocks_first`: indices of the sequences that get the first blocks of the allocator."""
    allocator = allocator or runner.batch_allocator()
    slots = SlotAllocator(runner.plan.slots)
    blocks = {
        index: allocator.allocate(allocator.blocks_for(len(token_ids[index])))
        for index in dict.fromkeys([*blocks_first, *range(len(token_ids))])
    }
    sequences = []
    for index, tokens in enumerate(token_ids):
        sequence = Sequence(0, tokens, len(tokens), SamplingParams(), blocks=blocks[index])
        if slots.num_free:  # further prompts of a prefill step share the scratch slot: no step continues them
            sequence.slot = slots.allocate()
        sequences.append(sequence)
    return WarmupBatch(runner, bucket, sequences)


def _joined_rows(rows: list[Sequence], plan: Plan) -> list[Sequence]:
    """Sequences that each fill the blocks of several rows, so that fewer steps are needed.

    A step packs 8 prompts: for 256 rows, 32 eager steps took 1.3 s (8B shape, H200). Rows with a slot are not joined,
    because a slot has the state of one sequence.
    """
    rows_per_step = min(plan.context, plan.prefill_buckets[-1].size) // plan.block_size
    if plan.slots or rows_per_step < 2 or len(rows) < 2:
        return rows
    joined = []
    for start in range(0, len(rows), rows_per_step):
        some = rows[start : start + rows_per_step]
        blocks = [block for row in some for block in row.blocks]
        count = min(len(blocks) * plan.block_size, plan.context)
        tokens = [token for row in some for token in row.token_ids]
        token_ids = list(itertools.islice(itertools.cycle(tokens), count))
        joined.append(Sequence(0, token_ids, count, SamplingParams(), blocks=blocks))
    return joined


def _packed_chunks(sequences: list[Sequence], lengths: list[int], plan: Plan) -> Iterator[list[Chunk]]:
    """The first `lengths` tokens of the sequences, in prefill steps of the largest bucket."""
    largest = plan.prefill_buckets[-1].size
    chunks: list[Chunk] = []
    for sequence, length in zip(sequences, lengths, strict=True):
        for start in range(0, length, largest):
            chunk = Chunk(sequence, start, min(start + largest, length))
            tokens = sum(stop - begin for _, begin, stop in [*chunks, chunk])
            if chunks and (tokens > largest or len(chunks) == plan.max_prefill_sequences):
                yield chunks
                chunks = []
            chunks.append(chunk)
    yield chunks
