"""The token sequences that a bucket is compiled, checked and timed on.

Check batches have unequal lengths and leave padding in the bucket, so that the parity check covers packing and padding
rows. Timing batches fill the bucket. Both are random tokens from a fixed seed. Neither goes through the scheduler:
each batch takes its KV blocks from a new allocator, so two batches overwrite each other's cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from tcdeploy.compiler.stances import force_eager
from tcdeploy.engine.blocks import BlockAllocator
from tcdeploy.engine.graphs import StepOutput
from tcdeploy.engine.runner import ModelRunner
from tcdeploy.engine.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.planning.plan import Bucket, Plan

MAX_TIMED_CONTEXT = 512  # tokens
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
            return self.runner.prefill(chunks, bucket=self.bucket)
        self.runner.row_assignment.assign_prefilled(self.sequences)
        return self.runner.decode(self.sequences)

    def fill_kv_cache(self) -> None:
        """Write the keys and values of all but each sequence's last token, by eager packed prefills."""
        with force_eager():
            for chunks in _packed_chunks(self.sequences, self.plan):
                self.runner.prefill(chunks)


def make_check_batch(runner: ModelRunner, bucket: Bucket) -> WarmupBatch:
    """Prefill: three packed prompts if they fit, else one that fills the bucket. Decode: one sequence per row."""
    allocator = BlockAllocator(runner.plan.kv_blocks, runner.plan.block_size)
    lengths = _prefill_lengths if bucket.is_prefill else _decode_lengths
    return _make_batch(runner, bucket, lengths(bucket, runner.plan, allocator), allocator)


def make_timing_batch(runner: ModelRunner, bucket: Bucket) -> WarmupBatch:
    """Prefill: one prompt that fills the bucket. Decode: every row at `timed_context` tokens, keys and values unset.

    Variants are compared on this batch only. Many short prompts in one bucket, and chunks that follow a cached prefix,
    are not timed.
    """
    allocator = BlockAllocator(runner.plan.kv_blocks, runner.plan.block_size)
    lengths = [bucket.size] if bucket.is_prefill else [timed_context(runner.plan, bucket)] * bucket.size
    return _make_batch(runner, bucket, lengths, allocator)


def timed_context(plan: Plan, bucket: Bucket) -> int:
    """Tokens per sequence while a decode bucket is timed: MAX_TIMED_CONTEXT, or what the context or KV blocks allow."""
    available = (plan.kv_blocks - 1) // bucket.size * plan.block_size
    return min(MAX_TIMED_CONTEXT, plan.context, available)


def _make_batch(runner: ModelRunner, bucket: Bucket, lengths: list[int], allocator: BlockAllocator) -> WarmupBatch:
    source = random.Random(SEED)
    sequences = []
    for length in lengths:
        token_ids = [source.randrange(runner.vocab_size) for _ in range(length)]
        sequence = Sequence(0, token_ids, length, SamplingParams())
        sequence.blocks = allocator.allocate(allocator.blocks_for(length))
        sequences.append(sequence)
    return WarmupBatch(runner, bucket, sequences)


def _prefill_lengths(bucket: Bucket, plan: Plan, allocator: BlockAllocator) -> list[int]:
    size = bucket.size
    packed = [size - size // 4 - size // 8 - 1, size // 4, size // 8]
    blocks = sum(allocator.blocks_for(length) for length in packed)
    fits = size >= 8 and plan.max_prefill_sequences >= len(packed) and blocks <= allocator.num_allocatable
    return packed if fits else [size]


def _decode_lengths(bucket: Bucket, plan: Plan, allocator: BlockAllocator) -> list[int]:
    """At most one block each; the first sequence reaches into its third block if enough blocks are free."""
    longest = min(plan.block_size, plan.context)
    lengths = [2 + 7 * row % (longest - 1) for row in range(bucket.size)]
    first = min(2 * plan.block_size + 5, plan.context)
    if allocator.blocks_for(first) + bucket.size - 1 <= allocator.num_allocatable:
        lengths[0] = first
    return lengths


def _packed_chunks(sequences: list[Sequence], plan: Plan) -> Iterator[list[Chunk]]:
    """All but each sequence's last token, in prefill steps of the largest bucket."""
    largest = plan.prefill_buckets[-1].size
    chunks: list[Chunk] = []
    for sequence in sequences:
        for start in range(0, len(sequence.token_ids) - 1, largest):
            chunk = Chunk(sequence, start, min(start + largest, len(sequence.token_ids) - 1))
            tokens = sum(stop - begin for _, begin, stop in [*chunks, chunk])
            if chunks and (tokens > largest or len(chunks) == plan.max_prefill_sequences):
                yield chunks
                chunks = []
            chunks.append(chunk)
    yield chunks
