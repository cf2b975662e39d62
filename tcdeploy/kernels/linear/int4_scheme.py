"""Schemes of 4-bit integers, w = (nibble - zero point) * scale, with a scale for each group of columns of a row.

    weight             uint8 [n, k / 2]: column 2j in the low four bits of byte j, column 2j + 1 in the high ones
    weight_scale       float16, bfloat16 or float32 [n, k / g]; the group size g follows from the shapes
    weight_zero_point  uint8 [n, k / g], 0 to 16; only in schemes with `_zeros`, in the others it is 8
    columns            int32 [k], only in schemes with `_permuted`: column j of the stored matrix is column columns[j]
                       of the weight, so y = x[:, columns] @ stored.T

The dtype of the scales is part of the scheme's name, because the conversion of a checkpoint must not round them.
Zero points are not packed: they are 1 / g of the weight's elements, and some checkpoints have the value 16, one more
than fits. Permuted weights are not packed, since each layer has an order of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tcdeploy.kernels.linear.scheme_values import (
    GROUP_SIZE,
    check_groups,
    groups_of,
    pack_nibbles,
    scale_dtype,
    scale_groups,
    unpack_nibbles,
)
from tcdeploy.planning.schemes import SCHEMES, Scheme, SchemeTensor, Shape, int4_scheme_name

SCALE_DTYPES = ("float16", "bfloat16", "float32")
SYMMETRIC_ZERO = 8  # the zero point of schemes without zero points
LARGEST_ZERO = 16


def _dense_shape(shapes: Sequence[Shape], zeros: bool, permuted: bool) -> tuple[int, int]:
    (n, row_bytes), scale = shapes[0], shapes[1]
    k = 2 * row_bytes
    check_groups(k, scale[1])
    if (zeros and shapes[2] != scale) or (permuted and shapes[-1] != (k,)):
        raise ValueError(f"no weight has the shapes {[*shapes]}")
    return n, k


def _dequantise(tensors: Sequence[Tensor], dtype: torch.dtype, zeros: bool, permuted: bool) -> Tensor:
    codes, wide = unpack_nibbles(tensors[0]), scale_dtype(dtype)
    scale = tensors[1].to(wide)
    zero = tensors[2].to(wide).repeat_interleave(codes.shape[1] // scale.shape[1], 1) if zeros else SYMMETRIC_ZERO
    weight = scale_groups(codes.to(wide) - zero, scale).to(dtype)
    return weight.index_select(1, tensors[-1].argsort()) if permuted else weight


def _quantise(
    weight: Tensor, group_size: int = GROUP_SIZE, *, dtype: torch.dtype, zeros: bool, permuted: bool
) -> list[Tensor]:
    columns = torch.ones_like(weight[0], dtype=torch.int32).cumsum(0, dtype=torch.int32).sub(1).flip(0)
    groups = groups_of(weight.flip(1) if permuted else weight, group_size)
    smallest, largest = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    span = (largest - smallest) / 15 if zeros else torch.maximum(largest, -smallest) / 7
    scale = span.clamp(min=torch.finfo(dtype).tiny).to(dtype)
    zero = (-smallest / scale.float()).round().clamp(0, LARGEST_ZERO) if zeros else torch.full_like(span, 8)
    codes = ((groups / scale.float()[:, :, None]).round() + zero[:, :, None]).clamp(0, 15)
    tensors = [pack_nibbles(codes.view(weight.shape)), scale]
    return [*tensors, *([zero.to(torch.uint8)] if zeros else []), *([columns] if permuted else [])]


def _int4_scheme(dtype: str, zeros: bool, permuted: bool) -> Scheme:
    tensors = [
        SchemeTensor("weight", "uint8", lambda rows, columns: (rows, columns // 2)),
        SchemeTensor("weight_scale", dtype, lambda rows, columns: (rows, None)),
    ]
    if zeros:
        tensors.append(SchemeTensor("weight_zero_point", "uint8", lambda rows, columns: (rows, None)))
    if permuted:
        tensors.append(SchemeTensor("columns", "int32", lambda rows, columns: (columns,)))
    return Scheme(
        name=int4_scheme_name(dtype, zeros, permuted),
        tensors=tuple(tensors),
        dense_shape=functools.partial(_dense_shape, zeros=zeros, permuted=permuted),
        dequantise=functools.partial(_dequantise, zeros=zeros, permuted=permuted),
        quantise=functools.partial(_quantise, dtype=getattr(torch, dtype), zeros=zeros, permuted=permuted),
        row_block=0 if permuted else 1,
    )


_INT4_SCHEMES = [_int4_scheme(*case) for case in itertools.product(SCALE_DTYPES, (False, True), (False, True))]
NAMES = tuple(scheme.name for scheme in _INT4_SCHEMES)
SCHEMES.update(zip(NAMES, _INT4_SCHEMES, strict=True))
