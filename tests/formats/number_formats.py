"""Numbers of 8 and fewer bits: how a weight is rounded to them, and what one stored code is worth.

Rounding works on tensors. The value of a code is a formula on one Python integer, straight from the definition of the
format: it shares nothing with torch's casts or with the tables of a reader, so each checks the other.

- E4M3 (OCP, `float8_e4m3fn`): sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinities; +-448.
- E2M1 (FP4): sign, 2 bits of exponent with bias 1, 1 bit of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
- E8M0: 8 bits of exponent with bias 127, no sign; 255 is NaN. A scale only.
- Integers: a code of `bits` without sign, minus a zero point. Symmetric ones have the zero point 2 ** (bits - 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3_MAX = 448.0
FP4_MAX = 6.0


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code >> 7 else size


def e2m1(code: int) -> float:
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if code >> 3 else size


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def fp4_codes(values: Tensor) -> Tensor:
    """The code of the nearest FP4 value, as uint8."""
    distances = (values.abs()[..., None] - FP4_VALUES).abs()
    return (distances.argmin(-1) + 8 * (values < 0)).to(torch.uint8)


def fp4_floats(codes: Tensor) -> Tensor:
    return torch.cat([FP4_VALUES, -FP4_VALUES])[codes.long()]


def e8m0_codes(largest: Tensor, exponent_of_maximum: int) -> Tensor:
    """The scales 2 ** (floor(log2(largest)) - exponent of the maximum), for groups with the given largest sizes."""
    exponents = torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - exponent_of_maximum
    return (exponents + 127).clamp(0, 254).to(torch.uint8)


def e8m0_floats(codes: Tensor) -> Tensor:
    return torch.exp2(codes.float() - 127)


def to_fp8(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


class Fp8Weight(NamedTuple):
    """`codes` [rows, columns] in E4M3, `scale` [blocks of rows, blocks of columns], `weight` in float32."""

    codes: Tensor
    scale: Tensor
    weight: Tensor


def to_fp8_blocks(weight: Tensor, height: int, width: int, store_scale: Callable[[Tensor], Tensor]) -> Fp8Weight:
    """Round with one scale for each block; those at the edges may be smaller. `store_scale`: to its stored dtype."""
    rows, columns = weight.shape
    grid = (-(-rows // height), -(-columns // width))
    padded = torch.nn.functional.pad(weight, (0, grid[1] * width - columns, 0, grid[0] * height - rows))
    scale = store_scale(padded.view(grid[0], height, grid[1], width).abs().amax((1, 3)) / E4M3_MAX)
    factors = scale.float().repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
    codes = to_fp8(weight / factors)
    return Fp8Weight(codes, scale, codes.float() * factors)


def powers_of_two(scale: Tensor) -> Tensor:
    """Scales rounded up to powers of two, as E8M0 stores them; in float32."""
    return torch.exp2(torch.ceil(torch.log2(scale.float())))


class Fp4Weight(NamedTuple):
    """`packed` [rows, columns / 2], `scale` [rows, groups], the scale of the whole weight if any, and the weight."""

    packed: Tensor
    scale: Tensor
    global_scale: Tensor | None
    weight: Tensor


def to_nvfp4(weight: Tensor) -> Fp4Weight:
    """Groups of 16 with a scale in E4M3, which is multiplied by `global_scale` in float32."""
    parts = weight.unflatten(-1, (-1, 16))
    largest = parts.abs().amax(-1)
    global_scale = largest.max() / (E4M3_MAX * FP4_MAX)
    scale = to_fp8(largest / FP4_MAX / global_scale)
    factors = (scale.float() * global_scale)[..., None]
    codes = fp4_codes(parts / factors.clamp(min=1e-12))
    return Fp4Weight(pack_fp4(codes).flatten(-2), scale, global_scale, (fp4_floats(codes) * factors).flatten(-2))


def to_mxfp4(weight: Tensor) -> Fp4Weight:
    """Groups of 32 with a scale in E8M0."""
    parts = weight.unflatten(-1, (-1, 32))
    scale = e8m0_codes(parts.abs().amax(-1), 2)
    factors = e8m0_floats(scale)[..., None]
    codes = fp4_codes(parts / factors)
    return Fp4Weight(pack_fp4(codes).flatten(-2), scale, None, (fp4_floats(codes) * factors).flatten(-2))


def pack_fp4(codes: Tensor) -> Tensor:
    """Two codes per byte, the first of them in the low nibble."""
    return codes[..., ::2] | codes[..., 1::2] << 4


class IntegerWeight(NamedTuple):
    """`codes` [rows, columns] and `zeros` [rows, groups] in 0..2 ** bits - 1; `scales` [rows, groups] in their dtype.

    `groups` [columns]: the group of each column.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def weight(self) -> Tensor:
        return (self.codes - self.zeros[:, self.groups]).float() * self.scales.float()[:, self.groups]


def to_integers(
    weight: Tensor, bits: int, size: int, symmetric: bool, scale_dtype: torch.dtype, groups: Tensor | None = None
) -> IntegerWeight:
    """Round to integers of `bits`. `size`: columns in a group, -1 for all. `groups`: the group of each column."""
    rows, columns = weight.shape
    size = columns if size == -1 else size
    groups = torch.arange(columns) // size if groups is None else groups.long()
    parts = weight[:, groups.argsort(stable=True)].view(rows, columns // size, size)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = (parts.abs().amax(-1) / (middle - 0.5)).to(scale_dtype)
        zeros = torch.full_like(scales, middle, dtype=torch.long)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / top).to(scale_dtype)
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    codes = ((weight / scales.float()[:, groups]).round() + zeros[:, groups]).clamp(0, top).long()
    return IntegerWeight(codes, scales, zeros, groups)


def pack_bits(codes: Tensor, bits: int, axis: int) -> Tensor:
    """Codes as a stream of bits along an axis, in int32 words: the first code is in the lowest bits.

    A code may lie across two words (3 bits); words of 2, 4 and 8 bits hold whole codes.
    """
    codes = codes.movedim(axis, -1)
    stream = codes[..., None] >> torch.arange(bits) & 1
    stream = torch.nn.functional.pad(stream.flatten(-2), (0, -codes.shape[-1] * bits % 32))
    words = (stream.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, axis).contiguous()


def code_at(words: list[int], index: int, bits: int) -> int:
    """The code at a place of such a stream of words."""
    first, offset = divmod(index * bits, 32)
    pair = words[first] % 2**32 + (words[first + 1] % 2**32 << 32 if first + 1 < len(words) else 0)
    return pair >> offset & (2**bits - 1)
