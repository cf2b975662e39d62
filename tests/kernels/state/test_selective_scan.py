"""The recurrence of Mamba 1: the kernel and the plain form agree with transformers' scan over each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_state_update

from tcdeploy.kernels.state import selective_scan as module
from tcdeploy.kernels.state.selective_scan import selective_scan
from tcdeploy.kernels.state.sequences import Sequences
from tests.kernels.state.step_cases import (
    CASES,
    NUM_SLOTS,
    StepCase,
    assert_bfloat16_agrees,
    assert_computes,
    fill_slots,
)

COMPUTE: dict[str, Any] = {"plain": module.compute_plainly, "kernel": module.launch}
SHAPES = {"one head": (40, 1, 16), "two heads, odd sizes": (2 * 20, 2, 12)}  # channels, heads, state_size


def make_tensors(case: StepCase, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, dt, b, c, a_log, d and state."""
    channels, heads, state_size = shape
    torch.manual_seed(6)
    widths = (channels, channels, heads * state_size, heads * state_size)
    by_token = [torch.randn(case.tokens, width + 8)[:, :width] for width in widths]
    for states in by_token:
        states[case.padding()] = float("nan")
    a_log, d = torch.rand(channels, state_size) * 4 - 3, torch.randn(channels)
    state = fill_slots(torch.randn(NUM_SLOTS, channels, state_size), case)
    return [*(values.to(device, dtype) for values in (*by_token, a_log, d)), state.to(device)]


def run(form: str, tensors: Sequence[Tensor], sequences: Sequences) -> Tensor:
    result: Tensor = COMPUTE[form](*tensors, sequences)
    return result


def expected(
    case: StepCase, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """transformers' step, token by token and head by head."""
    _, channels, state_size = state.shape
    heads = b.shape[1] // state_size
    width = channels // heads
    out, after = torch.zeros(x.shape, device=x.device), state.clone()
    for first, tokens, slot, is_new in case.owners():
        if is_new:
            after[slot] = 0
        for token in range(first, first + tokens):
            for head in range(heads):
                of_head, group = (
                    slice(head * width, (head + 1) * width),
                    slice(head * state_size, (head + 1) * state_size),
                )
                h = after[slot, of_head].clone()[None]
                out[token, of_head] = mamba_selective_state_update(
                    h, x.float()[None, token, of_head], dt.float()[None, token, of_head],
                    -a_log.float()[of_head].exp(), b.float()[None, token, group], c.float()[None, token, group],
                    d.float()[of_head], dt_softplus=True,
                )[0]  # fmt: skip
                after[slot, of_head] = h[0]
    return out, after


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", COMPUTE)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_form_computes_each_sequence_alone(
    name: str, form: str, shape: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHANNELS", 16)  # several programs, and a partial one
    case = CASES[name]
    tensors = make_tensors(case, SHAPES[shape], torch.float32, device)
    assert_computes(partial(run, form), expected, case, tensors, atol=5e-5)


@pytest.mark.parametrize("form", COMPUTE)
@pytest.mark.parametrize("name", ["rows", "continued chunks at borders"])
def test_bfloat16(form: str, name: str, device: str) -> None:
    case = CASES[name]
    tensors = make_tensors(case, SHAPES["one head"], torch.bfloat16, device)
    assert_bfloat16_agrees(partial(run, form), expected, case, tensors)


@pytest.mark.parametrize("name", ["a long chunk", "rows", "mixed"])
def test_opcheck(name: str) -> None:
    case = CASES[name]
    tensors: Sequence[Tensor] = make_tensors(case, SHAPES["one head"], torch.float32, "cpu")
    torch.library.opcheck(selective_scan.overload, (*(t.nan_to_num() for t in tensors), *case.sequences("cpu")))


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = CASES["rows"]
    *inputs, state = make_tensors(case, SHAPES["one head"], torch.float32, "cpu")
    inputs[2] = inputs[2][:, :-1]
    with pytest.raises(ValueError, match="shapes of a selective scan do not fit"):
        selective_scan(*inputs, state, *case.sequences("cpu"))
