"""Schemes of 4-bit integers, w = (nibble - zero point) * scale, with a scale for each group of columns of a row.

    weight             uint8 [n, k / 2]: column 2j in the low four bits of byte j, column 2j + 1 in the high ones
    weight_scale       float16, bfloat16 or float32 [n, k / g]; the group size g follows from the shapes
    weight_zero_point  uint8 [n, k / g], 0 to 16; only in schemes with `_zeros`, in the others it is 8
    columns            int32 [k], only in schemes with `_permuted`: column j of the stored matrix is column columns[j]
                       of the weight, so y = x[:, columns] @ stored.T

Schemes with `_interleaved` store the codes of each 32 columns of `weight` in another order, from which the kernels for
several rows (register_gemm.py, hopper_gemm.py) make the operand of the tensor cores in registers. Linear layers use it
for weights without zero points whose groups have a multiple of 128 columns. Checkpoints and experts never use it.

The dtype of the scales is part of the scheme's name, because the conversion of a checkpoint must not round them.
Zero points are not packed: they are 1 / g of the weight's elements, and some checkpoints have the value 16, one more
than fits. Permuted weights are not packed, since each layer has an order of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

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
from tcdeploy.planning.schemes import SCHEMES, LinearOrder, Scheme, SchemeTensor, Shape, int4_scheme_name

SCALE_DTYPES = ("float16", "bfloat16", "float32")
SYMMETRIC_ZERO = 8  # the zero point of schemes without zero points
LARGEST_ZERO = 16
INTERLEAVED_GROUP = 128  # columns of a step of register_gemm.py, whose codes share a scale in each row


class _Kind(NamedTuple):
    """What the name of a scheme states besides the dtype of the scales."""

    zeros: bool
    permuted: bool
    interleaved: bool


def interleave(weight: Tensor) -> Tensor:
    """uint8 [n, k / 2], with the codes of each 32 columns in the order of the tensor cores.

    The codes of 32 columns are four 32-bit words. For i and t from 0 to 3, word t has the code of column 8 i + 2 t at
    bits 4 i to 4 i + 3, and that of column 8 i + 2 t + 1 at bits 4 i + 16 to 4 i + 19.
    """
    words = weight.contiguous().view(torch.int32).view(-1, 4).T.contiguous()  # [i, n * k / 32], a byte for each t
    parities = (words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F)  # of even and of odd columns
    pairs = [codes[i] | codes[i + 1] << 4 for codes in parities for i in (0, 2)]
    return torch.stack([pair.view(torch.uint8) for pair in pairs], -1).view(weight.shape)


def _deinterleave(weight: Tensor) -> Tensor:
    """The inverse of `interleave`."""
    even, odd = weight.unflatten(1, (-1, 4, 2, 2)).unbind(3)  # [n, k / 32, t, i // 2]: of even and of odd columns
    codes = torch.stack([even & 15 | odd << 4, even >> 4 | odd & 240], -1)  # ..., i % 2
    return codes.permute(0, 1, 3, 4, 2).flatten(1)


def _can_interleave(columns: int, group_size: int) -> bool:
    return columns % group_size == 0 and group_size % INTERLEAVED_GROUP == 0


def _dense_shape(shapes: Sequence[Shape], kind: _Kind) -> tuple[int, int]:
    (n, row_bytes), scale = shapes[0], shapes[1]
    k = 2 * row_bytes
    check_groups(k, scale[1])
    is_impossible = kind.interleaved and not _can_interleave(k, k // scale[1])
    if is_impossible or (kind.zeros and shapes[2] != scale) or (kind.permuted and shapes[-1] != (k,)):
        raise ValueError(f"no weight has the shapes {[*shapes]}")
    return n, k


def _dequantise(tensors: Sequence[Tensor], dtype: torch.dtype, kind: _Kind) -> Tensor:
    packed, wide = _deinterleave(tensors[0]) if kind.interleaved else tensors[0], scale_dtype(dtype)
    codes = unpack_nibbles(packed)
    scale = tensors[1].to(wide)
    zero = tensors[2].to(wide).repeat_interleave(codes.shape[1] // scale.shape[1], 1) if kind.zeros else SYMMETRIC_ZERO
    weight = scale_groups(codes.to(wide) - zero, scale).to(dtype)
    return weight.index_select(1, tensors[-1].argsort()) if kind.permuted else weight


def _quantise(weight: Tensor, group_size: int = GROUP_SIZE, *, dtype: torch.dtype, kind: _Kind) -> list[Tensor]:
    columns = torch.ones_like(weight[0], dtype=torch.int32).cumsum(0, dtype=torch.int32).sub(1).flip(0)
    groups = groups_of(weight.flip(1) if kind.permuted else weight, group_size)
    smallest, largest = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    span = (largest - smallest) / 15 if kind.zeros else torch.maximum(largest, -smallest) / 7
    scale = span.clamp(min=torch.finfo(dtype).tiny).to(dtype)
    zero = (-smallest / scale.float()).round().clamp(0, LARGEST_ZERO) if kind.zeros else torch.full_like(span, 8)
    codes = ((groups / scale.float()[:, :, None]).round() + zero[:, :, None]).clamp(0, 15)
    packed = pack_nibbles(codes.view(weight.shape))
    tensors = [interleave(packed) if kind.interleaved else packed, scale]
    return [*tensors, *([zero.to(torch.uint8)] if kind.zeros else []), *([columns] if kind.permuted else [])]


def _int4_scheme(dtype: str, kind: _Kind) -> Scheme:
    tensors = [
        SchemeTensor("weight", "uint8", lambda rows, columns: (rows, columns // 2)),
        SchemeTensor("weight_scale", dtype, lambda rows, columns: (rows, None)),
    ]
    if kind.zeros:
        tensors.append(SchemeTensor("weight_zero_point", "uint8", lambda rows, columns: (rows, None)))
    if kind.permuted:
        tensors.append(SchemeTensor("columns", "int32", lambda rows, columns: (columns,)))
    order = None
    if not kind.zeros and not kind.interleaved:
        order = LinearOrder(int4_scheme_name(dtype, False, kind.permuted, True), _can_interleave, interleave)
    return Scheme(
        name=int4_scheme_name(dtype, *kind),
        tensors=tuple(tensors),
        dense_shape=functools.partial(_dense_shape, kind=kind),
        dequantise=functools.partial(_dequantise, kind=kind),
        quantise=functools.partial(_quantise, dtype=getattr(torch, dtype), kind=kind),
        row_block=0 if kind.permuted else 1,
        linear_order=order,
    )


_KINDS = [_Kind(*flags) for flags in itertools.product((False, True), repeat=3) if not (flags[0] and flags[2])]
_INT4_SCHEMES = [_int4_scheme(dtype, kind) for dtype in SCALE_DTYPES for kind in _KINDS]
NAMES = tuple(scheme.name for scheme in _INT4_SCHEMES)
INTERLEAVED_NAMES = frozenset(item.linear_order.scheme for item in _INT4_SCHEMES if item.linear_order is not None)
SCHEMES.update(zip(NAMES, _INT4_SCHEMES, strict=True))
