"""Schemes of 4-bit floats (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), with a scale for each group.

    mxfp4  weight uint8 [n, k / 2]; weight_scale uint8 [n, k / 32], the exponent of 2 plus 127 (255: NaN)
    nvfp4  weight uint8 [n, k / 2]; weight_scale float8_e4m3fn [n, k / 16]; weight_global_scale float32 [n]

Groups are consecutive columns of a row. Column 2j is in the low four bits of byte j, column 2j + 1 in the high ones. An
nvfp4 checkpoint has one global scale for each weight; here it is repeated for each row, so that layers with different
ones can be packed.

The bits of an e2m1 code, moved to the top of the exponent's low bits and of the mantissa of e4m3, are the e4m3 number
that is smaller by 2**6. This includes zero and the subnormal 0.5, so no table is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tcdeploy.kernels.linear.scheme_values import pack_nibbles, scale_dtype, scale_groups, unpack_nibbles
from tcdeploy.planning.schemes import SCHEMES, Scheme, SchemeTensor, Shape

MXFP4_NAME, NVFP4_NAME = "mxfp4", "nvfp4"
MXFP4_GROUP, NVFP4_GROUP = 32, 16
E2M1_AS_E4M3 = 2.0**6  # what an e2m1 code read as e4m3 is multiplied by: the difference of the exponent biases, 7 - 1
LARGEST = 6.0  # of e2m1
LARGEST_SCALE, SMALLEST_SCALE = 448.0, 2.0**-9  # of e4m3
# Halfway between two neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6: above the i-th, the code is larger than i.
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of e2m1 codes, uint8 below 16, exactly."""
    bits = (codes & 8) << 4 | (codes & 7) << 2
    return bits.view(torch.float8_e4m3fn).to(dtype) * E2M1_AS_E4M3


def encode(values: Tensor) -> Tensor:
    """The codes, uint8, of the nearest e2m1 values; of the smaller one in the middle of two."""
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for midpoint in MIDPOINTS:
        codes += values.abs() > midpoint
    return codes | values.signbit().to(torch.uint8) << 3


def _dense_shape(shapes: Sequence[Shape], group: int) -> tuple[int, int]:
    n, row_bytes = shapes[0]
    if row_bytes < 1 or 2 * row_bytes % group:
        raise ValueError(f"{2 * row_bytes} columns are not whole groups of {group}")
    return n, 2 * row_bytes


def _dequantise_mxfp4(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    weight, exponents = tensors
    wide = scale_dtype(dtype)
    scale = exponents.view(torch.float8_e8m0fnu).to(wide)
    return scale_groups(decode(unpack_nibbles(weight), wide), scale).to(dtype)


def _quantise_mxfp4(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, MXFP4_GROUP))
    exponent = (groups.abs().amax(2) / LARGEST).clamp(min=2.0**-126).log2().ceil()
    codes = encode(groups / exponent.exp2()[:, :, None])
    return pack_nibbles(codes.flatten(1)), (exponent + 127).to(torch.uint8)


def _dequantise_nvfp4(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    weight, wide = tensors[0], scale_dtype(dtype)
    scale, global_scale = (tensor.to(wide) for tensor in tensors[1:])
    return (scale_groups(decode(unpack_nibbles(weight), wide), scale) * global_scale[:, None]).to(dtype)


def _quantise_nvfp4(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(2)
    global_scale = (largest.amax(1) / (LARGEST * LARGEST_SCALE)).clamp(min=1e-30)
    scale = (largest / LARGEST / global_scale[:, None]).clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.float8_e4m3fn)
    codes = encode(groups / (scale.float() * global_scale[:, None])[:, :, None])
    return pack_nibbles(codes.flatten(1)), scale, global_scale


WEIGHT = SchemeTensor("weight", "uint8", lambda rows, columns: (rows, columns // 2))
SCHEMES[MXFP4_NAME] = Scheme(
    name=MXFP4_NAME,
    tensors=(WEIGHT, SchemeTensor("weight_scale", "uint8", lambda rows, columns: (rows, columns // MXFP4_GROUP))),
    dense_shape=lambda shapes: _dense_shape(shapes, MXFP4_GROUP),
    dequantise=_dequantise_mxfp4,
    quantise=_quantise_mxfp4,
    row_block=1,
)
SCHEMES[NVFP4_NAME] = Scheme(
    name=NVFP4_NAME,
    tensors=(
        WEIGHT,
        SchemeTensor("weight_scale", "float8_e4m3fn", lambda rows, columns: (rows, columns // NVFP4_GROUP)),
        SchemeTensor("weight_global_scale", "float32", lambda rows, columns: (rows,)),
    ),
    dense_shape=lambda shapes: _dense_shape(shapes, NVFP4_GROUP),
    dequantise=_dequantise_nvfp4,
    quantise=_quantise_nvfp4,
    row_block=1,
)
