"""The static tensors that programs and CUDA graphs read: the decode rows, and the inputs of each prefill bucket.

A CUDA graph replays on fixed addresses. Decode bucket b reads the first b of the `DecodeRows`. The step itself advances
them (engine/step/advance.py), so the host uploads nothing while the batch stays the same. A prefill bucket has inputs
of its own, which are uploaded in one copy.

A mixed step is a prefill bucket that also feeds the running sequences: its first tokens are those of the decode rows,
and its outputs are those of the prompts and then those of the rows. The ids of the rows' tokens are read on the device,
since the host may not have read them yet; positions and lengths are known to the host. `row_slots` is the number of
rows that a step has outputs for. It is fixed by a CUDA graph, so it is the size of a decode bucket, or 0.

Unused rows and tokens of a bucket are padding. The last decode row is the padding row, to which sampled tokens of
padding are written. Its length is 0, and a sequence of length 0 neither writes nor reads a key. Its state slot is the
scratch slot.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcdeploy.engine.schedule.sequence import MAX_LOGIT_BIASES
from tcdeploy.engine.schedule.step_batch import StepBatch
from tcdeploy.kernels.attention.metadata import PADDING_SLOT, AttentionMetadata, DecodeMetadata, PrefillMetadata
from tcdeploy.kernels.attention.ops import HOST_SCALARS
from tcdeploy.kernels.sampling.rows import SamplingRows, make_sampling_rows
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic

ALIGNMENT = 16  # elements: each part of a packed upload starts at a multiple of 128 bytes (int64) or 64 bytes (int32)


@dataclass(frozen=True)
class DecodeRows:
    """The device's state of the running sequences. The last row is the padding row."""

    token_ids: Tensor  # [max batch + 1] int64: the token that the next step feeds
    positions: Tensor  # [max batch + 1] int64: the position of that token
    seq_lens: Tensor  # [max batch + 1] int32: position + 1, or 0 for an empty row
    block_table: Tensor  # [max batch + 1, width] int32
    sampling: SamplingRows
    slots: Tensor | None  # [max batch + 1] int32: the state slot of each row; None if no layer keeps state in slots

    @property
    def padding_row(self) -> int:
        return self.token_ids.shape[0] - 1


def make_decode_rows(plan: Plan, vocab_size: int) -> DecodeRows:
    num_rows, zeros = plan.decode_buckets[-1].size + 1, functools.partial(torch.zeros, device=plan.device)
    return DecodeRows(
        token_ids=zeros(num_rows, dtype=torch.int64),
        positions=zeros(num_rows, dtype=torch.int64),
        seq_lens=zeros(num_rows, dtype=torch.int32),
        block_table=zeros(num_rows, _block_table_width(plan), dtype=torch.int32),
        sampling=make_sampling_rows(num_rows, vocab_size, MAX_LOGIT_BIASES, plan.device),
        slots=zeros(num_rows, dtype=torch.int32) if plan.slots else None,
    )


class GraphKey(NamedTuple):
    """What identifies a graph. `tokens`: rows in decode. `row_slots`: decode rows of a mixed step, else 0."""

    bucket: Bucket
    tokens: int
    row_slots: int


class StepOutput(NamedTuple):
    logits: Tensor  # [outputs, vocab]
    tokens: Tensor  # [outputs] int64: greedy tokens, unless sampled
    rows: Tensor  # [outputs] int64: the decode row of each output


@dataclass(frozen=True)
class StepBuffers:
    """The static inputs of one bucket.

    Output i belongs to decode row `rows[i]`, whose sequence has `lengths[i]` tokens after this step. A length of 0
    (padding, or a chunk that does not end its prompt) changes no decode row; sampling writes to the padding row.
    """

    bucket: Bucket
    input_ids: Tensor  # [1, tokens] int64
    position_ids: Tensor  # [1, tokens] int64
    rows: Tensor  # [outputs] int64
    lengths: Tensor  # [outputs] int32
    metadata: AttentionMetadata
    logits_indices: Tensor | None = None  # [outputs] int64: the token of each output; None: every token
    row_slots: int = 0
    # [tokens] int64: the decode row of each token, or max batch + 1 plus its index in input_ids; None: all in input_ids
    token_sources: Tensor | None = None

    @property
    def key(self) -> GraphKey:
        return GraphKey(self.bucket, self.input_ids.shape[1], self.row_slots)


def decode_buffers(bucket: Bucket, decode_rows: DecodeRows, split_counters: Tensor) -> StepBuffers:
    """Views of the first decode rows, which all decode buckets share."""
    size = bucket.size
    block_table = decode_rows.block_table[:size]
    mark_dynamic(block_table, 1)  # the width follows the context, which is not part of a program
    slots = None if decode_rows.slots is None else decode_rows.slots[:size]
    decode = DecodeMetadata(block_table, decode_rows.seq_lens[:size], split_counters, slots)
    rows = torch.arange(size, device=decode_rows.token_ids.device)
    input_ids, position_ids = decode_rows.token_ids[None, :size], decode_rows.positions[None, :size]
    return StepBuffers(bucket, input_ids, position_ids, rows, decode.seq_lens, AttentionMetadata(decode=decode))


class PrefillBuffers:
    """The inputs of a prefill bucket: views of one device tensor that is filled by one copy."""

    def __init__(
        self, plan: Plan, bucket: Bucket, tokens: int, decode_rows: DecodeRows, split_counters: Tensor
    ) -> None:
        self.plan, self.decode_rows = plan, decode_rows
        self.tokens, self._bucket = tokens, bucket
        # In a mixed step the first sequence holds the tokens of the decode rows.
        self._first_sequence = int(plan.mixed_steps)
        sequences, width = plan.max_prefill_sequences + self._first_sequence, _block_table_width(plan)
        outputs = plan.max_prefill_sequences + (decode_rows.padding_row if plan.mixed_steps else 0)
        self._int64_layout = _PackedLayout(
            ids=tokens, positions=tokens, slots=tokens, sources=tokens if plan.mixed_steps else 0,
            logits_indices=outputs, rows=outputs,
        )  # fmt: skip
        self._int32_layout = _PackedLayout(
            seq_lens=sequences, starts=sequences + 1, lengths=outputs, state_slots=sequences if plan.slots else 0,
            tables=sequences * width,
        )  # fmt: skip
        self._packed = torch.zeros(
            self._int64_layout.size + self._int32_layout.size // 2, dtype=torch.int64, device=plan.device
        )
        # Block tables need no clearing: attention reads only the entries that `fill` writes.
        self._zeroed_size = self._int64_layout.size + self._int32_layout.offset_of("tables") // 2
        self._int64_views = self._int64_layout.views(self._packed)
        self._int32_views = self._int32_layout.views(self._packed[self._int64_layout.size :].view(torch.int32))
        block_table = self._int32_views["tables"].view(sequences, width)
        mark_dynamic(block_table, 1)
        self._prefill = PrefillMetadata(
            slot_mapping=self._int64_views["slots"],
            block_table=block_table,
            seq_lens=self._int32_views["seq_lens"],
            cu_seqlens_q=self._int32_views["starts"],
            host_scalars=torch.zeros(len(HOST_SCALARS), dtype=torch.int64),
            slots=self._int32_views["state_slots"] if plan.slots else None,
        )
        self._decode = _all_rows(decode_rows, split_counters) if plan.mixed_steps else None
        self._host_scalars_array = self._prefill.host_scalars.numpy()
        self._buffers: dict[int, StepBuffers] = {}  # by row_slots

    def buffers(self, row_slots: int = 0) -> StepBuffers:
        """The inputs of a step with outputs for all prompts and for `row_slots` decode rows."""
        if row_slots in self._buffers:
            return self._buffers[row_slots]
        outputs = self.plan.max_prefill_sequences + row_slots
        int64_views = self._int64_views
        logits_indices = int64_views["logits_indices"][:outputs]
        if self.plan.mixed_steps or self._bucket.min_size:
            # Programs must not depend on the number of rows. The storage offset of the view becomes a symbol too; torch
            # would specialise an offset of 0 or 1.
            mark_dynamic(logits_indices, 0)
        self._buffers[row_slots] = StepBuffers(
            bucket=self._bucket,
            input_ids=int64_views["ids"][None],
            position_ids=int64_views["positions"][None],
            rows=int64_views["rows"][:outputs],
            lengths=self._int32_views["lengths"][:outputs],
            metadata=AttentionMetadata(self._prefill, self._decode),
            logits_indices=logits_indices,
            row_slots=row_slots,
            token_sources=int64_views["sources"] if row_slots else None,
        )
        return self._buffers[row_slots]

    def fill(self, batch: StepBatch) -> None:
        """Pack one token of each decoding row, and then the chunks in order."""
        assert len(batch.lengths) == batch.num_decoding
        staging = torch.empty(self._packed.shape, dtype=torch.int64, pin_memory=self._packed.is_cuda)
        staging_array = staging.numpy()
        int64_views = self._int64_layout.views(staging_array)
        int32_views = self._int32_layout.views(staging_array[self._int64_layout.size :].view(numpy.int32))
        staging_array[: self._zeroed_size] = 0
        int64_views["slots"][:] = PADDING_SLOT
        int64_views["rows"][:] = self.decode_rows.padding_row
        if self.plan.mixed_steps:
            self._fill_rows(batch.lengths, int64_views, int32_views)
        tables = int32_views["tables"].reshape(self._prefill.block_table.shape)
        coordinates = _block_coordinates(self.plan.context, self.plan.block_size)
        end = batch.num_decoding
        for number, chunk in enumerate(batch.chunks):
            begin, end = end, end + len(chunk.token_ids)
            blocks = numpy.array(chunk.blocks, dtype=numpy.int64)
            int64_views["ids"][begin:end] = chunk.token_ids
            positions, block_index, block_offset = (column[chunk.start : chunk.stop] for column in coordinates)
            int64_views["positions"][begin:end] = positions
            first_slots = blocks * self.plan.block_size
            numpy.add(first_slots[block_index], block_offset, out=int64_views["slots"][begin:end])
            int64_views["logits_indices"][number] = end - 1
            entry = number + self._first_sequence
            tables[entry, : len(blocks)] = blocks
            int32_views["seq_lens"][entry] = chunk.stop
            int32_views["starts"][entry + 1 :] = end
            if self.plan.slots:
                int32_views["state_slots"][entry] = chunk.slot
            if chunk.row is not None:
                int64_views["rows"][number], int32_views["lengths"][number] = chunk.row, chunk.stop
        self._packed.copy_(staging, non_blocking=True)
        lengths = [chunk.stop for chunk in batch.chunks]
        max_seqlen_q = max((len(chunk.token_ids) for chunk in batch.chunks), default=0)
        has_prefix = any(chunk.start > 0 for chunk in batch.chunks)
        # As kernels/attention/ops.py lists them in HOST_SCALARS; the runner sets the number of rows.
        scalars = (end, sum(lengths), max_seqlen_q, max(lengths, default=0), int(has_prefix), batch.num_decoding, 0)
        self._host_scalars_array[:] = scalars

    def _fill_rows(self, row_lengths: list[int], int64_views: dict[str, Any], int32_views: dict[str, Any]) -> None:
        """The tokens and outputs of the decode rows. Their K and V are written by attention, so they have no slots."""
        count, first_output = len(row_lengths), self.plan.max_prefill_sequences
        lengths = numpy.array(row_lengths, dtype=numpy.int64)
        row_numbers, outputs = numpy.arange(count), slice(first_output, first_output + count)
        int64_views["sources"][:] = numpy.arange(self.tokens) + self.decode_rows.padding_row + 1
        int64_views["sources"][:count] = row_numbers
        int64_views["positions"][:count] = lengths - 1
        int64_views["logits_indices"][outputs] = row_numbers
        int64_views["rows"][outputs] = row_numbers
        int32_views["lengths"][outputs] = lengths
        int32_views["starts"][1:] = count


def _all_rows(decode_rows: DecodeRows, split_counters: Tensor) -> DecodeMetadata:
    """All decode rows, as mixed steps read them. Programs depend neither on the largest batch nor on the context."""
    dynamic = [(decode_rows.block_table, 0), (decode_rows.block_table, 1), (decode_rows.seq_lens, 0)]
    if decode_rows.slots is not None:
        dynamic.append((decode_rows.slots, 0))
    for tensor, dim in dynamic:
        mark_dynamic(tensor, dim)
    return DecodeMetadata(decode_rows.block_table, decode_rows.seq_lens, split_counters, decode_rows.slots)


@functools.cache
def _block_coordinates(context: int, block_size: int) -> tuple[NDArray[numpy.int64], ...]:
    """(position, block index, offset in the block) of every position, as read-only arrays that all buckets share."""
    positions = numpy.arange(context)
    columns = positions, positions // block_size, positions % block_size
    for column in columns:
        column.setflags(write=False)
    return columns


class _PackedLayout:
    """Named slices of a flat tensor or array, each starting at a multiple of ALIGNMENT elements."""

    def __init__(self, **sizes: int) -> None:
        self._slices: dict[str, tuple[int, int]] = {}
        self.size = 0
        for name, size in sizes.items():
            self._slices[name] = (self.size, self.size + size)
            self.size += -(-size // ALIGNMENT) * ALIGNMENT

    def offset_of(self, name: str) -> int:
        return self._slices[name][0]

    def views(self, flat):  # type: ignore[no-untyped-def]  # a torch.Tensor or a numpy array
        return {name: flat[start:stop] for name, (start, stop) in self._slices.items()}


def _block_table_width(plan: Plan) -> int:
    return max(plan.blocks_per_sequence, 2)  # torch specialises a width of 1
