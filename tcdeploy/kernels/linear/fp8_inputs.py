"""Products of FP8 weights with inputs that are quantised to FP8 too, for steps of many tokens.

From about a hundred rows on, a product is bound by arithmetic, and FP8 tensor cores have twice the rate of 16-bit ones.
The inputs are quantised while the model runs: one kernel divides each group of columns of a row by largest / 448 and
rounds to e4m3. cuBLAS multiplies the codes and applies the scales of both sides.

    fp8_channel    one scale for each row of the inputs
    fp8_block      one scale for each 128 columns of a row

A row of zeros has the smallest scale instead of 0. A row (or group) with an infinite or NaN input has NaN codes, so
its outputs are NaN.

cuBLAS needs a multiple of four rows for scales of groups, which are stored column by column: up to three rows of zeros
are appended, and their outputs dropped. It adds no bias to such products.

The step that quantises is opaque to Inductor. Traced, it could be fused with the norm before it, which would save one
read and one write of the inputs, but then siblings that share the inputs would have to share the codes as well.

Rejected: fast accumulation, which rounds partial sums of the tensor cores to 14 bits; static scales of checkpoints,
which clip inputs that the calibration has not seen.
"""

from __future__ import annotations

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
    """The first `rows` rows of inputs @ w.T + bias by cuBLAS, in bfloat16. Works on fake tensors."""
    weight, weight_scale = tensors
    if scheme == BLOCK_NAME:
        recipes = (functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128)
        scales = (inputs.scales.t(), weight_scale.t())
    else:
        recipes = (functional.ScalingType.RowWise, functional.ScalingType.RowWise)
        scales = (inputs.scales.view(-1, 1), weight_scale.view(1, -1))
    adds_bias = bias is not None and scheme == CHANNEL_NAME
    out = functional.scaled_mm(
        inputs.codes, weight.t(), scales[0], recipes[0], scales[1], recipes[1],
        bias=bias if adds_bias else None, output_dtype=torch.bfloat16, use_fast_accum=fast_accumulation,
    )[:rows]  # fmt: skip
    return out if bias is None or adds_bias else out + bias
