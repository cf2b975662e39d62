"""Maps running sequences to decode rows, and keeps the device's copy of the mapping current.

`assign` compares the scheduler's list with the present rows and uploads the differences only. Rows that move or become
free are updated by one gather on the device, because the next input token of a row may not have reached the host. An
unchanged list costs no kernel launch, and a sequence appended to the list moves no row: the gather is about a dozen
launches, which would delay the first token of a prompt on an idle engine. Free rows are kept empty for the same reason.

Block tables are uploaded separately, right before a decode step. Prefill reads a table of its own, so the upload of a
prompt's blocks overlaps with its prefill.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import torch
from torch import Tensor

from tcdeploy.engine.schedule.constraint import Masker, Matcher
from tcdeploy.engine.schedule.sequence import Chunk, Sequence
from tcdeploy.engine.step.batch import DecodeRows
from tcdeploy.engine.step.sampling import row_seed, set_biases, set_penalty_history, set_scalars, to_device
from tcdeploy.kernels.sampling.rows import MAX_LISTED_TOP_K, Features

FLOAT32 = torch.finfo(torch.float32)


class RowAssignment:
    """Keeps `decode_rows` (on the device) in line with the list of running sequences (on the host)."""

    def __init__(self, decode_rows: DecodeRows) -> None:
        self.decode_rows = decode_rows
        self._assigned: list[Sequence] = []
        self._uploaded_blocks: list[int] = []  # per row, the number of blocks in the device's table

    @property
    def is_empty(self) -> bool:
        return not self._assigned

    def assign(self, running: ListLike[Sequence]) -> None:
        """Make row i hold running[i]. Launches kernels only for rows that changed."""
        if len(running) != len(self._assigned) or any(a is not b for a, b in zip(running, self._assigned, strict=True)):
            self._reassign(running)

    def upload_block_table(self) -> None:
        """Bring every row's block table up to date, in one copy for all rows that grew."""
        new_blocks: list[tuple[int, int, int]] = []  # row, column, block
        for row, sequence in enumerate(self._assigned):
            uploaded, blocks = self._uploaded_blocks[row], sequence.blocks
            if len(blocks) != uploaded:
                new_blocks += [(row, column, blocks[column]) for column in range(uploaded, len(blocks))]
                self._uploaded_blocks[row] = len(blocks)
        if new_blocks:
            self._upload_blocks(new_blocks)

    def rows_for_chunks(self, chunks: ListLike[Chunk]) -> list[int | None]:
        """The decode row of each chunk that ends the prompt of an assigned sequence; None for the others."""
        rows = {id(sequence): row for row, sequence in enumerate(self._assigned)}
        return [rows.get(id(sequence)) if stop == len(sequence.token_ids) else None for sequence, _, stop in chunks]

    def assign_prefilled(self, sequences: ListLike[Sequence]) -> None:
        """Assign sequences as if their prefill had just ended. For warm-up, where the host knows all tokens."""
        self.clear()
        self.assign(sequences)
        self.upload_block_table()
        lengths = [len(sequence.token_ids) for sequence in sequences]
        self._upload(self.decode_rows.token_ids, [sequence.token_ids[-1] for sequence in sequences])
        self._upload(self.decode_rows.positions, [length - 1 for length in lengths])
        self._upload(self.decode_rows.seq_lens, lengths)

    def clear(self) -> None:
        """Empty every row, including one that a failed assignment left half written."""
        self._assigned, self._uploaded_blocks = [], []
        padding_row = self.decode_rows.padding_row
        # Penalty counts stay: a row with penalties replaces them.
        self._gather_rows([padding_row] * (padding_row + 1), ())
        self.decode_rows.sampling.bias_ends.zero_()  # a row without biases does not write its own

    def features(self, sequences: ListLike[Sequence]) -> Features | None:
        """The sampling features these sequences use; None if the greedy tokens of the step suffice."""
        if all(sequence.params.is_unmodified_greedy for sequence in sequences):
            return None
        return _features(sequences)

    def masks(self, sequences: ListLike[Sequence | None], outputs: int) -> Tensor:
        """Bit masks of the tokens allowed for each output, [outputs, words] int32; all bits set if unconstrained.

        The host must have read the tokens of all previous steps, because the matchers continue from them.
        """
        rows: list[int] = []
        matcher_rows_by_masker: dict[Masker, list[tuple[Matcher, int]]] = {}  # one call per masker
        for row, sequence in enumerate(sequences):
            # Skip rows without a constraint, and those whose token will be dropped.
            if sequence is None or sequence.matcher is None or sequence.finish_reason:
                continue
            assert sequence.num_in_flight == 1, "only the token of this step is unread"
            matcher_rows_by_masker.setdefault(sequence.matcher.masker, []).append((sequence.matcher, len(rows)))
            rows.append(row)
        device, words = self.decode_rows.token_ids.device, -(-self.decode_rows.sampling.in_prompt.shape[1] // 32)
        # Allocated by torch, which can pin it and keeps it until the copy is done; written by numpy. Torch does not pin
        # a tensor made from an array, and fills a large tensor with one thread per core, which then spin for a while.
        packed = torch.empty(len(rows), words, dtype=torch.int32, pin_memory=device.type == "cuda")
        packed_array = packed.numpy()
        packed_array.fill(0)
        for masker, matcher_rows in matcher_rows_by_masker.items():
            masker.fill(matcher_rows, packed_array)
        masks = torch.full((outputs, words), -1, dtype=torch.int32, device=device)
        index = to_device(rows, torch.int64, device)
        return masks.index_copy_(0, index, packed.to(device, non_blocking=True))

    def _reassign(self, running: ListLike[Sequence]) -> None:
        previous_rows = {id(sequence): row for row, sequence in enumerate(self._assigned)}
        padding_row = self.decode_rows.padding_row
        source = [previous_rows.get(id(sequence), padding_row) for sequence in running]
        source += [padding_row] * (padding_row + 1 - len(running))
        if source[: len(previous_rows)] != list(range(len(previous_rows))):
            self._gather_rows(source, self._assigned)
        uploaded = [self._uploaded_blocks[row] if row < padding_row else 0 for row in source[: len(running)]]
        new = {row: sequence for row, sequence in enumerate(running) if id(sequence) not in previous_rows}
        self._upload_sampling_params({row: s for row, s in new.items() if not s.params.is_unmodified_greedy})
        self._assigned, self._uploaded_blocks = list(running), uploaded

    def _gather_rows(self, source: list[int], assigned: ListLike[Sequence]) -> None:
        """Row i takes the content of row source[i]; of vocabulary-sized penalty counts only if `assigned` uses them."""
        decode_rows = self.decode_rows
        tensors = [decode_rows.token_ids, decode_rows.positions, decode_rows.seq_lens, decode_rows.block_table]
        tensors += decode_rows.sampling.tensors_to_gather(_features(assigned))
        index = to_device(source, torch.int64, decode_rows.token_ids.device)
        for tensor in tensors:
            tensor.copy_(tensor.index_select(0, index))

    def _upload_sampling_params(self, sequences: dict[int, Sequence]) -> None:
        """Write the parameters of new sequences. Their rows are copies of the padding row: greedy, no penalties."""
        if not sequences:
            return
        sampling = self.decode_rows.sampling
        set_scalars(sampling, list(sequences), [_scalars(sequence) for sequence in sequences.values()])
        for row, sequence in sequences.items():
            params, length = sequence.params, sequence.prompt_length
            if params.has_penalties:
                set_penalty_history(sampling, row, sequence.token_ids[:length], sequence.token_ids[length:])
            if params.has_biases:
                set_biases(sampling, row, params.biases(length))

    def _upload_blocks(self, new_blocks: ListLike[tuple[int, int, int]]) -> None:
        """Write (row, column, block) entries of the block table in one copy."""
        table = self.decode_rows.block_table
        rows, columns, blocks = to_device(new_blocks, torch.int64, table.device).T
        table.index_put_((rows, columns), blocks.to(table.dtype))

    def _upload(self, target: Tensor, values: ListLike[float]) -> None:
        target[: len(values)].copy_(to_device(values, target.dtype, target.device), non_blocking=True)


def _scalars(sequence: Sequence) -> dict[str, float]:
    """The values of FLOATS and INTEGERS (kernels/sampling/rows.py) for a row, within the range of float32."""
    params = sequence.params
    return {
        "temperature": min(params.temperature, FLOAT32.max),
        "top_p": params.top_p,
        "min_p": params.min_p,
        # A penalty that float32 rounds to infinity or 0 would turn some logits into NaN.
        "repetition": min(max(params.repetition_penalty, FLOAT32.tiny), FLOAT32.max),
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "top_k": params.top_k,
        "seeds": row_seed(params.seed),
        "changes_logits": _features([sequence]).change_logits,
    }


def _features(sequences: ListLike[Sequence]) -> Features:
    all_params = [sequence.params for sequence in sequences]
    return Features(
        penalties=any(params.has_penalties for params in all_params),
        filters=any(params.has_filters for params in all_params),
        biases=any(params.has_biases for params in all_params),
        masks=any(params.constraint is not None for params in all_params),
        small_top_k=any(0 < params.top_k <= MAX_LISTED_TOP_K for params in all_params),
        large_top_k=any(params.top_k > MAX_LISTED_TOP_K for params in all_params),
        wide_top_p=any(params.top_p < 1 and not 0 < params.top_k <= MAX_LISTED_TOP_K for params in all_params),
    )
