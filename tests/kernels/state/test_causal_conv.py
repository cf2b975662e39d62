"""The causal convolution: the kernels and the plain form agree with torch's conv1d over each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from tcdeploy.kernels.state import causal_conv as module
from tcdeploy.kernels.state.causal_conv import causal_conv, compute_plainly, launch
from tests.kernels.state.step_cases import CASES, NUM_SLOTS, StepCase, assert_slots_kept, fill_slots

CHANNELS = 40
COMPUTE = {"plain": compute_plainly, "kernels": launch}


def make_inputs(case: StepCase, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """x (not contiguous, NaN where no sequence has a token), state, weight, bias."""
    torch.manual_seed(4)
    x = torch.randn(case.tokens, CHANNELS + 24, dtype=dtype)[:, 8 : CHANNELS + 8]
    x[case.padding()] = float("nan")
    state = fill_slots(torch.randn(NUM_SLOTS, width - 1, CHANNELS, dtype=dtype), case)
    return x.to(device), state.to(device), *(torch.randn(*shape, dtype=dtype, device=device) for shape in (
        (CHANNELS, width), (CHANNELS,)
    ))  # fmt: skip


def expected(case: StepCase, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Any:
    out, after = torch.zeros_like(x), state.clone()
    for first, tokens, slot, is_new in case.owners():
        tail = torch.zeros_like(state[slot]) if is_new else state[slot]
        inputs = torch.cat([tail, x[first : first + tokens]])
        channels = x.shape[1]
        result = functional.conv1d(inputs.T[None].double(), weight[:, None].double(), groups=channels)[0].T
        result = result if bias is None else result + bias
        out[first : first + tokens] = functional.silu(result) if activation else result
        after[slot] = inputs[tokens:]
    return out, after


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", COMPUTE)
@pytest.mark.parametrize(("width", "activation", "has_bias"), [(4, "silu", False), (3, "", True)])
def test_each_form_convolves_each_sequence_alone(
    name: str, form: str, width: int, activation: str, has_bias: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEP_CHANNELS", 32)  # several programs, and a partial one
    monkeypatch.setattr(module, "CHUNK_CHANNELS", 32)
    monkeypatch.setattr(module, "TAIL_CHANNELS", 32)
    case = CASES[name]
    x, state, weight, bias = make_inputs(case, width, torch.float32, device)
    arguments = (weight, bias if has_bias else None, activation)
    before = state.clone()
    out, after = expected(case, x, state, *arguments)
    result = COMPUTE[form](x, state, *arguments, case.sequences(device))
    assert_close(result, out, atol=1e-5, rtol=1e-5)
    assert_close(state, after, equal_nan=True, atol=0, rtol=0)
    assert_slots_kept(state, before, case)


@pytest.mark.parametrize("form", COMPUTE)
def test_a_convolution_of_width_1_keeps_no_inputs(form: str, device: str) -> None:
    """`state` has no elements, and its address is 0: a store to it would be an illegal memory access."""
    case = CASES["mixed"]
    x, state, weight, bias = make_inputs(case, 1, torch.float32, device)
    out, _ = expected(case, x, state, weight, bias, "silu")
    assert state.numel() == 0
    assert_close(COMPUTE[form](x, state, weight, bias, "silu", case.sequences(device)), out, atol=1e-5, rtol=1e-5)


def test_slots_of_another_width_or_channels_are_refused_by_the_op_and_its_fake() -> None:
    """A kernel would address memory outside of the slot."""
    case = CASES["rows"]
    x, state, weight, _ = make_inputs(case, 4, torch.float32, "cpu")
    for wrong in (state[:, 1:].contiguous(), state[:, :, 1:].contiguous()):
        for device in ("cpu", "meta"):
            arguments = [tensor.to(device) for tensor in (x, wrong, weight)]
            with pytest.raises(ValueError, match=r"a convolution of width 4 .* slots of \("):
                causal_conv(*arguments, None, "silu", *case.sequences(device))


@pytest.mark.parametrize("form", COMPUTE)
def test_bfloat16_is_rounded_once(form: str, device: str) -> None:
    case = CASES["mixed"]
    x, state, weight, _ = make_inputs(case, 4, torch.bfloat16, device)
    out, after = expected(case, x, state, weight, None, "silu")
    result = COMPUTE[form](x, state, weight, None, "silu", case.sequences(device))
    assert_close(result, out, atol=1e-5, rtol=2**-7)
    assert_close(state, after, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["a long chunk", "rows", "mixed"])
def test_opcheck(name: str) -> None:
    case = CASES[name]
    x, state, weight, bias = make_inputs(case, 4, torch.float32, "cpu")
    x, state = x.nan_to_num(), state.nan_to_num()
    torch.library.opcheck(causal_conv.overload, (x, state, weight, bias, "silu", *case.sequences("cpu")))
