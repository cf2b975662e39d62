"""Rounds inputs of linear layers to FP8 in the reference of the parity check, for the tokens whose steps quantise them.

If a plan quantises the inputs of products with FP8 weights, a reference with inputs of 16 bits would differ from every
bucket by the rounding to 3 bits of mantissa. Limits that allow for this would hide faults, such as a scale that is left
out. So both passes of the reference round too. The rounding is implemented again here, and shares no code with the
kernels and passes that it checks.

A rounding error may lead to the next code, which differs by 1/16, and later layers amplify that. So the eager pass is
farther from the precise one than with inputs of 16 bits: for builtin:tiny in bfloat16 the upper quartile of the KL
divergence is 0.05 nats. Lost or shifted scales and coarser codes exceed the limits. Rounding a single token, or not
rounding it, does not.

The reference computes all tokens of a prompt in one pass. In the engine, prefill steps quantise at any length, but
decode steps only from `fp8_min_rows` rows on. So a mask selects the tokens whose inputs are rounded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tcdeploy.models.convert.scheme_linear import SchemeLinear, rounding_inputs

FP8 = torch.float8_e4m3fn
BLOCK_COLUMNS = {"fp8_block": 128}  # columns that share a scale; in other schemes, all of a row
SMALLEST = 1e-12  # a lower bound of the largest value of a group


@contextlib.contextmanager
def rounded_inputs(model: nn.Module, mask: Tensor) -> Iterator[None]:
    """In the block, layers that quantise inputs round those of the tokens in the mask [prompts, tokens]."""
    layers = [layer for layer in model.modules() if isinstance(layer, SchemeLinear) and layer.fp8_min_rows]
    hooks = [layer.register_forward_pre_hook(functools.partial(_round, mask)) for layer in layers]
    try:
        with rounding_inputs(False):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _round(mask: Tensor, layer: SchemeLinear, inputs: tuple[Any, ...]) -> Tensor:
    """The input [prompts, tokens, columns] of a layer, or [prompts * tokens, columns]."""
    [x] = inputs
    wide = x if x.dtype == torch.float64 else x.float()
    groups = wide.unflatten(-1, (-1, BLOCK_COLUMNS.get(layer.scheme, x.shape[-1])))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / torch.finfo(FP8).max
    limit = torch.finfo(FP8).max
    rounded = (groups / scales).clamp(-limit, limit).to(FP8).to(wide.dtype) * scales
    return torch.where(mask.view(*x.shape[:-1], 1), rounded.flatten(-2).to(x.dtype), x)
