"""The recurrence of Mamba-2: the kernels and the plain form agree with transformers' scan over each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

from tcdeploy.kernels.state import recurrence
from tcdeploy.kernels.state.mamba2 import make_inputs, mamba2
from tcdeploy.kernels.state.sequences import Sequences
from tests.kernels.state.step_cases import (
    CASES,
    NUM_SLOTS,
    StepCase,
    assert_bfloat16_agrees,
    assert_computes,
    fill_slots,
)
from tests.triton_tools import HOPPER_SHARED_BYTES, record_launches, shared_memory_on_hopper

COMPUTE: dict[str, Any] = {"plain": recurrence.compute_plainly, "kernels": recurrence.launch}
SHAPES = {"grouped": (4, 2, 32, 16), "odd sizes": (2, 1, 24, 40)}  # heads, groups, state_size, head_dim
LIMITS = (0.05, 1.5)  # of dt; some tokens are below and above


def make_tensors(case: StepCase, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """xbc, dt, a_log, dt_bias, d and state."""
    heads, groups, state_size, head_dim = shape
    torch.manual_seed(6)
    columns = heads * head_dim + 2 * groups * state_size
    xbc = torch.randn(case.tokens, columns + 8)[:, :columns]
    dt = torch.randn(case.tokens, 2 * heads)[:, heads:] * 2 - 1
    for states in (xbc, dt):
        states[case.padding()] = float("nan")
    a_log, dt_bias, d = torch.linspace(0.02, 4, heads).log(), torch.linspace(-1, 1, heads), torch.randn(heads)
    state = fill_slots(torch.randn(NUM_SLOTS, heads, state_size, head_dim), case)
    return [*(values.to(device, dtype) for values in (xbc, dt, a_log, dt_bias, d)), state.to(device)]


def run(form: str, tensors: Sequence[Tensor], sequences: Sequences) -> Tensor:
    xbc, dt, a_log, dt_bias, d, state = tensors
    result: Tensor = COMPUTE[form](make_inputs(xbc, dt, a_log, dt_bias, d, *LIMITS, state), state, sequences)
    return result


def expected(
    case: StepCase, xbc: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    _, heads, state_size, head_dim = state.shape
    groups = (xbc.shape[1] - heads * head_dim) // (2 * state_size)
    x, b, c = xbc.float().split([heads * head_dim, groups * state_size, groups * state_size], dim=1)
    out, after = torch.zeros(len(xbc), heads, head_dim, device=xbc.device), state.clone()
    for first, tokens, slot, is_new in case.owners():
        part = slice(first, first + tokens)
        parts = (states[None, part].unflatten(2, (-1, dim)) for states, dim in (
            (x, head_dim), (b, state_size), (c, state_size)
        ))  # fmt: skip
        values, keys, queries = parts
        result, final = mamba2_chunk_scan(
            values, dt.float()[None, part], -a_log.float().exp(), keys, queries, chunk_size=256, D=d.float(),
            dt_bias=dt_bias.float(), dt_softplus=True, dt_limit=LIMITS, return_final_states=True,
            initial_states=None if is_new else state[None, slot].mT,
        )  # fmt: skip
        out[part], after[slot] = result[0], final[0].mT
    return out, after


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", COMPUTE)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_form_computes_each_sequence_alone(
    name: str, form: str, shape: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence, "SCAN_VALUES", 16)  # several programs, and a partial one
    case = CASES[name]
    tensors = make_tensors(case, SHAPES[shape], torch.float32, device)
    assert_computes(partial(run, form), expected, case, tensors, atol=5e-5)


@pytest.mark.parametrize("form", COMPUTE)
@pytest.mark.parametrize("name", ["rows", "continued chunks at borders"])
def test_bfloat16(form: str, name: str, device: str) -> None:
    case = CASES[name]
    tensors = make_tensors(case, SHAPES["grouped"], torch.bfloat16, device)
    assert_bfloat16_agrees(partial(run, form), expected, case, tensors)


@pytest.mark.parametrize("name", ["a long chunk", "rows", "mixed"])
def test_opcheck(name: str) -> None:
    case = CASES[name]
    *inputs, state = (states.nan_to_num() for states in make_tensors(case, SHAPES["grouped"], torch.float32, "cpu"))
    torch.library.opcheck(mamba2.overload, (*inputs, *LIMITS, state, *case.sequences("cpu")))


def test_programs_for_published_heads_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a state of 256, as in Falcon-H1; others have 128. Programs of 16-bit models need less."""
    *inputs, state = make_tensors(CASES["mixed"], (4, 2, 256, 64), torch.float32, "cpu")
    launches = record_launches(monkeypatch)
    recurrence.launch(make_inputs(*inputs, *LIMITS, state), state, CASES["mixed"].sequences("cpu"))
    assert len(launches) == 3
    for launch in launches:
        assert shared_memory_on_hopper(launch) <= HOPPER_SHARED_BYTES
