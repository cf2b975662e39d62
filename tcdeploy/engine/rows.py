"""Who sits in which decode row: the host's list of running sequences, carried over to the device when it changes.

`assign` compares the list with what sits there, and uploads only the difference: rows that moved or emptied are one
gather on the device (the token that a row feeds next may not have reached the host yet), and new sequences bring their
sampling parameters. Nothing changed costs a comparison per row and no launch. Rows in which nobody sits are empty, so a
sequence that only joins the others moves nothing: that gather is some twenty launches, before the first token of a
prompt that finds the engine idle. For the same reason blocks go up apart (`upload_block_table`), before a decode step: a
prefill reads a table of its own, so those of its prompts go up while the device works on it.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcdeploy.engine.batch import DecodeRows
from tcdeploy.engine.constraint import Masker, Matcher
from tcdeploy.engine.sampling import Features, row_seed, set_biases, set_penalty_history
from tcdeploy.engine.sequence import Chunk, Sequence


class RowAssignment:
    """Keeps `state` (on the device) in step with the running sequences (on the host)."""

    def __init__(self, state: DecodeRows) -> None:
        self.state = state
        self._assigned: list[Sequence] = []
        self._uploaded_blocks: list[int] = []  # how many of each row's blocks the device knows

    def assign(self, running: ListLike[Sequence]) -> None:
        """Make row i hold running[i]. Launches work only for what changed."""
        if len(running) != len(self._assigned) or any(a is not b for a, b in zip(running, self._assigned, strict=True)):
            self._reassign(running)

    def upload_block_table(self) -> None:
        """Make the table of every row name all blocks of who sits there. One copy for all that grew."""
        new_blocks: list[tuple[int, int, int]] = []  # row, column, block
        for row, sequence in enumerate(self._assigned):
            known, blocks = self._uploaded_blocks[row], sequence.blocks
            if len(blocks) != known:
                new_blocks += [(row, column, blocks[column]) for column in range(known, len(blocks))]
                self._uploaded_blocks[row] = len(blocks)
        if new_blocks:
            self._upload_blocks(new_blocks)

    def rows_for_chunks(self, chunks: ListLike[Chunk]) -> list[int | None]:
        """The decode row of each chunk that ends its sequence's prompt and is seated; None for the others."""
        seats = {id(sequence): row for row, sequence in enumerate(self._assigned)}
        return [seats.get(id(one)) if stop == len(one.token_ids) else None for one, _, stop in chunks]

    def assign_prefilled(self, sequences: ListLike[Sequence]) -> None:
        """Seat sequences whose tokens the host knows all of, as if a prefill had just ended: what warm-up runs on."""
        self.clear()
        self.assign(sequences)
        self.upload_block_table()
        lengths = [len(sequence.token_ids) for sequence in sequences]
        self._upload(self.state.token_ids, [sequence.token_ids[-1] for sequence in sequences])
        self._upload(self.state.positions, [length - 1 for length in lengths])
        self._upload(self.state.seq_lens, lengths)

    def clear(self) -> None:
        """Empty every row, also one that a failed seating left half filled."""
        self._assigned, self._uploaded_blocks = [], []
        rows = self.state.padding_row
        self._gather_rows([rows] * (rows + 1), ())  # whoever penalises brings counts of its own
        self.state.sampling.bias_ends.zero_()  # and a row of no biases must have none

    def features(self, sequences: ListLike[Sequence]) -> Features | None:
        """What sampling these takes beyond the greedy choice that every step makes; None: nothing."""
        if all(sequence.params.is_unmodified_greedy for sequence in sequences):
            return None
        return _features(sequences)

    def masks(self, sequences: ListLike[Sequence | None], outputs: int) -> Tensor:
        """What each of a step's outputs may become, [outputs, words] int32; anything, for a row without a constraint.

        The tokens of all steps before must have been read: a matcher is asked what comes after them.
        """
        rows: list[int] = []
        matchers: list[Matcher] = []
        for row, sequence in enumerate(sequences):
            if sequence is None or sequence.matcher is None or sequence.finish_reason:  # a token that nobody reads
                continue
            assert sequence.in_flight == 1, "only this step's"
            rows.append(row)
            matchers.append(sequence.matcher)
        device, words = self.state.token_ids.device, -(-self.state.sampling.in_prompt.shape[1] // 32)
        # Torch's memory, which it can pin and keeps until the copy is done, written by numpy: torch pins no tensor that
        # it makes from an array, and fills a large one with a thread per core, each of which spins for a while after.
        packed = torch.empty(len(rows), words, dtype=torch.int32, pin_memory=device.type == "cuda")
        _fill_bitmasks(matchers, packed.numpy())
        masks = torch.full((outputs, words), -1, dtype=torch.int32, device=device)
        index = _to_device(rows, torch.int64, device)
        return masks.index_copy_(0, index, packed.to(device, non_blocking=True))

    def _reassign(self, running: ListLike[Sequence]) -> None:
        before = {id(sequence): row for row, sequence in enumerate(self._assigned)}
        rows = self.state.padding_row
        source = [before.get(id(sequence), rows) for sequence in running]
        source += [rows] * (rows + 1 - len(running))
        if source[: len(before)] != list(range(len(before))):
            self._gather_rows(source, self._assigned)
        blocks_up = [self._uploaded_blocks[row] if row < rows else 0 for row in source[: len(running)]]
        for row, sequence in enumerate(running):
            if id(sequence) not in before:
                self._upload_sampling_params(row, sequence)
        self._assigned, self._uploaded_blocks = list(running), blocks_up

    def _gather_rows(self, source: list[int], assigned: ListLike[Sequence]) -> None:
        """Row i becomes what row source[i] was; the row of nobody stays itself, and empties others.

        What penalties count is the size of the vocabulary in every row: it moves only where one of `assigned` has it.
        """
        state = self.state
        moved = [state.token_ids, state.positions, state.seq_lens, state.block_table]
        moved += state.sampling.tensors_to_gather(_features(assigned))
        index = _to_device(source, torch.int64, state.token_ids.device)
        for tensor in moved:
            tensor.copy_(tensor.index_select(0, index))

    def _upload_sampling_params(self, row: int, sequence: Sequence) -> None:
        """The row came from nobody's, so it is greedy and penalises nothing until told otherwise."""
        params = sequence.params
        if params.is_unmodified_greedy:
            return
        sampling = self.state.sampling
        values: dict[str, float] = {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seeds": row_seed(params.seed),
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
        }
        for name, value in values.items():
            self._upload(getattr(sampling, name)[row : row + 1], [value])
        if params.has_penalties:
            prompt, output = sequence.token_ids[: sequence.prompt_length], sequence.token_ids[sequence.prompt_length :]
            set_penalty_history(sampling, row, prompt, output)
        if params.has_biases:
            set_biases(sampling, row, params.biases(sequence.prompt_length))

    def _upload_blocks(self, new_blocks: ListLike[tuple[int, int, int]]) -> None:
        """All in one copy: rows that were admitted together grow together, and 256 copies are as many launches."""
        table = self.state.block_table
        rows, columns, blocks = _to_device(new_blocks, torch.int64, table.device).T
        table.index_put_((rows, columns), blocks.to(table.dtype))

    def _upload(self, target: Tensor, values: ListLike[float]) -> None:
        target[: len(values)].copy_(_to_device(values, target.dtype, target.device), non_blocking=True)


def _fill_bitmasks(matchers: ListLike[Matcher], masks: NDArray[numpy.int32]) -> None:
    """Row i of masks [n, words] becomes what matchers[i] allows; each masker is asked once."""
    masks.fill(0)
    matcher_rows_by_masker: dict[Masker, list[tuple[Matcher, int]]] = {}
    for row, matcher in enumerate(matchers):
        matcher_rows_by_masker.setdefault(matcher.masker, []).append((matcher, row))
    for masker, matcher_rows in matcher_rows_by_masker.items():
        masker.fill(matcher_rows, masks)


def _features(sequences: ListLike[Sequence]) -> Features:
    params = [sequence.params for sequence in sequences]
    return Features(
        penalties=any(one.has_penalties for one in params),
        filters=any(one.has_filters for one in params),
        biases=any(one.has_biases for one in params),
        masks=any(one.constraint is not None for one in params),
    )


def _to_device(values: ListLike[float] | ListLike[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Through pinned memory that torch keeps alive until the copy is done: the host never waits."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
