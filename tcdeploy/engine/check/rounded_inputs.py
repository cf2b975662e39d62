"""Inputs of linear layers that are rounded to FP8, as steps quantise them.

Where a plan quantises the inputs of products with FP8 weights, a reference with inputs of 16 bits would differ from
every bucket by the rounding to 3 bits of mantissa, and limits that allow for this would hide faults, such as a scale
that is left out. So both passes of the reference round too. The rounding is written out here, and shares no code with
the kernels and passes that it checks.

A rounding error may lead to the next code, 1/16 farther, and later layers amplify that. So the eager pass is farther
from the precise one than with inputs of 16 bits: for builtin:tiny in bfloat16 the upper quartile of the KL divergence
is 0.05 nats. Lost or shifted scales and coarser codes exceed the limits; whether single tokens were rounded does not.

The reference has all tokens of a prompt in one pass. In the engine, prefill steps quantise at any length, but decode
steps only from `fp8_min_rows` rows on. So the mask says for which tokens inputs are rounded.
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
BLOCK_COLUMNS = {"fp8_block": 128}  # that share a scale; in other schemes, those of a row do
SMALLEST = 1e-12  # of the largest value of a group


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
