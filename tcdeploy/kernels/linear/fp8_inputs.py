"""Products of FP8 weights with inputs that are quantised to FP8 too, for steps of many tokens.

FP8 tensor cores have twice the rate of 16-bit ones, and their products need no dense copy of the weight. The inputs are
quantised while the model runs: each group of columns of a row is divided by its largest value / 448 and rounded to
e4m3.

    fp8_channel    one scale for each row of the inputs. cuBLAS sums codes, and the sums are multiplied by the scales of
                   both sides: rounding them to bfloat16 before is as good as after, since it has the range of float32
    fp8_block      one scale for each 128 columns of a row. cuBLAS applies the scales of both sides

A row of zeros has the smallest scale instead of 0. A row (or group) with an infinite or NaN input has NaN codes, so
its outputs are NaN. cuBLAS needs a multiple of four rows for scales of groups, which are stored column by column: up to
three rows of zeros are appended, and their outputs dropped.

Rejected: scales of rows in cuBLAS. The four products of a layer (Llama 8B) took 104 us at 128 rows on an H200, and 77
with unit scales; at 2,048 rows 656 and 593. Static scales of checkpoints clip inputs that the calibration has not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.kernels.linear.fp8_scheme import BLOCK, BLOCK_NAME, CHANNEL_NAME, LARGEST, SMALLEST_SCALE
from tcdeploy.planning.schemes import SCHEMES
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

QUANTISE = Kernel("tcdeploy.kernels.linear.fp8_inputs_kernel", "_fp8_inputs_kernel")
ROW_MULTIPLE = 4  # rows of scales by group, for their alignment to 16 bytes
GROUP_ROWS = 16  # rows of a program if groups are narrow
COLUMNS_PER_WARP = 2048


class QuantisedInputs(NamedTuple):
    """codes [padded rows, k] float8_e4m3fn; scales [groups, padded rows] float32. Padding rows are zero."""

    codes: Tensor
    scales: Tensor


def fp8_linear(scheme: str, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """x [rows, k], quantised, @ w [n, k].T + bias [n]: [rows, n] in x's dtype, contiguous.

    On a GPU, x is bfloat16, and the scheme's `fp8_inputs` take the weight. On a CPU, the product of the rounded inputs
    is computed in float32.
    """
    if x.is_cuda:
        inputs = quantised(scheme, x if x.stride(1) == 1 else x.contiguous())
        return scaled_product(scheme, inputs, tensors, bias, len(x))
    described = SCHEMES[scheme]
    assert described.fp8_inputs is not None
    y = described.fp8_inputs.round(x.float()) @ described.dequantise(tensors, torch.float32).T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def quantised(scheme: str, x: Tensor) -> QuantisedInputs:
    """Quantise inputs [rows, k] with the kernel. Each row may be strided, its columns may not."""
    rows, k = x.shape
    assert x.stride(1) == 1
    group = BLOCK if scheme == BLOCK_NAME else k
    block_columns = next_power_of_2(group)
    padded_rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE if scheme == BLOCK_NAME else rows
    block_rows = GROUP_ROWS if scheme == BLOCK_NAME else 1
    groups = -(-k // group)
    codes = torch.empty(padded_rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, padded_rows, dtype=torch.float32, device=x.device)
    QUANTISE.launch(
        (-(-padded_rows // block_rows), groups),
        codes, scales, x, rows, padded_rows, k, group, x.stride(0),
        LARGEST, SMALLEST_SCALE, block_rows, block_columns,
        num_warps=min(max(block_rows * block_columns // COLUMNS_PER_WARP, 1), 16),
    )  # fmt: skip
    return QuantisedInputs(codes, scales)


def scaled_product(
    scheme: str, inputs: QuantisedInputs, tensors: Sequence[Tensor], bias: Tensor | None, rows: int,
    fast_accumulation: bool = False,
) -> Tensor:  # fmt: skip
    """The first `rows` rows of inputs @ w.T + bias, in bfloat16, by cuBLAS. Works on meta tensors."""
    weight, weight_scale = tensors
    if scheme == BLOCK_NAME:
        scales = (inputs.scales.t(), weight_scale.t())
        recipes = (functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128)
    else:
        scales = (_unit_scale(weight.device),) * 2
        recipes = (functional.ScalingType.TensorWise,) * 2
    out = functional.scaled_mm(
        inputs.codes, weight.t(), scales[0], recipes[0], scales[1], recipes[1],
        output_dtype=torch.bfloat16, use_fast_accum=fast_accumulation,
    )[:rows]  # fmt: skip
    if scheme == CHANNEL_NAME:
        out.mul_(inputs.scales.view(-1, 1)).mul_(weight_scale)
    return out if bias is None else out.add_(bias)


@functools.cache
def _unit_scale(device: torch.device) -> Tensor:
    """1.0 on the device. If a CUDA graph is being captured, it is made beside the graph, which would only record it."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return torch.ones((), device=device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        scale = torch.ones((), device=device)
    stream.synchronize()
    return scale
