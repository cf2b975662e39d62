"""The scheme `int8`: 8-bit integers with a scale for each group of columns of a row.

    weight int8 [n, k]; weight_scale float32 [n, k / g]

The group size g follows from the shapes; g = k is one scale for each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tcdeploy.kernels.linear.scheme_values import (
    GROUP_SIZE,
    check_groups,
    groups_of,
    rounded_scale,
    scale_dtype,
    scale_groups,
)
from tcdeploy.planning.schemes import SCHEMES, Scheme, SchemeTensor, Shape

NAME = "int8"
LARGEST = 127
SMALLEST_SCALE = 1e-12  # so that zeros do not become 0 / 0


def _dense_shape(shapes: Sequence[Shape]) -> tuple[int, int]:
    (n, k), (_, groups) = shapes
    check_groups(k, groups)
    return n, k


def _dequantise(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    weight, scale = (tensor.to(scale_dtype(dtype)) for tensor in tensors)
    return scale_groups(weight, scale).to(dtype)


def _quantise(weight: Tensor, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    groups = groups_of(weight, group_size)
    scale = rounded_scale(groups.abs().amax(2).clamp(min=SMALLEST_SCALE) / LARGEST)
    codes = (groups / scale[:, :, None]).round().clamp(-LARGEST, LARGEST)
    return codes.to(torch.int8).view(weight.shape), scale


SCHEMES[NAME] = Scheme(
    name=NAME,
    tensors=(
        SchemeTensor("weight", "int8", lambda rows, columns: (rows, columns)),
        SchemeTensor("weight_scale", "float32", lambda rows, columns: (rows, None)),
    ),
    dense_shape=_dense_shape,
    dequantise=_dequantise,
    quantise=_quantise,
    row_block=1,
)
