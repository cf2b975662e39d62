"""Blocks of GGUF: what quantises weights for the tests, and the values of a block by llama.cpp's definition.

Two sets of functions, written apart. `quantise_*` rounds a weight and returns the bytes and the dense weight.
`block_values` computes the values of one block from its bytes with Python's integers and floats, whose results are
exact in double precision, for every type that the product reads.

Blocks (bytes), with d and dmin in F16; codes of 32 values are in the low nibbles of 16 bytes, then in the high ones:

- Q4_0, 18: d, 16 of codes. Value = d * (code - 8). Q4_1, 20: d, m, 16. Value = d * code + m.
- Q5_0, 22: d, 4 with the bit 4 of each value, 16 of codes. Value = d * (code - 16). Q5_1, 24: d, m, 4, 16.
- Q8_0, 34: d, 32 signed codes. Value = d * code.
- IQ4_NL, 18: as Q4_0, the code is a place in a table. MXFP4, 17: an exponent of 2 plus 127, 16 of codes of FP4.
- Q2_K, 84: 16 with a scale (low nibble) and a minimum (high) of 16 values each, 64 of codes, d, dmin. Codes, in each
  half of 128 values: bit pair j of byte l is value 32 * j + l. Value = d * scale * code - dmin * minimum.
- Q3_K, 110: 32 of high bits, 64 of bit pairs as in Q2_K, 12 of scales, d. Bit j of byte l of the high bits belongs to
  value 32 * j + l. Value = d * (scale - 32) * (code - 4). Scales 0 to 7 have their low 4 bits in the low nibbles of
  bytes 0 to 7, 8 to 15 in the high ones; bit pair j of byte 8 + l is the high bits of scale 4 * j + l.
- Q4_K, 144: d, dmin, 12 bytes with a scale and a minimum of 6 bits for each of 8 sub-blocks of 32 values, 128 of codes.
  Byte 32 * j + i has value 64 * j + i in its low nibble, 64 * j + 32 + i in the high one. Values as in Q2_K.
  Scales and minimums 0 to 3: the low 6 bits of bytes 0 to 3 and 4 to 7. Those of 4 to 7: their low 4 bits are the low
  and the high nibble of bytes 8 to 11; their high 2 bits are the top bits of bytes 0 to 3 and of 4 to 7.
- Q5_K, 176: as Q4_K, with 32 bytes of high bits before the codes: bit j of byte i is bit 4 of value 32 * j + i.
- Q6_K, 210: 128 of low nibbles, 64 of high bit pairs, 16 signed scales (of 16 values each), d at the end. Within each
  half of 128 values: nibble bytes l and 32 + l hold values l and 32 + l in their low nibbles, 64 + l and 96 + l in the
  high ones; byte l of the pairs has those of l, 32 + l, 64 + l, 96 + l. Value = d * scale * (code - 32).
- IQ4_XS, 136: d, 2 with the high bit pairs of 8 scales, 4 with their low nibbles, 8 times 16 of codes as in IQ4_NL.
  Value = d * (scale - 32) * table value.

Established from gguf 0.19 (quants.py, which the values are compared with) and llama.cpp's ggml-quants.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.formats.number_formats import to_mxfp4

SUPER_BLOCK = 256


class Blocks(NamedTuple):
    """`data` U8 [rows, bytes of a row], and the weight [rows, columns] that it stands for."""

    data: Tensor
    weight: Tensor


class TensorType(NamedTuple):
    number: int
    quantise: Callable[[Tensor], Blocks]


def f16_bytes(values: Tensor) -> Tensor:
    return values.half()[..., None].contiguous().view(torch.uint8)


def quantise_q8_0(weight: Tensor) -> Blocks:
    parts = weight.unflatten(1, (-1, 32))
    scale = (parts.abs().amax(-1) / 127).half()
    codes = (parts / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
    dense = codes.float() * scale.float()[..., None]
    return Blocks(torch.cat([f16_bytes(scale), codes.view(torch.uint8)], -1).flatten(1), dense.flatten(1))


def quantise_q4_0(weight: Tensor) -> Blocks:
    """The value of largest size is -8 times the scale, which may be negative."""
    parts = weight.unflatten(1, (-1, 32))
    largest = parts.gather(-1, parts.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scale = (largest / -8).half()
    codes = (parts / scale.float()[..., None]).round().clamp(-8, 7)
    dense = codes * scale.float()[..., None]
    low, high = (codes + 8).to(torch.uint8).chunk(2, -1)
    return Blocks(torch.cat([f16_bytes(scale), low | high << 4], -1).flatten(1), dense.flatten(1))


def quantise_mxfp4(weight: Tensor) -> Blocks:
    rounded = to_mxfp4(weight)
    codes = torch.stack([rounded.packed & 15, rounded.packed >> 4], -1).flatten(-2).unflatten(-1, (-1, 2, 16))
    packed = codes[..., 0, :] | codes[..., 1, :] << 4
    return Blocks(torch.cat([rounded.scale[..., None], packed], -1).flatten(1), rounded.weight)


class KBlocks(NamedTuple):
    """Parts of a super-block with minimums: codes [rows, blocks, 8, 32], all others without their last dimensions."""

    scale: Tensor  # d
    scale_of_minimums: Tensor  # dmin
    scales: Tensor  # [rows, blocks, 8], 6 bits
    minimums: Tensor
    codes: Tensor
    weight: Tensor


def with_minimums(weight: Tensor, bits: int) -> KBlocks:
    parts = weight.unflatten(1, (-1, 8, 32))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1)
    steps = (high - low) / (2**bits - 1)
    scale, scale_of_minimums = ((values.amax(-1) / 63).half() for values in (steps, -low))
    scales = (steps / scale.float()[..., None]).round().clamp(1, 63)
    minimums = (-low / scale_of_minimums.float().clamp(min=1e-12)[..., None]).round().clamp(0, 63)
    factors = (scale.float()[..., None] * scales)[..., None]
    offsets = (scale_of_minimums.float()[..., None] * minimums)[..., None]
    codes = ((parts + offsets) / factors).round().clamp(0, 2**bits - 1)
    dense = factors * codes - offsets
    integers = (item.to(torch.uint8) for item in (scales, minimums, codes))
    return KBlocks(scale, scale_of_minimums, *integers, dense.flatten(1))


def pack_scales(scales: Tensor, minimums: Tensor) -> Tensor:
    first, last = scales[..., :4], scales[..., 4:]
    first_minimums, last_minimums = minimums[..., :4], minimums[..., 4:]
    packed = (first | last >> 4 << 6, first_minimums | last_minimums >> 4 << 6, last & 15 | last_minimums << 4)
    return torch.cat(packed, -1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes [..., 8, 32] of 4 bits: two sub-blocks in 32 bytes."""
    return (codes[..., ::2, :] & 15 | codes[..., 1::2, :] << 4).flatten(-2)


def quantise_q4_k(weight: Tensor) -> Blocks:
    block = with_minimums(weight, 4)
    scales = pack_scales(block.scales, block.minimums)
    parts = (f16_bytes(block.scale), f16_bytes(block.scale_of_minimums), scales, pack_nibbles(block.codes))
    return Blocks(torch.cat(parts, -1).flatten(1), block.weight)


def quantise_q5_k(weight: Tensor) -> Blocks:
    block = with_minimums(weight, 5)
    high_bits = (block.codes >> 4 << torch.arange(8, dtype=torch.uint8)[:, None]).sum(-2).to(torch.uint8)
    scales = pack_scales(block.scales, block.minimums)
    parts = (f16_bytes(block.scale), f16_bytes(block.scale_of_minimums), scales, high_bits, pack_nibbles(block.codes))
    return Blocks(torch.cat(parts, -1).flatten(1), block.weight)


def quantise_q6_k(weight: Tensor) -> Blocks:
    parts = weight.unflatten(1, (-1, 16, 16))
    steps = parts.abs().amax(-1) / 31
    scale = (steps.amax(-1) / 127).half()
    scales = (steps / scale.float()[..., None]).round().clamp(1, 127)
    factors = (scale.float()[..., None] * scales)[..., None]
    codes = (parts / factors).round().clamp(-32, 31)
    quarters = (codes + 32).to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))
    nibbles = (quarters[..., :2, :] & 15 | quarters[..., 2:, :] << 4).flatten(-3)
    pairs = (quarters >> 4 << 2 * torch.arange(4, dtype=torch.uint8)[:, None]).sum(-2).to(torch.uint8).flatten(-2)
    data = torch.cat([nibbles, pairs, scales.to(torch.int8).view(torch.uint8), f16_bytes(scale)], -1)
    return Blocks(data.flatten(1), (factors * codes).flatten(1))


def keep_f32(tensor: Tensor) -> Blocks:
    return Blocks(tensor.float().view(torch.uint8), tensor.float())


def keep_f16(tensor: Tensor) -> Blocks:
    return Blocks(tensor.half().view(torch.uint8), tensor.half().float())


def keep_bf16(tensor: Tensor) -> Blocks:
    return Blocks(tensor.bfloat16().view(torch.uint8), tensor.bfloat16().float())


TYPES = {
    "F32": TensorType(0, keep_f32), "F16": TensorType(1, keep_f16), "BF16": TensorType(30, keep_bf16),
    "Q4_0": TensorType(2, quantise_q4_0), "MXFP4": TensorType(39, quantise_mxfp4),
    "Q8_0": TensorType(8, quantise_q8_0), "Q4_K": TensorType(12, quantise_q4_k),
    "Q5_K": TensorType(13, quantise_q5_k), "Q6_K": TensorType(14, quantise_q6_k),
}  # fmt: skip
# (general.file_type, the type of linear layers and embeddings, the type of attn_v, ffn_down and output)
FILE_TYPES = {
    "MXFP4": (38, "Q8_0", "Q8_0"),  # only experts are MXFP4
    "F16": (1, "F16", "F16"), "Q4_0": (2, "Q4_0", "Q4_0"), "BF16": (32, "BF16", "BF16"),
    "Q8_0": (7, "Q8_0", "Q8_0"), "Q4_K_M": (15, "Q4_K", "Q6_K"), "Q5_K_M": (17, "Q5_K", "Q6_K"),
    "Q6_K": (18, "Q6_K", "Q6_K"),
}  # fmt: skip


TABLE = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SIZES = {  # values and bytes of a block
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "IQ4_NL": (32, 18),
    "MXFP4": (32, 17), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210), "IQ4_XS": (256, 136),
}  # fmt: skip
F16_PLACES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
              "Q6_K": (208,), "MXFP4": ()}  # fmt: skip


def random_blocks(kind: str, rows: int, columns: int) -> Tensor:
    """Any bytes but in the scales, which are moderate: [rows, bytes] uint8."""
    values, size = SIZES[kind]
    generator = torch.Generator().manual_seed(values * size)
    blocks = torch.randint(0, 256, (rows, columns // values, size), generator=generator, dtype=torch.uint8)
    for place in F16_PLACES.get(kind, (0,)):
        scale = torch.randn(blocks.shape[:2], generator=generator) / 100
        blocks[..., place : place + 2] = f16_bytes(scale)
    if kind == "MXFP4":
        blocks[..., 0] = 110 + blocks[..., 0] % 16
    return blocks.flatten(1)


def decode(kind: str, data: Tensor) -> Tensor:
    """Rows of blocks [rows, bytes] by the definition: [rows, columns]."""
    size = SIZES[kind][1]
    rows = ([bytes(block.tolist()) for block in row.split(size)] for row in data)
    return torch.tensor([[value for block in row for value in block_values(kind, block)] for row in rows])


def block_values(kind: str, block: bytes) -> list[float]:
    if SIZES[kind][0] == 32:
        return small_block_values(kind, block)
    if kind in ("Q4_K", "Q5_K"):
        return [minimum_value(kind, block, place) for place in range(256)]
    value = {"Q2_K": q2_k_value, "Q3_K": q3_k_value, "Q6_K": q6_k_value, "IQ4_XS": iq4_xs_value}[kind]
    return [value(block, place) for place in range(256)]


def f16(block: bytes, place: int) -> float:
    return float(struct.unpack_from("<e", block, place)[0])


def small_block_values(kind: str, block: bytes) -> list[float]:
    if kind == "Q8_0":
        return [f16(block, 0) * code for code in struct.unpack_from("32b", block, 2)]
    nibbles = [byte & 15 for byte in block[-16:]] + [byte >> 4 for byte in block[-16:]]
    if kind == "MXFP4":
        return [2.0 ** (block[0] - 127) * FP4[code & 7] * (-1 if code & 8 else 1) for code in nibbles]
    if kind == "IQ4_NL":
        return [f16(block, 0) * TABLE[code] for code in nibbles]
    if kind in ("Q5_0", "Q5_1"):
        (high,) = struct.unpack_from("<I", block, 2 if kind == "Q5_0" else 4)
        nibbles = [code + 16 * (high >> place & 1) for place, code in enumerate(nibbles)]
    if kind in ("Q4_1", "Q5_1"):
        return [f16(block, 0) * code + f16(block, 2) for code in nibbles]
    return [f16(block, 0) * (code - (8 if kind == "Q4_0" else 16)) for code in nibbles]


def pair(codes: bytes, place: int) -> int:
    half, within = divmod(place, 128)
    return codes[32 * half + within % 32] >> 2 * (within // 32) & 3


def q2_k_value(block: bytes, place: int) -> float:
    both = block[place // 16]
    return f16(block, 80) * (both & 15) * pair(block[16:80], place) - f16(block, 82) * (both >> 4)


def q3_k_value(block: bytes, place: int) -> float:
    index, scales = place // 16, block[96:108]
    scale = (scales[index % 8] >> 4 * (index // 8) & 15) + 16 * (scales[8 + index % 4] >> 2 * (index // 4) & 3)
    code = pair(block[32:96], place) + 4 * (block[place % 32] >> place // 32 & 1)
    return f16(block, 108) * (scale - 32) * (code - 4)


def q6_k_value(block: bytes, place: int) -> float:
    half, quarter, index = place // 128, place // 32 % 4, place % 32
    nibble = block[64 * half + 32 * (quarter % 2) + index] >> 4 * (quarter // 2) & 15
    high = block[128 + 32 * half + index] >> 2 * quarter & 3
    scale = struct.unpack_from("b", block, 192 + place // 16)[0]
    return f16(block, 208) * scale * ((nibble | high << 4) - 32)


def iq4_xs_value(block: bytes, place: int) -> float:
    index, within = divmod(place, 32)
    low = block[4 + index // 2] >> 4 * (index % 2) & 15
    high = struct.unpack_from("<H", block, 2)[0] >> 2 * index & 3
    code = block[8 + 16 * index + within % 16] >> 4 * (within // 16) & 15
    return f16(block, 0) * (low + 16 * high - 32) * TABLE[code]


def minimum_value(kind: str, block: bytes, place: int) -> float:
    scale, minimum = scale_and_minimum(block[4:16], place // 32)
    start = 48 if kind == "Q5_K" else 16
    code = block[start + 32 * (place // 64) + place % 32] >> 4 * (place // 32 % 2) & 15
    if kind == "Q5_K":
        code |= (block[16 + place % 32] >> place // 32 & 1) << 4
    return f16(block, 0) * scale * code - f16(block, 2) * minimum


def scale_and_minimum(packed: bytes, index: int) -> tuple[int, int]:
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    both = packed[index + 4]
    return both & 15 | packed[index - 4] >> 6 << 4, both >> 4 | packed[index] >> 6 << 4
