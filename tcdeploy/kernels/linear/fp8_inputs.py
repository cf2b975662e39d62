"""Products of FP8 weights with inputs that are quantised to FP8 too, for steps of many tokens.

FP8 tensor cores have twice the rate of 16-bit ones, and their products need no dense copy of the weight. The inputs are
quantised while the model runs: each group of columns of a row is divided by its largest value / 448 and rounded to
e4m3.

    fp8_channel    one scale for each row of the inputs. cuBLAS returns sums of codes in bfloat16, which are multiplied
                   by the scales of both sides afterwards. No sum overflows, since bfloat16 has the range of float32
    fp8_block      one scale for each 128 columns of a row. cuBLAS applies the scales of both sides

Only the product of codes is an opaque op (`tcdeploy::fp8_product`). In programs the other operations are nodes
(programs/passes/fp8_inputs.py), which Inductor fuses with the norms, gates and residuals around them. `fp8_linear` runs
the same operations in eager mode.

A row of zeros has the smallest scale instead of 0. A row (or group) with an infinite or NaN input has NaN codes, so
its outputs are NaN. cuBLAS needs a multiple of four rows for scales of groups, which are stored column by column: up to
three rows of zeros are appended, and their outputs dropped.

Rejected: passing scales of rows to cuBLAS. The four products of a layer (Llama 8B) took 104 us at 128 rows on an H200,
and 77 with unit scales; at 2,048 rows 656 and 593. Also rejected: static scales of checkpoints, because they clip
inputs that exceed those of the calibration.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.linear.fp8_scheme import BLOCK_NAME, dequantise_blocks, quantise_inputs
from tcdeploy.planning.dtypes import dtype_name

ROW_MULTIPLE = 4  # of scales of groups in cuBLAS, for their alignment to 16 bytes


def fp8_linear(scheme: str, x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
    """x [rows, k], quantised, @ w [n, k].T + bias [n]: [rows, n] in x's dtype, contiguous.

    On a GPU, x must be bfloat16, and the scheme's `fp8_inputs.takes` must accept the shape of the weight.
    """
    codes, scales = quantise_inputs(scheme, x)
    dtype = dtype_name(x.dtype)
    if scheme == BLOCK_NAME:
        y = fp8_product(codes, scales, tensors, dtype).float()
    else:
        y = fp8_product(codes, None, tensors, dtype).float() * scales * tensors[1]
    return (y if bias is None else y + bias.float()).to(x.dtype)


@custom_op("fp8_product")
def fp8_product(codes: Tensor, scales: Tensor | None, tensors: list[Tensor], dtype: str) -> Tensor:
    """codes [..., k] @ weight [n, k].T: [..., n] in `dtype`, contiguous. `tensors`: the weight and its scales.

    With `scales` [..., k / 128] of the inputs, the scales of both sides are applied; without, those of neither side.
    """
    rows = codes.reshape(-1, codes.shape[-1])
    row_scales = None if scales is None else scales.reshape(len(rows), -1)
    out_dtype = getattr(torch, dtype)
    if codes.is_cuda:
        out = scaled_product(rows, row_scales, tensors, out_dtype)
    elif row_scales is None:
        out = (rows.float() @ tensors[0].float().T).to(out_dtype)
    else:
        values = rows.float().unflatten(1, (row_scales.shape[1], -1)) * row_scales[:, :, None]
        out = (values.flatten(1) @ dequantise_blocks(tensors, torch.float32).T).to(out_dtype)
    return out.view(*codes.shape[:-1], -1)


@fp8_product.register_fake
def _(codes: Tensor, scales: Tensor | None, tensors: list[Tensor], dtype: str) -> Tensor:
    return codes.new_empty(*codes.shape[:-1], tensors[0].shape[0], dtype=getattr(torch, dtype))


def scaled_product(
    codes: Tensor, scales: Tensor | None, tensors: list[Tensor], dtype: torch.dtype, fast_accumulation: bool = False
) -> Tensor:
    """`fp8_product` of codes [rows, k], computed by cuBLAS. Works on meta tensors."""
    weight, weight_scale = tensors
    rows, recipes = len(codes), functional.ScalingType
    if scales is None:
        unit = _unit_scale(codes.device)
        operands = (codes, weight.t(), unit, recipes.TensorWise, unit, recipes.TensorWise)
    else:
        by_column = scales.t().contiguous()
        if padding := -rows % ROW_MULTIPLE:
            codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, padding)).view(codes.dtype)
            by_column = functional.pad(by_column, (0, padding), value=1.0)
        scales = by_column.t()
        operands = (codes, weight.t(), scales, recipes.BlockWise1x128, weight_scale.t(), recipes.BlockWise128x128)
    return functional.scaled_mm(*operands, output_dtype=dtype, use_fast_accum=fast_accumulation)[:rows]


@functools.cache
def _unit_scale(device: torch.device) -> Tensor:
    """1.0 on the device. During a capture another stream writes it, because the graph would only record the write."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return torch.ones((), device=device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        scale = torch.ones((), device=device)
    stream.synchronize()
    return scale
