"""Schemes of 8-bit floats (e4m3: largest value 448): one scale for each row, or for each block of 128 x 128.

    fp8_channel  weight float8_e4m3fn [n, k]; weight_scale float32 [n]
    fp8_block    weight float8_e4m3fn [n, k]; weight_scale float32 [ceil(n / 128), ceil(k / 128)]

A weight with one scale for all of it has the layout `fp8_channel`, with equal scales: layers with different scales can
then be packed. In `fp8_block` the last blocks may be partial; layers are packed if theirs are whole.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.kernels.linear.scheme_values import rounded_scale, scale_dtype
from tcdeploy.planning.schemes import SCHEMES, FP8Inputs, Scheme, SchemeTensor, Shape

BLOCK = 128
LARGEST = 448.0  # of e4m3; there is no infinity
SMALLEST_SCALE = 1e-12  # so that zeros do not become 0 / 0
PRODUCT_MULTIPLE = 16  # of rows and columns of weights in FP8 products of cuBLAS
BLOCK_COLUMNS_MULTIPLE = 4 * BLOCK  # cuBLAS requires rows of the scales of blocks to be aligned to 16 bytes
CHANNEL_NAME, BLOCK_NAME = "fp8_channel", "fp8_block"


def _dense_shape(shapes: Sequence[Shape]) -> tuple[int, int]:
    n, k = shapes[0]
    return n, k


def _dequantise_rows(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    weight, scale = (tensor.to(scale_dtype(dtype)) for tensor in tensors)
    return (weight * scale[:, None]).to(dtype)


def _quantise_rows(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    scale = rounded_scale(weight.float().abs().amax(1).clamp(min=SMALLEST_SCALE) / LARGEST)
    return _round(weight.float() / scale[:, None]), scale


def dequantise_blocks(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    weight, scale = (tensor.to(scale_dtype(dtype)) for tensor in tensors)
    return (weight * _repeat_blocks(scale, weight)).to(dtype)


def _quantise_blocks(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    padded = functional.pad(weight.float().abs(), (0, -k % BLOCK, 0, -n % BLOCK))
    largest = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax((1, 3))
    scale = largest.clamp(min=SMALLEST_SCALE) / LARGEST
    return _round(weight.float() / _repeat_blocks(scale, weight)), scale


def _repeat_blocks(scale: Tensor, weight: Tensor) -> Tensor:
    """The scale of each element of the weight."""
    n, k = weight.shape
    return scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


def _round(values: Tensor) -> Tensor:
    """To e4m3. Without the clamp, a value that rounding has raised above 448 may become NaN (torch 2.11)."""
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _takes_row_inputs(rows: int, columns: int) -> bool:
    return rows % PRODUCT_MULTIPLE == columns % PRODUCT_MULTIPLE == 0


def _takes_block_inputs(rows: int, columns: int) -> bool:
    return rows % BLOCK == 0 and columns % BLOCK_COLUMNS_MULTIPLE == 0


def quantise_inputs(scheme: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., k] and scales [..., groups] of inputs [..., k], for products with weights in the scheme.

    programs/passes/fp8_inputs.py inserts the same operations into graphs.
    """
    groups = x.float().unflatten(-1, (-1, BLOCK if scheme == BLOCK_NAME else x.shape[-1]))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_SCALE)
    codes = _round(groups * (LARGEST / largest))
    return codes.flatten(-2), largest.squeeze(-1) * (1 / LARGEST)


def _round_inputs(scheme: str, x: Tensor) -> Tensor:
    codes, scales = quantise_inputs(scheme, x)
    return (codes.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2).to(x.dtype)


WEIGHT = SchemeTensor("weight", "float8_e4m3fn", lambda rows, columns: (rows, columns))
SCHEMES[CHANNEL_NAME] = Scheme(
    name=CHANNEL_NAME,
    tensors=(WEIGHT, SchemeTensor("weight_scale", "float32", lambda rows, columns: (rows,))),
    dense_shape=_dense_shape,
    dequantise=_dequantise_rows,
    quantise=_quantise_rows,
    row_block=1,
    fp8_inputs=FP8Inputs(_takes_row_inputs, functools.partial(_round_inputs, CHANNEL_NAME)),
)
SCHEMES[BLOCK_NAME] = Scheme(
    name=BLOCK_NAME,
    tensors=(
        WEIGHT,
        SchemeTensor("weight_scale", "float32", lambda rows, columns: (-(-rows // BLOCK), -(-columns // BLOCK))),
    ),
    dense_shape=_dense_shape,
    dequantise=dequantise_blocks,
    quantise=_quantise_blocks,
    row_block=BLOCK,
    fp8_inputs=FP8Inputs(_takes_block_inputs, functools.partial(_round_inputs, BLOCK_NAME)),
)
