"""The static tensors that programs and CUDA graphs read: one set of decode rows for all buckets, one set per prefill.

A graph replays on fixed addresses. `DecodeRows` holds what the running sequences are to the device: the token that
each feeds next, its position, its length, its blocks, how it is sampled. Decode bucket b reads the first b rows, and
the step itself moves them on (engine/advance.py), so the host copies nothing in while the batch stays the same. A
prefill step has inputs of its own, which go up in one copy.

What a bucket has left over is padding. The last row belongs to nobody: what a step computes for padding lands there.
Its length is 0, and length 0 writes no key and reads none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcdeploy.attention.interface import AttentionMetadata, default_splits
from tcdeploy.attention.kv_cache import PADDING_SLOT
from tcdeploy.engine.sampling import SamplingRows, make_sampling_rows
from tcdeploy.engine.sequence import Chunk
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.torch_compat.mark_dynamic import mark_dynamic

ALIGNMENT = 16  # elements: every part of a packed upload begins at a multiple of 128 bytes


@dataclass(frozen=True)
class DecodeRows:
    """The device's view of what runs; `rows` live ones and, as the last, the one that belongs to nobody."""

    token_ids: Tensor  # [rows + 1] int64: the token that the next step feeds
    positions: Tensor  # [rows + 1] int64: where it stands
    seq_lens: Tensor  # [rows + 1] int32: position + 1, or 0 for an empty row
    block_table: Tensor  # [rows + 1, width] int32
    sampling: SamplingRows

    @property
    def padding_row(self) -> int:
        return self.token_ids.shape[0] - 1


def make_decode_rows(plan: Plan, vocab_size: int) -> DecodeRows:
    rows = plan.decode_buckets[-1].size + 1

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=plan.device)

    return DecodeRows(
        token_ids=zeros(rows, dtype=torch.int64),
        positions=zeros(rows, dtype=torch.int64),
        seq_lens=zeros(rows, dtype=torch.int32),
        block_table=zeros(rows, _block_table_width(plan), dtype=torch.int32),
        sampling=make_sampling_rows(rows, vocab_size, torch.device(plan.device)),
    )


@dataclass(frozen=True)
class StepBuffers:
    """Inputs of one bucket. `rows` says whose next token each output is; `lengths` how many of its tokens are cached.

    Where lengths is 0 (padding, or a prompt that goes on in a later chunk) nothing is written to the decode rows.
    """

    bucket: Bucket
    input_ids: Tensor  # [1, tokens] int64
    position_ids: Tensor  # [1, tokens] int64
    rows: Tensor  # [outputs] int64
    lengths: Tensor  # [outputs] int32
    step: AttentionMetadata
    logits_indices: Tensor | None = None  # [outputs] int64: the last token of each prompt; None: every token is one


def decode_buffers(bucket: Bucket, state: DecodeRows, step: AttentionMetadata) -> StepBuffers:
    """The first rows of the decode state: views, so that all decode buckets share it. `step` brings the arrivals."""
    size, device = bucket.size, state.token_ids.device
    block_table = state.block_table[:size]
    mark_dynamic(block_table, 1)  # its width follows the context: a symbol, so programs do not
    unused = torch.zeros(2, dtype=torch.int64, device=device)
    inputs = AttentionMetadata(
        is_prefill=False,
        slot_mapping=unused,
        block_table=block_table,
        seq_lens=state.seq_lens[:size],
        cu_seqlens_q=unused,
        host_scalars=torch.zeros(5, dtype=torch.int64),
        decode_splits=default_splits(size, step.split_counters),
        split_counters=step.split_counters,
    )
    rows = torch.arange(size, device=device)
    ids, positions = state.token_ids[None, :size], state.positions[None, :size]
    return StepBuffers(bucket, ids, positions, rows, inputs.seq_lens, inputs)


class PrefillBuffers:
    """A prefill bucket's inputs, as views of one device tensor that is filled by one copy."""

    def __init__(self, plan: Plan, bucket: Bucket, tokens: int, state: DecodeRows, step: AttentionMetadata) -> None:
        self.plan, self.state = plan, state
        sequences, width = plan.max_prefill_sequences, _block_table_width(plan)
        self._int64_layout = _PackedLayout(
            ids=tokens, positions=tokens, slots=tokens, logits_indices=sequences, rows=sequences
        )
        self._int32_layout = _PackedLayout(
            seq_lens=sequences, starts=sequences + 1, lengths=sequences, tables=sequences * width
        )
        self._packed = torch.zeros(
            self._int64_layout.size + self._int32_layout.size // 2, dtype=torch.int64, device=plan.device
        )
        self._zeroed_size = (
            self._int64_layout.size + self._int32_layout.offset_of("tables") // 2
        )  # of a table only what is filled is read
        longs = self._int64_layout.views(self._packed)
        ints = self._int32_layout.views(self._packed[self._int64_layout.size :].view(torch.int32))
        block_table = ints["tables"].view(sequences, width)
        mark_dynamic(block_table, 1)
        inputs = AttentionMetadata(
            is_prefill=True,
            slot_mapping=longs["slots"],
            block_table=block_table,
            seq_lens=ints["seq_lens"],
            cu_seqlens_q=ints["starts"],
            host_scalars=torch.zeros(5, dtype=torch.int64),
            decode_splits=1,
            split_counters=step.split_counters,
        )
        self._host_scalars_array = inputs.host_scalars.numpy()
        self.buffers = StepBuffers(
            bucket, longs["ids"][None], longs["positions"][None], longs["rows"], ints["lengths"],
            inputs, longs["logits_indices"],
        )  # fmt: skip

    def fill(self, chunks: ListLike[Chunk], rows: ListLike[int | None]) -> None:
        """Pack the chunks one after another; `rows` names the decode row of each whose prompt ends here."""
        staging = torch.empty(self._packed.shape, dtype=torch.int64, pin_memory=self._packed.is_cuda)
        flat = staging.numpy()
        longs = self._int64_layout.views(flat)
        ints = self._int32_layout.views(flat[self._int64_layout.size :].view(numpy.int32))
        flat[: self._zeroed_size] = 0
        longs["slots"][:] = PADDING_SLOT
        longs["rows"][:] = self.state.padding_row
        tables = ints["tables"].reshape(self.plan.max_prefill_sequences, -1)
        grid = _block_coordinates(self.plan.context, self.plan.block_size)
        end = 0
        for number, (sequence, start, stop) in enumerate(chunks):
            begin, end = end, end + stop - start
            blocks = numpy.array(sequence.blocks, dtype=numpy.int64)
            longs["ids"][begin:end] = sequence.token_ids[start:stop]
            positions, block_index, block_offset = (each[start:stop] for each in grid)
            longs["positions"][begin:end] = positions
            first_slots = blocks * self.plan.block_size
            numpy.add(first_slots[block_index], block_offset, out=longs["slots"][begin:end])
            longs["logits_indices"][number] = end - 1
            tables[number, : len(blocks)] = blocks
            ints["seq_lens"][number] = stop
            ints["starts"][number + 1 :] = end
            row = rows[number]
            if row is not None:
                longs["rows"][number], ints["lengths"][number] = row, stop
        self._packed.copy_(staging, non_blocking=True)
        self._host_scalars_array[:] = _host_scalars(chunks, end)


@functools.cache
def _block_coordinates(
    context: int, block_size: int
) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Of every position: itself, the number of its block in the sequence, and its place there. All buckets share it."""
    positions = numpy.arange(context)
    found = positions, positions // block_size, positions % block_size
    for each in found:
        each.setflags(write=False)
    return found


def _host_scalars(chunks: ListLike[Chunk], tokens: int) -> list[int]:
    """See attention/ops.py, HOST_SCALARS."""
    lengths = [stop for _, _, stop in chunks]
    max_seqlen_q = max(stop - start for _, start, stop in chunks)
    return [tokens, sum(lengths), max_seqlen_q, max(lengths), int(any(start > 0 for _, start, _ in chunks))]


class _PackedLayout:
    """Names for stretches of a flat tensor or array, each beginning at a multiple of ALIGNMENT elements."""

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
