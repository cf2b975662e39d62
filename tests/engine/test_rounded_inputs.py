"""The reference rounds inputs of linear layers to FP8 where the engine quantises them, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers the schemes
from tcdeploy.engine.check.precise_math import precise_math
from tcdeploy.engine.check.rounded_inputs import rounded_inputs
from tcdeploy.models.convert.quantise_model import quantise_model
from tcdeploy.models.convert.scheme_linear import SchemeLinear, quantise_inputs, rounding_inputs
from tcdeploy.models.formats.quantised_weight import LayerScheme

WIDTH = 512
GROUPS = {"fp8_channel": WIDTH, "fp8_block": 128}  # columns that share a scale
each_scheme = pytest.mark.parametrize("scheme", GROUPS)


def model_of(scheme: str, min_rows: int = 3) -> nn.ModuleDict:
    torch.manual_seed(2)
    model = nn.ModuleDict({"linear": nn.Linear(WIDTH, 128)}).requires_grad_(False)
    quantise_model(model, lambda path: LayerScheme(scheme))
    quantise_inputs([model], min_rows)
    return model


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    """[prompts, tokens, columns]"""
    torch.manual_seed(3)
    return (torch.randn(2, 4, WIDTH) * torch.exp2(torch.rand(2, 4, 1) * 8)).to(dtype)


def expected(scheme: str, layer: SchemeLinear, x: Tensor, mask: Tensor) -> Tensor:
    groups = x.double().view(*x.shape[:-1], -1, GROUPS[scheme])
    scales = groups.abs().amax(-1, keepdim=True) / 448
    rounded = ((groups / scales).float().to(torch.float8_e4m3fn).double() * scales).view(x.shape)
    bias = 0 if layer.bias is None else layer.bias.double()
    return torch.where(mask[..., None], rounded, x.double()) @ layer.dequantised(torch.float64).T + bias


@each_scheme
def test_inputs_of_the_tokens_in_the_mask_are_rounded(scheme: str) -> None:
    model, x = model_of(scheme), inputs()
    layer = model["linear"]
    assert isinstance(layer, SchemeLinear)
    mask = torch.tensor([[True, True, False, True], [True, False, True, True]])
    with rounded_inputs(model, mask):
        y = layer(x)
        flat = layer(x.flatten(0, 1))
    assert_close(y.double(), expected(scheme, layer, x, mask), rtol=1e-4, atol=1e-2)
    assert_close(flat.view_as(y), y)
    all_tokens, none = torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)
    for other in (all_tokens, none, mask.roll(1, 1)):
        assert (y.double() - expected(scheme, layer, x, other)).abs().max() > 1


@each_scheme
def test_afterwards_the_number_of_rows_decides(scheme: str) -> None:
    model, x = model_of(scheme), inputs()
    layer, all_tokens = model["linear"], torch.ones(2, 4, dtype=torch.bool)
    assert isinstance(layer, SchemeLinear)
    with pytest.raises(RuntimeError, match="stop"), rounded_inputs(model, all_tokens):
        raise RuntimeError("stop")
    assert not layer._forward_pre_hooks
    assert_close(layer(x).double(), expected(scheme, layer, x, all_tokens), rtol=1e-4, atol=1e-2)
    few = x[:1, :2]
    assert_close(layer(few).double(), expected(scheme, layer, few, all_tokens[:1, :2] & False), rtol=1e-4, atol=1e-2)
    with rounding_inputs(True):
        assert_close(layer(few).double(), expected(scheme, layer, few, all_tokens[:1, :2]), rtol=1e-4, atol=1e-2)
    with rounding_inputs(False):
        assert_close(layer(x).double(), expected(scheme, layer, x, ~all_tokens), rtol=1e-4, atol=1e-2)


@each_scheme
def test_in_the_higher_precision_only_the_rounding_to_fp8_is_left(scheme: str) -> None:
    model, x = model_of(scheme).bfloat16(), inputs(torch.bfloat16)
    layer, mask = model["linear"], torch.tensor([[True, False, True, True]] * 2)
    assert isinstance(layer, SchemeLinear)
    layer.weight_scale = nn.Parameter(layer.weight_scale.float(), requires_grad=False)
    with rounded_inputs(model, mask), precise_math(torch.bfloat16, torch.float32):
        y = layer(x)
    assert y.dtype == torch.float32
    assert_close(y.double(), expected(scheme, layer, x, mask), rtol=1e-4, atol=1e-2)


def test_layers_that_keep_their_inputs_are_left_alone() -> None:
    model, x = model_of("fp8_channel", min_rows=0), inputs()
    with rounded_inputs(model, torch.ones(2, 4, dtype=torch.bool)):
        y = model["linear"](x)
    assert torch.equal(y, model["linear"](x))
