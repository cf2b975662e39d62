"""The gated delta rule and KDA: the kernels and the plain form agree with transformers' recurrences.

Each sequence is compared alone. KDA has a decay for each channel of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from tcdeploy.kernels.state import recurrence
from tcdeploy.kernels.state.gated_delta import gated_delta, make_inputs
from tcdeploy.kernels.state.sequences import Sequences
from tests.kernels.state.step_cases import (
    CASES,
    NUM_SLOTS,
    StepCase,
    assert_bfloat16_agrees,
    assert_computes,
    fill_slots,
)
from tests.triton_tools import (
    HOPPER_SHARED_BYTES,
    Launch,
    compile_for_hopper,
    record_launches,
    shared_memory_on_hopper,
    spilled_bytes,
)

COMPUTE: dict[str, Any] = {"plain": recurrence.compute_plainly, "kernels": recurrence.launch}


class Shape(NamedTuple):
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    by_channel: bool = False


SHAPES = {
    "grouped": Shape(4, 2, 32, 16),
    "odd sizes": Shape(2, 2, 24, 40),
    "by channel": Shape(4, 2, 32, 16, by_channel=True),
    "by channel, odd sizes": Shape(2, 2, 24, 40, by_channel=True),
}


def make_tensors(case: StepCase, shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    """qkv, a, b, a_log, dt_bias and state. Keys of neighbouring tokens are alike, as those of repeated words."""
    heads, key_heads, key_dim, value_dim, by_channel = shape
    torch.manual_seed(5)
    columns = 2 * key_heads * key_dim + heads * value_dim
    decays = heads * key_dim if by_channel else heads
    qkv = (torch.randn(columns + 8) + 0.3 * torch.randn(case.tokens, columns + 8))[:, :columns]
    a, b = torch.randn(case.tokens, decays + heads).split([decays, heads], dim=1)
    for states in (qkv, a, b):
        states[case.padding()] = float("nan")
    a_log = torch.linspace(0.02, 4, heads).log()
    state = fill_slots(torch.randn(NUM_SLOTS, heads, key_dim, value_dim), case)
    tensors = [*(values.to(device, dtype) for values in (qkv, a - 2, b, a_log)), torch.ones(decays, dtype=dtype)]
    return [*tensors[:4], tensors[4].to(device), state.to(device)]


def run(form: str, tensors: Sequence[Tensor], sequences: Sequences) -> Tensor:
    result: Tensor = COMPUTE[form](make_inputs(*tensors), tensors[-1], sequences)
    return result


def expected(case: StepCase, qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor) -> Any:
    _, heads, key_dim, value_dim = state.shape
    keys = (qkv.shape[1] - heads * value_dim) // 2
    q, k, v = qkv.float().split([keys, keys, heads * value_dim], dim=1)
    q, k = (states.unflatten(1, (-1, key_dim)).repeat_interleave(heads * key_dim // keys, dim=1) for states in (q, k))
    dt = functional.softplus(a.float() + dt_bias.float())
    if a.shape[1] == heads:
        recurrence_of_transformers, g = torch_recurrent_gated_delta_rule, -a_log.float().exp() * dt
    else:
        recurrence_of_transformers = recurrent_kimi_delta_attention
        g = -a_log.float().exp()[:, None] * dt.unflatten(1, (heads, key_dim))
    out, after = torch.zeros(len(qkv), heads, value_dim, device=qkv.device), state.clone()
    for first, tokens, slot, is_new in case.owners():
        part = slice(first, first + tokens)
        result = recurrence_of_transformers(
            *(states[None, part] for states in (q, k, v.unflatten(1, (-1, value_dim)))),
            g=g[None, part], beta=b.float().sigmoid()[None, part], initial_state=None if is_new else state[None, slot],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        out[part], after[slot] = result[0][0], result[1][0]
    return out, after


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", COMPUTE)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_form_computes_each_sequence_alone(
    name: str, form: str, shape: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence, "SCAN_VALUES", 16)  # several programs, and a partial one
    monkeypatch.setattr(recurrence, "SOLVE_KEYS", 16)  # several parts of the keys, and a partial one
    case = CASES[name]
    tensors = make_tensors(case, SHAPES[shape], torch.float32, device)
    assert_computes(partial(run, form), expected, case, tensors, atol=2e-5)


@pytest.mark.parametrize("form", COMPUTE)
@pytest.mark.parametrize("shape", ["grouped", "by channel"])
@pytest.mark.parametrize("shift", [20, 60])
def test_strong_decays_do_not_overflow(form: str, shape: str, shift: float, device: str) -> None:
    """exp() of their sum over a chunk is 0 in float32, and its reciprocal infinite."""
    case = StepCase(((0, 65), (64, 63)))
    qkv, a, b, a_log, dt_bias, state = make_tensors(case, SHAPES[shape], torch.float32, device)
    a[::3] += shift  # the other tokens decay little
    inputs = (qkv, a, b, a_log, dt_bias, state)
    out, after = expected(case, *inputs)
    assert_close(run(form, inputs, case.sequences(device)), out, atol=1e-4, rtol=1e-3)
    assert_close(state, after, atol=1e-4, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("form", COMPUTE)
@pytest.mark.parametrize("name", ["rows", "continued chunks at borders"])
def test_beta_up_to_2(form: str, name: str, device: str) -> None:
    case = CASES[name]
    qkv, a, b, a_log, dt_bias, state = make_tensors(case, SHAPES["grouped"], torch.float32, device)
    b = b.clamp(max=-1)  # 2 * sigmoid(b) is the sigmoid of a logit
    double = (2 * b.sigmoid()).logit()
    out, after = expected(case, qkv, a, double, a_log, dt_bias, state)
    inputs = make_inputs(qkv, a, b, a_log, dt_bias, state, max_beta=2.0)
    assert_close(COMPUTE[form](inputs, state, case.sequences(device)), out, atol=2e-5, rtol=1e-4)
    assert_close(state, after, equal_nan=True, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("form", COMPUTE)
@pytest.mark.parametrize("shape", ["grouped", "by channel"])
def test_equal_keys_without_decay_lose_no_accuracy(form: str, shape: str, device: str) -> None:
    """The inverse of the system is then the most sensitive: its powers grow to 1e18 before they cancel."""
    case = StepCase(((0, 64),))
    qkv, a, b, a_log, dt_bias, state = make_tensors(case, SHAPES[shape], torch.float32, device)
    qkv[:64, 64:128] = qkv[0, 64:128]  # the keys
    inputs = (qkv, a - 100, b + 100, a_log, dt_bias, state)
    out, after = expected(case, *inputs)
    assert_close(run(form, inputs, case.sequences(device)), out, atol=2e-5, rtol=1e-4)
    assert_close(state, after, atol=2e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("form", COMPUTE)
@pytest.mark.parametrize("shape", ["grouped", "by channel"])
@pytest.mark.parametrize("name", ["rows", "continued chunks at borders"])
def test_bfloat16(form: str, shape: str, name: str, device: str) -> None:
    """Sums are float32; a GPU rounds operands to TF32."""
    case = CASES[name]
    tensors = make_tensors(case, SHAPES[shape], torch.bfloat16, device)
    assert_bfloat16_agrees(partial(run, form), expected, case, tensors)


@pytest.mark.parametrize("shape", ["grouped", "by channel"])
@pytest.mark.parametrize("name", ["a long chunk", "rows", "mixed"])
def test_opcheck(name: str, shape: str) -> None:
    case = CASES[name]
    inputs = [states.nan_to_num() for states in make_tensors(case, SHAPES[shape], torch.float32, "cpu")]
    torch.library.opcheck(gated_delta.overload, (*inputs, *case.sequences("cpu")))


def recorded(monkeypatch: pytest.MonkeyPatch, by_channel: bool, dtype: torch.dtype) -> list[Launch]:
    """The launches of a step with prompts and decode rows, for heads of 128 channels."""
    tensors = make_tensors(CASES["mixed"], Shape(4, 2, 128, 128, by_channel), dtype, "cpu")
    launches = record_launches(monkeypatch)
    recurrence.launch(make_inputs(*tensors), tensors[-1], CASES["mixed"].sequences("cpu"))
    assert len(launches) == 3
    return launches


@pytest.mark.parametrize("by_channel", [False, True])
def test_programs_for_published_heads_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch, by_channel: bool) -> None:
    """In float32, which needs the most."""
    for launch in recorded(monkeypatch, by_channel, torch.float32):
        assert shared_memory_on_hopper(launch) <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize("by_channel", [False, True])
def test_programs_for_published_heads_spill_few_registers(
    monkeypatch: pytest.MonkeyPatch, by_channel: bool, tmp_path: Path
) -> None:
    """Spilled bytes per thread are stores plus loads. With all channels at once, KDA's solve kernel spilled 2,400."""
    spilled = {}
    for launch in recorded(monkeypatch, by_channel, torch.bfloat16):
        ptx = compile_for_hopper(launch, runs_ptxas=False).asm["ptx"]
        spilled[launch.kernel.fn.__name__] = spilled_bytes(ptx, tmp_path)
    assert spilled["_step_kernel"] == 0 and spilled["_solve_kernel"] <= 100, spilled
    assert spilled["_scan_kernel"] <= (400 if by_channel else 0), spilled
