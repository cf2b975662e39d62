"""Applies the changes of each `StepBatch` to the decode rows on the device.

Rows that move or become free are updated by one gather on the device, because the next input token of a row may not
have reached the host. An unchanged list costs no kernel launch, and a sequence appended to the list moves no row: the
gather is about a dozen launches, which would delay the first token of a prompt on an idle engine. Free rows are kept
empty for the same reason.

The block tables of the rows change right before a decode step only. Prefill reads a table of its own, so the upload of
a prompt's blocks overlaps with its prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.engine.schedule.step_batch import NewRow, RowBlocks, RowSampling, StepBatch
from tcdeploy.engine.step.batch import DecodeRows
from tcdeploy.engine.step.sampling import set_biases, set_penalty_history, set_scalars, to_device
from tcdeploy.kernels.sampling.rows import MAX_LISTED_TOP_K, Features

FLOAT32 = torch.finfo(torch.float32)


class RowUse(NamedTuple):
    """What a row needs beside its greedy token."""

    features: Features | None  # None: the greedy token is the sampled one
    logprobs: int | None  # most likely tokens to report


class RowAssignment:
    """Keeps `decode_rows` in line with the batches."""

    def __init__(self, decode_rows: DecodeRows) -> None:
        self.decode_rows = decode_rows
        self._rows: list[RowUse] = []  # the assigned rows

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def apply(self, batch: StepBatch) -> None:
        """Change the rows and their block tables. Launches kernels only for what changed."""
        if batch.empties_rows:
            self.clear()
        if batch.rows is not None:
            self._assign(batch.rows)
        if batch.blocks:
            self._upload_blocks(batch.blocks)

    def clear(self) -> None:
        """Empty every row, including one that a failed step left half written."""
        self._rows = []
        padding_row = self.decode_rows.padding_row
        # Penalty counts stay: a row with penalties replaces them.
        self._gather_rows([padding_row] * (padding_row + 1), None)
        self.decode_rows.sampling.bias_ends.zero_()  # a row without biases does not write its own

    def uses(self, rows: Iterable[int | None]) -> set[RowUse]:
        """The different uses of these rows; None is skipped."""
        return {self._rows[row] for row in rows if row is not None}

    def masks_on_device(self, rows: ListLike[int | None], masks: Tensor) -> Tensor:
        """The masks of all outputs, [len(rows), words] int32, on the device.

        `masks`: those of the constrained rows, in order, in host memory; all bits of the others are set. Pinned memory
        must come from torch, which keeps it until the copy is done.
        """
        device = self.decode_rows.token_ids.device
        constrained = [
            output for output, row in enumerate(rows)
            if row is not None and (features := self._rows[row].features) and features.masks
        ]  # fmt: skip
        on_device = torch.full((len(rows), masks.shape[1]), -1, dtype=torch.int32, device=device)
        index = to_device(constrained, torch.int64, device)
        return on_device.index_copy_(0, index, masks.to(device, non_blocking=True))

    def _assign(self, rows: ListLike[int | NewRow]) -> None:
        padding_row, previous = self.decode_rows.padding_row, self._rows
        assert all(row < len(previous) for row in rows if isinstance(row, int)), "a batch is missing"
        source = [row if isinstance(row, int) else padding_row for row in rows]
        source += [padding_row] * (padding_row + 1 - len(rows))
        if source[: len(previous)] != list(range(len(previous))):
            self._gather_rows(source, combined_features(previous))
        new = {number: row for number, row in enumerate(rows) if isinstance(row, NewRow)}
        self._upload_sampling({number: row.sampling for number, row in new.items() if row.sampling})
        self._upload_slots([(number, row.slot) for number, row in new.items()])
        self._upload_tokens([(number, row.token_id, row.length) for number, row in new.items() if row.length])
        self._rows = [previous[row] if isinstance(row, int) else row_use(row) for row in rows]

    def _gather_rows(self, source: list[int], features: Features | None) -> None:
        """Row i takes the content of row source[i]; of vocabulary-sized penalty counts only if `features` use them."""
        decode_rows = self.decode_rows
        tensors = [decode_rows.token_ids, decode_rows.positions, decode_rows.seq_lens, decode_rows.block_table]
        tensors += [] if decode_rows.slots is None else [decode_rows.slots]
        tensors += decode_rows.sampling.tensors_to_gather(features or Features(penalties=False, filters=False))
        index = to_device(source, torch.int64, decode_rows.token_ids.device)
        for tensor in tensors:
            tensor.copy_(tensor.index_select(0, index))

    def _upload_sampling(self, rows: dict[int, RowSampling]) -> None:
        """Write the settings of new rows, which are copies of the padding row: greedy, no penalties."""
        if not rows:
            return
        sampling = self.decode_rows.sampling
        set_scalars(sampling, list(rows), [_scalars(settings) for settings in rows.values()])
        for row, settings in rows.items():
            if settings.history is not None:
                set_penalty_history(sampling, row, *settings.history)
            if settings.biases:
                set_biases(sampling, row, settings.biases)

    def _upload_tokens(self, tokens: ListLike[tuple[int, int, int]]) -> None:
        """Write (row, next token, length) of rows whose tokens the host knows."""
        if not tokens:
            return
        decode_rows = self.decode_rows
        rows, token_ids, lengths = to_device(tokens, torch.int64, decode_rows.token_ids.device).T
        decode_rows.token_ids.index_copy_(0, rows, token_ids)
        decode_rows.positions.index_copy_(0, rows, lengths - 1)
        decode_rows.seq_lens.index_copy_(0, rows, lengths.to(decode_rows.seq_lens.dtype))

    def _upload_slots(self, row_slots: ListLike[tuple[int, int]]) -> None:
        """Write (row, state slot) of new rows, if layers keep state in slots."""
        slots = self.decode_rows.slots
        if slots is None or not row_slots:
            return
        rows, values = to_device(row_slots, torch.int64, slots.device).T
        slots.index_copy_(0, rows, values.to(slots.dtype))

    def _upload_blocks(self, new_blocks: ListLike[RowBlocks]) -> None:
        """Append to the block tables, in one copy for all rows."""
        table = self.decode_rows.block_table
        entries = [
            (new.row, column, block) for new in new_blocks for column, block in enumerate(new.blocks, new.column)
        ]
        rows, columns, blocks = to_device(entries, torch.int64, table.device).T
        table.index_put_((rows, columns), blocks.to(table.dtype))


def row_use(row: NewRow) -> RowUse:
    return RowUse(_features(row.sampling) if row.sampling else None, row.logprobs)


def combined_features(uses: Iterable[RowUse]) -> Features | None:
    """The features that any of the rows uses; None if the greedy tokens of the step suffice."""
    used = {use.features for use in uses if use.features}
    return Features(*map(any, zip(*used, strict=True))) if used else None


def _scalars(sampling: RowSampling) -> dict[str, float]:
    """The values of FLOATS and INTEGERS (kernels/sampling/rows.py) for a row, within the range of float32."""
    return {
        "temperature": min(sampling.temperature, FLOAT32.max),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        # A penalty that float32 rounds to infinity or 0 would turn some logits into NaN.
        "repetition": min(max(sampling.repetition_penalty, FLOAT32.tiny), FLOAT32.max),
        "presence": sampling.presence_penalty,
        "frequency": sampling.frequency_penalty,
        "top_k": sampling.top_k,
        "seeds": sampling.seed,
        "changes_logits": _features(sampling).change_logits,
    }


def _features(sampling: RowSampling) -> Features:
    top_k, top_p = sampling.top_k, sampling.top_p
    has_small_top_k = 0 < top_k <= MAX_LISTED_TOP_K
    return Features(
        penalties=sampling.history is not None,
        filters=top_k > 0 or top_p < 1 or sampling.min_p > 0,
        biases=bool(sampling.biases),
        masks=sampling.is_constrained,
        small_top_k=has_small_top_k,
        large_top_k=top_k > MAX_LISTED_TOP_K,
        wide_top_p=top_p < 1 and not has_small_top_k,
    )
