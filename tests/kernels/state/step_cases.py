"""Steps for ops with state in slots: chunks of prompts, decode rows, padding, and stale values in static buffers.

A sequence owns a slot, which contains state if the sequence continues, and NaN if it is new. Tokens of no sequence
contain NaN too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.attention.ops import HOST_SCALARS
from tcdeploy.kernels.state.sequences import Sequences

NUM_SLOTS, STALE_SLOT = 9, 8  # no sequence has the stale slot
PADDING_SEQUENCES, PADDING_TOKENS, PADDING_ROWS = 2, 5, 2


class Owner(NamedTuple):
    """A sequence: its first token in the step, tokens in the step, slot, and whether it starts with them."""

    first: int
    tokens: int
    slot: int
    is_new: bool


@dataclass(frozen=True)
class StepCase:
    """prompts: (tokens before the chunk, tokens of the chunk) of each sequence. rows: tokens before the new one.

    idle_rows: further rows with a sequence that has no token in this step; only in mixed steps.
    """

    prompts: tuple[tuple[int, int], ...] = ()
    rows: tuple[int, ...] = ()
    idle_rows: int = 0
    is_mixed: bool = False

    @property
    def tokens(self) -> int:
        """With padding."""
        if not self.prompts and not self.is_mixed:
            return len(self.rows) + PADDING_ROWS
        return len(self.rows) + sum(count for _, count in self.prompts) + PADDING_TOKENS

    def owners(self) -> list[Owner]:
        slots = iter((3, 7, 1, 5, 2, 6, 4))
        owners = [Owner(row, 1, next(slots), before == 0) for row, before in enumerate(self.rows)]
        first = len(self.rows)
        for before, count in self.prompts:
            owners.append(Owner(first, count, next(slots), before == 0))
            first += count
        return owners

    def sequences(self, device: str) -> Sequences:
        owners, has_prompts = self.owners(), bool(self.prompts) or self.is_mixed
        row_owners, prompt_owners = owners[: len(self.rows)], owners[len(self.rows) :]
        rows = [(before + 1, owner.slot) for before, owner in zip(self.rows, row_owners, strict=True)]
        rows += [(9, STALE_SLOT)] * self.idle_rows + [(0, STALE_SLOT)] * PADDING_ROWS
        prompt_slots = zip(self.prompts, prompt_owners, strict=True)
        chunks = [(before + count, count, owner.slot) for (before, count), owner in prompt_slots]
        chunks = [(0, len(self.rows), STALE_SLOT)] * self.is_mixed + chunks + [(0, 0, STALE_SLOT)] * PADDING_SEQUENCES
        starts = torch.tensor([0, *(count for _, count, _ in chunks)]).cumsum(0).int()
        scalars = torch.zeros(len(HOST_SCALARS), dtype=torch.int64)
        scalars[HOST_SCALARS.index("rows")] = len(rows) - 1  # not all padding rows are launched

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        prompts = (
            starts.to(device), tensor([length for length, *_ in chunks]), tensor([slot for *_, slot in chunks]), scalars
        ) if has_prompts else (None,) * 4  # fmt: skip
        has_rows = not has_prompts or self.is_mixed
        row_tensors = (tensor([length for length, _ in rows]), tensor([slot for _, slot in rows]))
        return Sequences(*prompts, *(row_tensors if has_rows else (None, None)))

    def padding(self) -> Tensor:
        """[tokens] bool: those of no sequence."""
        mask = torch.ones(self.tokens, dtype=torch.bool)
        for owner in self.owners():
            mask[owner.first : owner.first + owner.tokens] = False
        return mask


CASES = {
    "one token": StepCase(((0, 1),)),
    "new chunks at borders": StepCase(((0, 63), (0, 64), (0, 65))),
    "continued chunks at borders": StepCase(((64, 1), (1, 63), (65, 64), (63, 65))),
    "chunks shorter than the convolution": StepCase(((0, 2), (1, 1), (1, 2), (7, 2))),
    "a long chunk": StepCase(((5, 200),)),
    "rows": StepCase(rows=(7, 0, 100, 1, 2)),
    "mixed": StepCase(((64, 70), (0, 3)), rows=(7, 0, 100), idle_rows=2, is_mixed=True),
    "mixed without tokens of rows": StepCase(((0, 66),), idle_rows=3, is_mixed=True),
    "mixed without prompts": StepCase(rows=(3, 0), is_mixed=True),
}


def fill_slots(state: Tensor, case: StepCase) -> Tensor:
    """`state` [slots, ...], whose slots of new sequences contain NaN."""
    for owner in case.owners():
        if owner.is_new:
            state[owner.slot] = float("nan")
    return state


def assert_slots_kept(state: Tensor, before: Tensor, case: StepCase) -> None:
    """Slots of no sequence are unchanged, except the scratch slot."""
    owned = {0, *(owner.slot for owner in case.owners())}
    kept = [slot for slot in range(len(state)) if slot not in owned]
    assert torch.equal(state[kept], before[kept])


Run: TypeAlias = "Callable[[Sequence[Tensor], Sequences], Tensor]"  # of tensors whose last is the state


def assert_computes(
    run: Run, expected: Callable[..., tuple[Tensor, Tensor]], case: StepCase, tensors: Sequence[Tensor], atol: float
) -> None:
    """`run` returns what `expected` computes of each sequence alone, leaves the same state, and keeps other slots."""
    state = tensors[-1]
    before = state.clone()
    out, after = expected(case, *tensors)
    assert_close(run(tensors, case.sequences(state.device.type)), out, atol=atol, rtol=1e-4)
    assert_close(state, after, equal_nan=True, atol=atol, rtol=1e-4)
    assert_slots_kept(state, before, case)


def relative_error(values: Tensor, expected: Tensor) -> float:
    """The norm of the difference as a share of that of `expected`. NaN must be in the same places."""
    assert torch.equal(values.isnan(), expected.isnan())
    difference = (values.double() - expected.double()).nan_to_num()
    return float(difference.norm() / expected.double().nan_to_num().norm())


def assert_bfloat16_agrees(
    run: Run, expected: Callable[..., tuple[Tensor, Tensor]], case: StepCase, tensors: Sequence[Tensor]
) -> None:
    """As `assert_computes`, with the limits of bfloat16: Triton's interpreter truncates to it."""
    state = tensors[-1]
    out, after = expected(case, *tensors)
    result = run(tensors, case.sequences(state.device.type))
    assert result.dtype == torch.bfloat16
    error, state_error = relative_error(result, out), relative_error(state, after)
    assert error < 5e-3 and state_error < 1e-3, (error, state_error)
