"""The part of a step's metadata that ops with state in slots read: which tokens belong to which slot.

An op takes these tensors as arguments, because it cannot take a NamedTuple. `starts` is None in a decode step, and
`row_slots` in one of prompts only; both are set in a mixed step (see mechanism.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.kernels.attention.metadata import AttentionMetadata
from tcdeploy.kernels.attention.ops import HOST_SCALARS


class Sequences(NamedTuple):
    """The chunks of prompts and the decode rows of a step."""

    starts: Tensor | None  # [sequences + 1] int32: the first token of each chunk, and the end of the last one
    seq_lens: Tensor | None  # [sequences] int32: tokens of the sequence up to the end of its chunk; 0 for padding
    slots: Tensor | None  # [sequences] int32
    host_scalars: Tensor | None  # [7] int64 on the CPU
    row_seq_lens: Tensor | None  # [rows] int32: with the new token; 0 for padding
    row_slots: Tensor | None  # [rows] int32

    def launched_rows(self, tokens: int) -> int:
        """Rows that a step of `tokens` tokens computes, padding rows included. Only the host's tensors are read."""
        if self.row_slots is None:
            return 0
        if self.host_scalars is None:
            return tokens
        return min(int(self.host_scalars[HOST_SCALARS.index("rows")]), tokens)

    def rows_of_prompts(self) -> Tensor | None:
        """In a mixed step, [1]: the number of rows that have a token, which come first. Otherwise None."""
        return None if self.starts is None else self.starts[1:2]


class Chunk(NamedTuple):
    """Tokens [start, end) of a step. `is_new`: the sequence starts with them."""

    start: int
    end: int
    slot: int
    is_new: bool


def sequences_of(metadata: AttentionMetadata) -> Sequences:
    prefill, decode = metadata
    prompts = (None,) * 4 if prefill is None else (
        prefill.cu_seqlens_q, prefill.seq_lens, prefill.slots, prefill.host_scalars
    )  # fmt: skip
    rows = (None, None) if decode is None else (decode.seq_lens, decode.slots)
    return Sequences(*prompts, *rows)


def chunks(sequences: Sequences) -> Iterator[Chunk]:
    """The chunks of prompts, read on the host."""
    if sequences.starts is None or sequences.seq_lens is None or sequences.slots is None:
        return
    starts = sequences.starts.tolist()
    for start, end, length, slot in zip(
        starts, starts[1:], sequences.seq_lens.tolist(), sequences.slots.tolist(), strict=False
    ):
        if length > 0:
            yield Chunk(start, end, slot, length == end - start)


def decode_rows(sequences: Sequences, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, slots, is_new) of the rows that have a token in this step, as int64 and bool [rows in use].

    x [tokens, ...]: the input of the step.
    """
    count = sequences.launched_rows(len(x))
    if sequences.row_seq_lens is None or sequences.row_slots is None or not count:
        empty = torch.empty(0, dtype=torch.int64, device=x.device)
        return empty, empty, empty.bool()
    lengths = sequences.row_seq_lens[:count]
    in_use = lengths > 0
    if (limit := sequences.rows_of_prompts()) is not None:
        in_use = in_use & (torch.arange(count, device=lengths.device) < limit)
    [rows] = in_use.nonzero(as_tuple=True)
    return rows, sequences.row_slots[rows].long(), lengths[rows] == 1
