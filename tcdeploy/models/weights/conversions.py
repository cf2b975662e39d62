"""Functions that compute weights from the tensors of quantised checkpoints, in plain torch.

A source (sources.py) names them, so that threads call them while they read the files, also in starts from packages.
Each takes tensors in host memory and returns a new tensor. `models/formats/` says which format needs which.

Checkpoints store the numbers of a scheme (planning/schemes.py) in other orders. If only whole bytes are in another
order, the source consists of moves (permute, reshape, view), and needs no function of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tcdeploy.models.weights.gguf_values import gguf_values, q4_0_nibbles
from tcdeploy.planning.schemes import SCHEMES

CHUNK_ELEMENTS = 1 << 18  # of a weight that is quantised; 4 << 20, which leave the CPU's caches, took 1.5 times as long
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's 4-bit values, from the lowest bits: the column of each


def dequantised(tensors: Sequence[Tensor], scheme: str) -> Tensor:
    """The weight [rows, columns] float32 of the tensors of a scheme."""
    return SCHEMES[scheme].dequantise(tensors, torch.float32)


def quantised(tensors: Sequence[Tensor], scheme: str, group_size: int, index: int) -> Tensor:
    """The tensor `index` of `quantised_tensors`."""
    return quantised_tensors(tensors[0], scheme, group_size)[index]


def quantised_tensors(weight: Tensor, scheme: str, group_size: int) -> list[Tensor]:
    """The tensors of a scheme for a weight [rows, columns], whose rows do not share scales.

    In chunks of rows, because rounding takes several times the memory of its input.
    """
    chunks = weight.split(max(1, CHUNK_ELEMENTS // weight.shape[1]))
    parts = (SCHEMES[scheme].quantise(chunk.contiguous(), group_size) for chunk in chunks)
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


def in_linear_order(tensors: Sequence[Tensor], scheme: str) -> Tensor:
    """The first tensor of a weight in a scheme, in the order in which linear layers store it."""
    order, (weight,) = SCHEMES[scheme].linear_order, tensors
    assert order is not None
    return torch.cat([order.reorder(chunk) for chunk in weight.split(max(1, CHUNK_ELEMENTS // weight.shape[1]))])


def repeated(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """One value for all rows: [rows]."""
    return tensors[0].reshape(1).expand(rows)


def reciprocal(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """1 / value, for all rows: [rows] float32."""
    return repeated([1 / tensors[0].float()], rows)


def scaled_in_blocks(tensors: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    """weight [n, k] * scale [ceil(n / rows), ceil(k / columns)]: [n, k] float32."""
    weight, scale = tensors
    n, k = weight.shape
    by_row = scale.float().repeat_interleave(rows, 0)[:n]
    return weight.float() * by_row.repeat_interleave(columns, 1)[:, :k]


def without_offset(tensors: Sequence[Tensor], offset: int) -> Tensor:
    """Unsigned bytes, less an offset: int8 of the same shape."""
    return (tensors[0].to(torch.int16) - offset).to(torch.int8)


def unpacked(tensors: Sequence[Tensor], bits: int, dim: int, count: int, offset: int = 0) -> Tensor:
    """The unsigned values of int32 words, which follow each other along `dim`, the lowest bits first.

    `count` of them, plus an offset, as uint8. bits: 2, 4 or 8, or 3, whose values cross the borders of words.
    """
    words = tensors[0].movedim(dim, -1).contiguous()
    return (_values(words, bits)[..., :count] + offset).movedim(-1, dim)


def _values(words: Tensor, bits: int) -> Tensor:
    """[..., words] int32 -> [..., words * 32 // bits] uint8."""
    content = words.view(torch.uint8)  # little-endian
    if bits == 8:
        return content
    if 8 % bits == 0:
        shifts = range(0, 8, bits)
        return torch.stack([content >> shift & (1 << bits) - 1 for shift in shifts], -1).flatten(-2)
    by_bit = torch.stack([content >> shift & 1 for shift in range(8)], -1).flatten(-2)
    whole = by_bit[..., : by_bit.shape[-1] // bits * bits].unflatten(-1, (-1, bits))
    return (whole << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def nibbles(tensors: Sequence[Tensor]) -> Tensor:
    """Values 0 to 15 [n, k] -> [n, k / 2] uint8: the even columns are the low halves of the bytes."""
    values = tensors[0]
    return values[:, ::2] | values[:, 1::2] << 4


def unpacked_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `nibbles`: [n, k / 2] -> [n, k]. A copy, since models/ may not import kernels/."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def awq_values(tensors: Sequence[Tensor]) -> Tensor:
    """The values of int32 words [n, k / 8] in the order of AWQ: [n, k] uint8."""
    values = _values(tensors[0].contiguous(), 4).unflatten(-1, (-1, 8))
    order = torch.empty(8, dtype=torch.long)
    order[list(AWQ_ORDER)] = torch.arange(8)
    return values[..., order].flatten(-2)


def awq_nibbles(tensors: Sequence[Tensor]) -> Tensor:
    """A weight of AWQ, int32 [k, n / 8] -> [n, k / 2] uint8, as `nibbles`."""
    return nibbles([awq_values(tensors).T])


def sorted_columns(tensors: Sequence[Tensor]) -> Tensor:
    """The columns [k] in the order of their groups, from the group of each column [k]: int32."""
    return tensors[0].long().argsort(stable=True).to(torch.int32)


def sorted_nibbles(tensors: Sequence[Tensor]) -> Tensor:
    """`nibbles` [n, k / 2] with the columns in the order of their groups [k]."""
    packed, groups = tensors
    return nibbles([unpacked_nibbles(packed)[:, sorted_columns([groups]).long()]])


def grouped_values(tensors: Sequence[Tensor], zero: int | None = None) -> Tensor:
    """(values [n, k] - zeros [n, groups]) * scales [n, groups]: [n, k] float32.

    tensors: values, scales, zeros unless they are all `zero`, and the group of each column [k] unless groups have equal
    numbers of columns and follow each other.
    """
    values, scales, *others = tensors
    zeros = others.pop(0).float() if zero is None else torch.full_like(scales, zero, dtype=torch.float32)
    columns = torch.arange(values.shape[1])
    groups = others.pop().long() if others else columns * scales.shape[1] // len(columns)
    return (values.float() - zeros[:, groups]) * scales.float()[:, groups]


def divided(tensors: Sequence[Tensor], divisor: float) -> Tensor:
    return tensors[0].float() / divisor


def table_values(
    tensors: Sequence[Tensor], rows: int, columns: int, block: int, nested_block: int = 0, offset: float = 0.0
) -> Tensor:
    """A weight of bitsandbytes with 4 bits: [rows, columns] float32.

    tensors: codes, two per byte, the first in the high half; the table [16]; the largest value of each `block` values.
    With `nested_block`, the latter are codes, too: of the table [256] after the largest values of each of their blocks,
    and less `offset`.
    """
    codes, table, largest, *nested = tensors
    if nested_block:
        scales, nested_table = nested
        largest = nested_table[largest.long()] * scales.repeat_interleave(nested_block)[: len(largest)] + offset
    values = table[torch.stack([codes.flatten() >> 4, codes.flatten() & 15], -1).flatten().long()]
    count = rows * columns
    return (values[:count] * largest.repeat_interleave(block)[:count]).view(rows, columns)


def signed_nibbles_and_offsets(tensors: Sequence[Tensor]) -> Tensor:
    """code * scale + zero [groups, n], for codes -8 to 7 in int8 [n, k / 2], the first in the low half: [n, k]."""
    packed, scales, zeros = tensors
    codes = (unpacked_nibbles(packed.view(torch.uint8)) ^ 8).float() - 8
    groups = torch.arange(codes.shape[1]) * len(scales) // codes.shape[1]
    return codes * scales.float().T[:, groups] + zeros.float().T[:, groups]


def mxfp4_experts(tensors: Sequence[Tensor]) -> Tensor:
    """Blocks [experts, n, k / 32, 16] and scales [experts, n, k / 32] -> [experts, k, n] bfloat16, which is exact."""
    blocks, scales = tensors
    rows = [blocks.flatten(2).flatten(0, 1), scales.flatten(0, 1)]
    return SCHEMES["mxfp4"].dequantise(rows, torch.bfloat16).unflatten(0, blocks.shape[:2]).transpose(1, 2)


def reduced(tensors: Sequence[Tensor], value: float) -> Tensor:
    """A tensor minus a number, in float32."""
    return tensors[0].float() - value


CONVERSIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        dequantised, quantised, in_linear_order, repeated, reciprocal, scaled_in_blocks, without_offset, unpacked,
        nibbles, awq_values, awq_nibbles, sorted_columns, sorted_nibbles, grouped_values, divided, table_values,
        signed_nibbles_and_offsets, mxfp4_experts, reduced, gguf_values, q4_0_nibbles,
    )
}  # fmt: skip
