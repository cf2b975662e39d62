"""The static input buffers of one bucket, and how a step's sequences are laid out in them.

A bucket's program and its CUDA graph read fixed addresses, so every step is copied into the same tensors. What a
batch leaves over is padding: its tokens write to slot 0, which no sequence owns, and its sequences have length 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor

from tcdeploy.attention.interface import StepInputs
from tcdeploy.attention.kvcache import PADDING_SLOT
from tcdeploy.engine.sequence import Sequence
from tcdeploy.plan import Bucket, Plan


class Chunk(NamedTuple):
    """The tokens [start, stop) of a sequence: what one prefill step takes of its prompt."""

    sequence: Sequence
    start: int
    stop: int


@dataclass(frozen=True)
class StepBuffers:
    """Inputs of one bucket. `rows` of the hidden states go to the head: the last token of each sequence."""

    bucket: Bucket
    input_ids: Tensor  # [1, tokens] int64
    position_ids: Tensor  # [1, tokens] int64
    rows: Tensor  # [sequences] int64
    step: StepInputs
    block_size: int

    def set_prefill(self, chunks: list[Chunk]) -> None:
        """Pack the chunks one after another. Their blocks must reach to `stop`."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[list[int]] = []
        starts, lengths = [0], []
        for sequence, start, stop in chunks:
            ids += sequence.token_ids[start:stop]
            positions += range(start, stop)
            slots += [self._slot(sequence, position) for position in range(start, stop)]
            starts.append(len(ids))
            lengths.append(stop)
            tables.append(sequence.blocks)
        longest_query = max(stop - start for _, start, stop in chunks)
        has_prefix = any(start > 0 for _, start, _ in chunks)
        self._fill(ids, positions, slots, lengths, tables)
        padded_starts = starts + [starts[-1]] * (self.rows.shape[0] - len(chunks))
        _copy(self.step.cu_seqlens_q, padded_starts)
        _copy(self.rows, [start - 1 for start in padded_starts[1:]])
        _copy(self.step.host_facts, [len(ids), sum(lengths), longest_query, max(lengths), int(has_prefix)])

    def set_decode(self, sequences: list[Sequence]) -> None:
        """One token each: the last, whose key goes to the slot after the cached ones."""
        positions = [len(sequence.token_ids) - 1 for sequence in sequences]
        ids = [sequence.token_ids[-1] for sequence in sequences]
        slots = [self._slot(sequence, position) for sequence, position in zip(sequences, positions, strict=True)]
        lengths = [position + 1 for position in positions]
        self._fill(ids, positions, slots, lengths, [sequence.blocks for sequence in sequences])

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _fill(
        self, ids: list[int], positions: list[int], slots: list[int], lengths: list[int], tables: list[list[int]]
    ) -> None:
        """Copy, and pad: id and position 0, slot 0, length 0, block 0."""
        _copy(self.input_ids[0], ids)
        _copy(self.position_ids[0], positions)
        _copy(self.step.slot_mapping, slots, PADDING_SLOT)
        _copy(self.step.seq_lens, lengths)
        width = max(len(table) for table in tables)
        table = torch.zeros(self.step.block_table.shape[0], width, dtype=torch.int32)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.step.block_table[:, :width].copy_(table)


def _copy(target: Tensor, values: list[int], padding: int = 0) -> None:
    """Values, then padding, into a static tensor [size]."""
    padded = values + [padding] * (target.shape[0] - len(values))
    target.copy_(torch.tensor(padded, dtype=target.dtype))


def make_buffers(plan: Plan, bucket: Bucket, tokens: int) -> StepBuffers:
    """Buffers for `tokens` tokens: the bucket's size, or any in the range of a dynamic bucket."""
    sequences = plan.prefill_sequences if bucket.is_prefill else tokens

    def zeros(*shape: int, dtype: torch.dtype, device: str = plan.device) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    block_table = zeros(sequences, max(plan.blocks_per_sequence, 2), dtype=torch.int32)
    torch._dynamo.mark_dynamic(block_table, 1)  # its width follows the context: a symbol, so programs do not
    step = StepInputs(
        is_prefill=bucket.is_prefill,
        slot_mapping=zeros(tokens, dtype=torch.int64),
        block_table=block_table,
        seq_lens=zeros(sequences, dtype=torch.int32),
        cu_seqlens_q=zeros(sequences + 1, dtype=torch.int32),
        host_facts=zeros(5, dtype=torch.int64, device="cpu"),
    )
    return StepBuffers(
        bucket,
        input_ids=zeros(1, tokens, dtype=torch.int64),
        position_ids=zeros(1, tokens, dtype=torch.int64),
        rows=torch.arange(sequences, device=plan.device),
        step=step,
        block_size=plan.block_size,
    )
