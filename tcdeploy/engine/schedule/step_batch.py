"""What the scheduler decided for one step, as plain data. Does not import torch.

Beside bit masks, a batch is the only input of the runner. It refers to no object of the scheduler, and msgspec encodes
it, so the runner can be in another thread, process or rank. It contains the differences from the previous batch:
`StepBatchBuilder` compares the running sequences with those of the previous batch by their ids, and
engine/step/rows.py applies the differences to the decode rows on the device. If the same sequences decode again, in the
same blocks, the batch contains their number only: 13 bytes.

The bit masks of constrained outputs are not part of a batch: they depend on tokens that may be unread when the forward
pass is launched. They follow in a buffer of their own, whose row i belongs to the i-th constrained output of the step.

Rejected: a batch with the settings and blocks of all rows. For 256 rows of 8 blocks each, that is 26 KB, and encoding
takes 0.07 ms in each step instead of 0.0002 ms.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from collections.abc import Sequence as ListLike

from msgspec import Struct

from tcdeploy.engine.schedule.sequence import Chunk, SchedulerOutput, Sequence
from tcdeploy.engine.schedule.slots import SCRATCH_SLOT
from tcdeploy.planning.plan import Bucket


class RowSampling(Struct, array_like=True, frozen=True, gc=False):
    """How a row samples, if its token is not the argmax of the model's logits.

    `is_constrained`, `biases` and `history` are derived from SamplingParams; the other fields are its fields.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int  # a signed 64-bit integer
    is_constrained: bool
    biases: list[tuple[int, float, int]]  # token id, added value, first position without it
    history: tuple[list[int], list[int]] | None  # tokens of prompt and output, which penalties count; None without them


class NewRow(Struct, array_like=True, frozen=True, gc=False):
    """A sequence that gets a decode row. `token_id` and `length` are set if no step writes them on the device."""

    sampling: RowSampling | None = None  # None: the argmax of the model's logits
    logprobs: int | None = None  # most likely tokens to report with each new token
    token_id: int = 0  # which the next step feeds
    length: int = 0  # tokens of the sequence, `token_id` included
    slot: int = SCRATCH_SLOT  # where layers keep state of the sequence, if any do


class RowBlocks(Struct, array_like=True, frozen=True, gc=False):
    """KV blocks to append to the block table of a row, from `column` on."""

    row: int
    column: int
    blocks: list[int]


class PromptChunk(Struct, array_like=True, frozen=True, gc=False):
    """Tokens of a prompt from position `start` on."""

    start: int
    token_ids: list[int]
    blocks: list[int]  # of the sequence, from its first token on
    row: int | None  # the decode row of the sequence, if the chunk ends its prompt
    # The tokens that follow those of the chunk, one each, whose log-probabilities are requested; the last token of the
    # prompt has none. [] without prompt_logprobs.
    scored_ids: list[int] = []
    num_logprobs: int = 0  # most likely tokens to report with each of these
    slot: int = SCRATCH_SLOT  # as in NewRow

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


class StepBatch(Struct, array_like=True, frozen=True, gc=False):
    """One step, or a change of the rows without a step. `rows` is applied before `blocks`.

    `rows[i]` is the previous row that becomes row i, or a NewRow. All later rows become empty.
    """

    num_decoding: int = 0  # the first rows decode one token each
    rows: list[int | NewRow] | None = None  # None: as in the previous step
    blocks: list[RowBlocks] = []
    chunks: list[PromptChunk] = []
    lengths: list[int] = []  # beside chunks: tokens of each decoding row after this step
    empties_rows: bool = False  # first, all rows are emptied, including those that a failed step left half written
    bucket: Bucket | None = None  # of a step with chunks; None: the smallest that holds it
    # Pad a step with chunks to a size that is captured during start-up and has at least so many tokens, so that the
    # results of equal steps can be compared. None: pad it less once a smaller size is captured.
    early_size_from: int | None = None
    restores: list[tuple[int, int]] = []  # (source, target) slots: copied before the step reads or writes any slot
    snapshots: list[tuple[int, int]] = []  # copied right after the step, before a later step writes to a source

    @property
    def num_tokens(self) -> int:
        return self.num_decoding + sum(len(chunk.token_ids) for chunk in self.chunks)

    def output_rows(self, max_chunks: int) -> list[int | None]:
        """The decode row of each output; None for a chunk that does not end its prompt, and for padding.

        In a mixed step the outputs of `max_chunks` chunks come first, and then those of the decode rows.
        """
        of_chunks = [chunk.row for chunk in self.chunks]
        padding = max_chunks - len(of_chunks) if of_chunks and self.num_decoding else 0
        return [*of_chunks, *[None] * padding, *range(self.num_decoding)]


class StepBatchBuilder:
    """Makes the batches of a scheduler's steps.

    The runner must apply all of them in order. If a step fails, `empty_rows` makes the next batch.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []  # of the sequence in each row
        self._num_blocks: list[int] = []  # in the block table of each row

    def build(self, step: SchedulerOutput, running: ListLike[Sequence]) -> StepBatch:
        """The batch of a step after which row i belongs to running[i]. The first running sequences decode."""
        return StepBatch(
            num_decoding=len(step.decode),
            rows=self._changed_rows(running),
            # Not in a step without decode rows: prefill reads a table of its own, and each earlier launch delays it.
            blocks=self._new_blocks(running) if step.decode else [],
            chunks=self._chunks(step.chunks),
            lengths=[sequence.num_computed_tokens for sequence in step.decode] if step.chunks else [],
            restores=list(step.restores),
            snapshots=list(step.snapshots),
        )

    def empty_rows(self) -> StepBatch:
        """Forget all rows. The batch empties them, in any state."""
        self._ids, self._num_blocks = [], []
        return StepBatch(empties_rows=True)

    def _changed_rows(self, running: ListLike[Sequence]) -> list[int | NewRow] | None:
        ids = [sequence.request_id for sequence in running]
        if ids == self._ids:
            return None
        previous = {request_id: row for row, request_id in enumerate(self._ids)}
        rows = [
            previous[sequence.request_id] if sequence.request_id in previous else new_row(sequence)
            for sequence in running
        ]
        self._num_blocks = [self._num_blocks[row] if isinstance(row, int) else 0 for row in rows]
        self._ids = ids
        return rows

    def _new_blocks(self, running: ListLike[Sequence]) -> list[RowBlocks]:
        """The blocks to append to the tables. If the scheduler took blocks back, later ones overwrite their entries."""
        num_blocks = [len(sequence.blocks) for sequence in running]
        previous, self._num_blocks = self._num_blocks, num_blocks
        if num_blocks == previous:
            return []
        return [
            RowBlocks(row, uploaded, running[row].blocks[uploaded:])
            for row, (uploaded, count) in enumerate(zip(previous, num_blocks, strict=True))
            if count > uploaded
        ]

    def _chunks(self, chunks: ListLike[Chunk]) -> list[PromptChunk]:
        if not chunks:
            return []
        rows = {request_id: row for row, request_id in enumerate(self._ids)}
        return [prompt_chunk(chunk, rows[chunk.sequence.request_id] if chunk.ends_prompt else None) for chunk in chunks]


def prompt_chunk(chunk: Chunk, row: int | None = None) -> PromptChunk:
    """`row`: the decode row that gets the token that the chunk samples, if it ends its prompt."""
    (sequence, start, stop), k = chunk, chunk.sequence.params.prompt_logprobs
    token_ids, blocks = sequence.token_ids[start:stop], sequence.blocks.copy()  # the scheduler clears released lists
    if k is None:
        return PromptChunk(start, token_ids, blocks, row, slot=sequence.slot)
    scored_ids = sequence.token_ids[start + 1 : min(stop + 1, sequence.prompt_length)]
    return PromptChunk(start, token_ids, blocks, row, scored_ids, k, sequence.slot)


def new_row(sequence: Sequence) -> NewRow:
    """The row of a sequence of which the host knows all tokens but the one that the present step samples."""
    params, length = sequence.params, sequence.prompt_length
    if params.is_unmodified_greedy:
        return NewRow(logprobs=params.logprobs, slot=sequence.slot)
    sampling = RowSampling(
        temperature=float(params.temperature),  # the values may be numpy's, which cannot be encoded
        top_k=int(params.top_k),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        seed=row_seed(params.seed),
        is_constrained=params.constraint is not None,
        biases=[(int(token), float(value), end) for token, value, end in params.biases(length)],
        history=(sequence.token_ids[:length], sequence.token_ids[length:]) if params.has_penalties else None,
    )
    return NewRow(sampling, params.logprobs, slot=sequence.slot)


def prompt_batch(
    chunks: Iterable[Chunk], bucket: Bucket | None = None, early_size_from: int | None = None
) -> StepBatch:
    """Chunks of prompts that belong to no decode row, with all rows empty. For steps without the scheduler."""
    packed = [prompt_chunk(chunk) for chunk in chunks]
    return StepBatch(rows=[], chunks=packed, bucket=bucket, early_size_from=early_size_from)


def prefilled_rows(sequences: ListLike[Sequence]) -> StepBatch:
    """Rows of greedy sequences as if their prefill had just ended. For steps without the scheduler."""
    return StepBatch(
        empties_rows=True,
        rows=[
            NewRow(token_id=sequence.token_ids[-1], length=len(sequence.token_ids), slot=sequence.slot)
            for sequence in sequences
        ],
        blocks=[RowBlocks(row, 0, sequence.blocks.copy()) for row, sequence in enumerate(sequences)],
    )


def row_seed(seed: int | None) -> int:
    """A request's seed as a signed 64-bit integer; a random one for None."""
    bits = secrets.randbits(64) if seed is None else seed % 2**64
    return bits - 2**64 if bits >= 2**63 else bits
