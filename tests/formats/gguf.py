"""GGUF: one file of llama.cpp with config, tokenizer and tensors. Here: Q8_0, Q4_K, Q5_K, Q6_K of Llama and Qwen3.

The file: "GGUF", version 3 (U32), the numbers of tensors and of metadata entries (U64); the entries (key, type, value);
for each tensor its name, dimensions, type and offset; padding to `general.alignment` (32); the data, each tensor padded
likewise. All is little-endian; strings have their length in front as U64. Dimensions are in reverse: a weight [n, k]
has (k, n). Only linear layers and embeddings are quantised, in rows of whole blocks; norms are F32.

Blocks (bytes), with d and dmin in F16:

- Q8_0: 32 values, 34 bytes: d, 32 signed codes. Value = d * code.
- Q4_K: 256 values, 144 bytes: d, dmin, 12 bytes with a scale and a minimum of 6 bits for each of 8 sub-blocks of 32
  values, 128 bytes of codes. Byte 32 * j + i has value 64 * j + i in its low nibble, 64 * j + 32 + i in the high one.
  Value = d * scale * code - dmin * minimum.
- Scales and minimums 0 to 3: the low 6 bits of bytes 0 to 3 and 4 to 7. Those of 4 to 7: their low 4 bits are the low
  and the high nibble of bytes 8 to 11; their high 2 bits are the top bits of bytes 0 to 3 and of 4 to 7.
- Q5_K: 176 bytes: as Q4_K, with 32 bytes of high bits before the codes: bit j of byte i is bit 4 of value 32 * j + i.
- Q6_K: 210 bytes: 128 of low nibbles, 64 of high bit pairs, 16 signed scales (of 16 values each), d at the end. Within
  each half of 128 values: nibble bytes l and 32 + l hold values l and 32 + l in their low nibbles, 64 + l and 96 + l in
  the high ones; byte l of the pairs has those of l, 32 + l, 64 + l, 96 + l. Value = d * scale * (code - 32).

Names: token_embd, blk.3.attn_q, attn_k, attn_v, attn_output, attn_norm, ffn_gate, ffn_up, ffn_down, ffn_norm,
output_norm, output (absent if tied), all with ".weight"; attn_q_norm and attn_k_norm in Qwen3. Rows of attn_q and
attn_k of the architecture "llama" (Mistral too) are permuted: within a head, row 2 * i is the first half's row i, row
2 * i + 1 the second half's. Qwen's are not. Files called Q4_K_M have Q6_K for attn_v and ffn_down of some layers and
for output, and Q5_0 or Q8_0 where k is no multiple of 256: the type of each tensor counts, not the file's name.

Established from gguf 0.19 (reader.py, quants.py, which the values and the file are compared with), llama.cpp's
convert_hf_to_gguf, and transformers 5.23's integrations/gguf. No tokenizer is written: the folder keeps its own.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.formats.checkpoint import read_tensors

FILE = "model.gguf"
ALIGNMENT = 32
SUPER_BLOCK = 256
HEADER_TYPES = {"U32": 4, "F32": 6, "STRING": 8}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


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


TYPES = {
    "F32": TensorType(0, keep_f32), "Q8_0": TensorType(8, quantise_q8_0), "Q4_K": TensorType(12, quantise_q4_k),
    "Q5_K": TensorType(13, quantise_q5_k), "Q6_K": TensorType(14, quantise_q6_k),
}  # fmt: skip
# (general.file_type, the type of linear layers and embeddings, the type of attn_v, ffn_down and output)
FILE_TYPES = {
    "Q8_0": (7, "Q8_0", "Q8_0"), "Q4_K_M": (15, "Q4_K", "Q6_K"), "Q5_K_M": (17, "Q5_K", "Q6_K"),
    "Q6_K": (18, "Q6_K", "Q6_K"),
}  # fmt: skip


def value_at(kind: str, data: Tensor, row: int, column: int) -> float:
    """One element of the dense weight, from the bytes of its block."""
    values, size = {"Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}[kind]
    block, place = divmod(column, values)
    bytes_ = bytes(data[row, block * size : (block + 1) * size].tolist())
    if kind == "Q8_0":
        return struct.unpack_from("<e", bytes_)[0] * struct.unpack_from("b", bytes_, 2 + place)[0]
    if kind == "Q6_K":
        half, quarter, index = place // 128, place // 32 % 4, place % 32
        nibble = bytes_[64 * half + 32 * (quarter % 2) + index] >> 4 * (quarter // 2) & 15
        pair = bytes_[128 + 32 * half + index] >> 2 * quarter & 3
        scale = struct.unpack_from("b", bytes_, 192 + place // 16)[0]
        return struct.unpack_from("<e", bytes_, 208)[0] * scale * ((nibble | pair << 4) - 32)
    scale, minimum = scale_and_minimum(bytes_[4:16], place // 32)
    start = 48 if kind == "Q5_K" else 16
    code = bytes_[start + 32 * (place // 64) + place % 32] >> 4 * (place // 32 % 2) & 15
    if kind == "Q5_K":
        code |= (bytes_[16 + place % 32] >> place // 32 & 1) << 4
    factor, factor_of_minimums = struct.unpack_from("<2e", bytes_)
    return factor * scale * code - factor_of_minimums * minimum


def scale_and_minimum(packed: bytes, index: int) -> tuple[int, int]:
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    both = packed[index + 4]
    return both & 15 | packed[index - 4] >> 6 << 4, both >> 4 | packed[index] >> 6 << 4


def gguf_name(name: str) -> str:
    path = name.removesuffix(".weight")
    layer = re.match(r"model\.layers\.(\d+)\.", path)
    prefix = f"blk.{layer[1]}." if layer else ""
    return f"{prefix}{NAMES[path[layer.end() :] if layer else path]}.weight"


def permute_rows(weight: Tensor, heads: int) -> Tensor:
    """The rows of both halves of a head in turns, as the architecture "llama" rotates them."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def restore_rows(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def metadata(config: Mapping[str, Any], file_type: int) -> dict[str, tuple[str, Any]]:
    name = config["model_type"]
    rope = config.get("rope_parameters") or {}
    return {
        "general.architecture": ("STRING", name),
        "general.file_type": ("U32", file_type),
        "general.quantization_version": ("U32", 2),
        f"{name}.block_count": ("U32", config["num_hidden_layers"]),
        f"{name}.context_length": ("U32", config["max_position_embeddings"]),
        f"{name}.embedding_length": ("U32", config["hidden_size"]),
        f"{name}.feed_forward_length": ("U32", config["intermediate_size"]),
        f"{name}.attention.head_count": ("U32", config["num_attention_heads"]),
        f"{name}.attention.head_count_kv": ("U32", config["num_key_value_heads"]),
        f"{name}.attention.key_length": ("U32", config["head_dim"]),
        f"{name}.attention.value_length": ("U32", config["head_dim"]),
        f"{name}.attention.layer_norm_rms_epsilon": ("F32", config["rms_norm_eps"]),
        f"{name}.rope.dimension_count": ("U32", config["head_dim"]),
        f"{name}.rope.freq_base": ("F32", rope.get("rope_theta", 10000.0)),
        f"{name}.vocab_size": ("U32", config["vocab_size"]),
    }


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: str, value: Any) -> bytes:
    content = text(value) if kind == "STRING" else struct.pack("<I" if kind == "U32" else "<f", value)
    return text(key) + struct.pack("<I", HEADER_TYPES[kind]) + content


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % ALIGNMENT)


def write_gguf(source: Path, folder: Path, kind: str) -> dict[str, Tensor]:
    """Write FILE into a new folder. `kind`: of FILE_TYPES. Returns the weights as a reader sees them, by dense name."""
    config = json.loads((source / "config.json").read_text())
    file_type, common, better = FILE_TYPES[kind]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    dense, infos, data = {}, b"", b""
    tensors = read_tensors(source)
    for name, tensor in tensors.items():
        stored_name, part = gguf_name(name), name.removesuffix(".weight").rpartition(".")[2]
        is_better = stored_name == "output.weight" or stored_name.endswith(("attn_v.weight", "ffn_down.weight"))
        type_name = "F32" if tensor.ndim == 1 else better if is_better else common
        is_permuted = config["model_type"] == "llama" and part in heads
        tensor = permute_rows(tensor.float(), heads[part]) if is_permuted else tensor.float()
        blocks = TYPES[type_name].quantise(tensor)
        dense[name] = restore_rows(blocks.weight, heads[part]) if is_permuted else blocks.weight
        sizes = struct.pack(f"<I{tensor.ndim}Q", tensor.ndim, *reversed(tensor.shape))
        infos += text(stored_name) + sizes + struct.pack("<IQ", TYPES[type_name].number, len(data))
        data += padded(blocks.data.contiguous().numpy().tobytes())
    entries = [entry(key, *value) for key, value in metadata(config, file_type).items()]
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + infos
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(padded(start) + data)
    return dense
