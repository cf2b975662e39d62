"""The values of GGUF's block types, in plain torch.

A row of a weight is a sequence of blocks. A block holds the codes of 32 or 256 consecutive columns, and their scales
and minimums. Each function takes blocks [n, bytes] uint8, and returns [n, columns] float32. Products are exact. Types
with a minimum round once, as in llama.cpp.

Scales and minimums are float16. Blocks of 256 (types with a K, and IQ4_XS) consist of sub-blocks of 16 or 32 columns,
each with a scale, and with a minimum in some types, of few bits; the float16 numbers multiply these. Nibbles are two
codes per byte. In blocks of 32, byte i has columns i and 16 + i. Sub-blocks have the same order, except where a
function says otherwise. Numbers are little-endian.

Not supported: the types below 4 bits whose names begin with IQ, whose codes index tables of some thousand values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tcdeploy.models.weights.gguf_file import TYPES_BY_NAME

CHUNK_VALUES = 1 << 18  # intermediate results of one chunk stay in the CPU's caches
IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_TABLE = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)  # doubled


def gguf_values(tensors: Sequence[Tensor], block_type: str) -> Tensor:
    """Rows of blocks [..., bytes] uint8 -> [..., columns] float32."""
    [rows] = tensors
    kind, decode = TYPES_BY_NAME[block_type], DECODERS[block_type]
    blocks = rows.reshape(-1, kind.num_bytes)
    pieces = [decode(piece) for piece in blocks.split(CHUNK_VALUES // kind.columns)]
    return torch.cat(pieces).view(*rows.shape[:-1], -1)


def q4_0_nibbles(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of Q4_0 [n, bytes] -> the codes as the scheme int4 packs them [n, columns / 2]: columns 2j and 2j + 1."""
    [rows] = tensors
    codes = _nibbles(rows.reshape(-1, 18)[:, 2:])
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(len(rows), -1)


def _float16(blocks: Tensor, begin: int) -> Tensor:
    """The float16 number at byte `begin` of each block: [n, 1] float32."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., bytes] -> [..., 2 * bytes]: the low nibbles of all bytes, and then the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _bits(packed: Tensor, bits: int) -> Tensor:
    """[..., bytes] -> [..., 8 / bits, bytes]: the lowest bits of all bytes, then the next ones."""
    return torch.stack([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -2)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_float16(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_float16(blocks, 0)).add_(_float16(blocks, 2))


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """high [n, 4]: bit i of the word belongs to column i. low [n, 16]: nibbles."""
    top = _bits(high, 1).transpose(1, 2).flatten(1)
    return (_nibbles(low) | top << 4).float()


def _q5_0(blocks: Tensor) -> Tensor:
    return _five_bits(blocks[:, 2:6], blocks[:, 6:]).sub_(16).mul_(_float16(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]).mul_(_float16(blocks, 0)).add_(_float16(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_float16(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    """A byte has the codes of 4 columns that are 32 apart. Scale and minimum of 16 columns share a byte."""
    packed_scales = blocks[:, :16]
    scales, minimums = (packed_scales & 15).float(), (packed_scales >> 4).float()
    codes = _bits(blocks[:, 16:80].unflatten(1, (2, 32)), 2).reshape(-1, 16, 16).float()
    scales, minimums = scales * _float16(blocks, 80), minimums * _float16(blocks, 82)
    return codes.mul_(scales[..., None]).sub_(minimums[..., None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """Two bits of a code are stored as in Q2_K. The third is bit j of the other 32 bytes, for columns from 32 j on."""
    low = _bits(blocks[:, 32:96].unflatten(1, (2, 32)), 2).flatten(1)
    codes = (low | _bits(blocks[:, :32], 1).flatten(1) << 2).float().sub_(4)
    scales = _nibbles(blocks[:, 96:104]) | _bits(blocks[:, 104:108], 2).flatten(1) << 4
    factors = (scales.float() - 32) * _float16(blocks, 108)
    return codes.unflatten(1, (16, 16)).mul_(factors[..., None]).flatten(1)


def _scales_and_minimums(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes of 8 scales and 8 minimums of 6 bits -> [n, 8] float32 each.

    Those of the first four sub-blocks are in bytes 0 to 7, whose top bits belong to those of the last four.
    """
    first, first_minimums, last = packed.unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], 1)
    minimums = torch.cat([first_minimums & 63, last >> 4 | first_minimums >> 6 << 4], 1)
    return scales.float(), minimums.float()


def _with_minimums(blocks: Tensor, codes: Tensor) -> Tensor:
    """The values of codes [n, 8, 32] of Q4_K and Q5_K."""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    scales, minimums = scales * _float16(blocks, 0), minimums * _float16(blocks, 2)
    return codes.float().mul_(scales[..., None]).sub_(minimums[..., None]).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    """32 bytes have the nibbles of two sub-blocks, the first in the low ones."""
    return _with_minimums(blocks, _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    return _with_minimums(blocks, low | _bits(blocks[:, 16:48], 1) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    """A half of 128 columns: 64 bytes of nibbles, whose low halves are columns 0 to 63, and 32 bytes of bit pairs."""
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).flatten(1)
    codes = (low | _bits(blocks[:, 128:192].unflatten(1, (2, 32)), 2).flatten(1) << 4).float().sub_(32)
    factors = blocks[:, 192:208].view(torch.int8).float() * _float16(blocks, 208)
    return codes.unflatten(1, (16, 16)).mul_(factors[..., None]).flatten(1)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return torch.tensor(IQ4_TABLE, dtype=torch.float32)[_nibbles(blocks[:, 2:]).int()] * _float16(blocks, 0)


def _iq4_xs(blocks: Tensor) -> Tensor:
    """Scales of 6 bits: the high pairs of 8 sub-blocks in 2 bytes, their low nibbles in 4 bytes, in turns."""
    high = _bits(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).flatten(1)
    factors = ((low | high << 4).float() - 32) * _float16(blocks, 0)
    values = torch.tensor(IQ4_TABLE, dtype=torch.float32)[_nibbles(blocks[:, 8:].unflatten(1, (8, 16))).int()]
    return (values * factors[..., None]).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    """The first byte is the exponent of the scale plus 127. Table values are doubled, so the scale is halved."""
    scale = torch.exp2(blocks[:, :1].double() - 128).float()
    return torch.tensor(E2M1_TABLE)[_nibbles(blocks[:, 1:]).int()] * scale


DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
