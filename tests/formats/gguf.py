"""GGUF: one file of llama.cpp with config, tokenizer and tensors, or several that are named as parts of one.

The file: "GGUF", version 3 (U32), the numbers of tensors and of metadata entries (U64); the entries (key, type, value);
for each tensor its name, dimensions, type and offset; padding to `general.alignment` (32); the data, each tensor padded
likewise. All is little-endian; strings have their length in front as U64. Dimensions are in reverse: a weight [n, k]
has (k, n). Only linear layers and embeddings are quantised, in rows of whole blocks (gguf_blocks.py); norms, biases and
routers are F32. Parts of a model NAME-00001-of-00002.gguf have `split.count`, and the first has all metadata.

Names: token_embd, blk.3.attn_q, attn_k, attn_v, attn_output, attn_norm, ffn_gate, ffn_up, ffn_down, ffn_norm,
output_norm, output (absent if tied), all with ".weight"; attn_q_norm and attn_k_norm in Qwen3. Rows of attn_q and
attn_k of the architecture "llama" (Mistral and Mixtral too) are permuted, and their biases: within a head, row 2 * i is
the first half's row i, row 2 * i + 1 the second half's. Qwen's are not. Norms of Gemma are stored plus 1. Experts are
stacked, [experts, n, k], as ffn_gate_exps, ffn_up_exps and ffn_down_exps, with a router ffn_gate_inp; gpt-oss has its
columns of gate and up, which transformers interleaves, in two tensors. Dimensions of 1 are dropped
(ffn_gate_inp_shexp). Files called Q4_K_M have Q6_K for attn_v and ffn_down of some layers and for output, and Q5_0 or
Q8_0 where k is no multiple of 256: the type of each tensor counts, not the file's name.

Established from gguf 0.19 (reader.py, constants.py, which files and names are compared with), llama.cpp's
convert_hf_to_gguf, and transformers 5.23's integrations/gguf. A tokenizer's
metadata is written by gguf_tokenizer.py.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.formats.checkpoint import read_tensors
from tests.formats.gguf_blocks import FILE_TYPES, SIZES, TYPES

FILE = "model.gguf"
ALIGNMENT = 32
HEADER_TYPES = {"U32": 4, "I32": 5, "F32": 6, "BOOL": 7, "STRING": 8, "ARRAY": 9}
SCALARS = {"U32": "I", "I32": "i", "F32": "f", "BOOL": "?"}
ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.sinks": "attn_sinks", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj_bias": "ffn_gate_exps", "mlp.experts.up_proj_bias": "ffn_up_exps",
    "mlp.experts.down_proj_bias": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
NORMS_OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
           "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}  # fmt: skip
ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")


class Place(NamedTuple):
    """Where a dense tensor is in a file: all of it, or an expert. `store` gives GGUF's layout, `load` the dense one."""

    name: str
    store: Callable[[Tensor], Tensor]
    load: Callable[[Tensor], Tensor]
    expert: int | None = None


def place_of(config: Mapping[str, Any], name: str, shape: torch.Size) -> Place:
    kind, part = config["model_type"], name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    stored_name = gguf_name(name, kind)
    expert = EXPERT.search(name)
    if expert:
        return Place(stored_name, lambda tensor: tensor, lambda tensor: tensor, int(expert[1]))
    if ARCHITECTURES.get(kind, kind) == "llama" and part in heads:
        return Place(
            stored_name,
            lambda tensor: permute_rows(tensor, heads[part]),
            lambda tensor: restore_rows(tensor, heads[part]),
        )
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return Place(stored_name, lambda tensor: tensor + 1, lambda tensor: tensor - 1)
    return Place(stored_name, torch.squeeze, lambda tensor: tensor.view(shape))


def gguf_name(name: str, kind: str = "") -> str:
    layer = LAYER.match(name)
    path = name[layer.end() :] if layer else name
    suffix = ".bias" if path.endswith((".bias", "_bias")) else ".weight"
    path = path.removesuffix(".weight").removesuffix(".bias")
    expert = EXPERT.fullmatch(path)
    names = {**NAMES, **NORMS_OF_GEMMA} if kind in ("gemma2", "gemma3_text") else dict(NAMES)
    if kind == "gpt_oss":
        names["post_attention_layernorm"] = "post_attention_norm"
    return f"{f'blk.{layer[1]}.' if layer else ''}{EXPERTS[expert[2]] if expert else names[path]}{suffix}"


def split_gpt_oss(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts [experts, k, n] under names of single experts; biases of all experts stay together, as in GGUF."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if not path.endswith("experts"):
            result[name] = tensor
            continue
        pieces = {"gate_proj": tensor[..., ::2], "up_proj": tensor[..., 1::2]}
        pieces = pieces if part.startswith("gate_up") else {"down_proj": tensor}
        for piece_name, piece in pieces.items():
            if part.endswith("bias"):
                result[f"{path}.{piece_name}_bias"] = piece
            else:
                result |= {f"{path}.{number}.{piece_name}.weight": item.T for number, item in enumerate(piece)}
    return result


def join_gpt_oss(source: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse, for the names of `source`."""
    result: dict[str, Tensor] = {}
    for name, tensor in source.items():
        path, _, part = name.rpartition(".")
        if not path.endswith("experts"):
            result[name] = dense[name]
            continue
        names = ("gate_proj", "up_proj") if part.startswith("gate_up") else ("down_proj",)
        if part.endswith("bias"):
            pieces = [dense[f"{path}.{piece}_bias"] for piece in names]
        else:
            pieces = [
                torch.stack([dense[f"{path}.{n}.{piece}.weight"].T for n in range(len(tensor))]) for piece in names
            ]
        result[name] = torch.stack(pieces, -1).flatten(-2)
    return result


def permute_rows(weight: Tensor, heads: int) -> Tensor:
    """The rows of both halves of a head in turns, as the architecture "llama" rotates them."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def restore_rows(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def metadata(config: Mapping[str, Any], file_type: int) -> dict[str, tuple[str, Any]]:
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    experts = config.get("num_experts") or config.get("num_local_experts")
    of_experts = {
        f"{name}.expert_count": ("U32", experts),
        f"{name}.expert_used_count": ("U32", config.get("num_experts_per_tok")),
        f"{name}.expert_feed_forward_length":
            ("U32", config.get("moe_intermediate_size") or config["intermediate_size"]),
    }  # fmt: skip
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "general.architecture": ("STRING", name),
        "tokenizer.ggml.tokens": ("ARRAY", ["<pad>", "ä", "b"]),
        "general.file_type": ("U32", file_type),
        "general.quantization_version": ("U32", 2),
        f"{name}.block_count": ("U32", config["num_hidden_layers"]),
        f"{name}.context_length": ("U32", config["max_position_embeddings"]),
        f"{name}.embedding_length": ("U32", config["hidden_size"]),
        f"{name}.feed_forward_length": ("U32", config["intermediate_size"]),
        f"{name}.attention.head_count": ("U32", config["num_attention_heads"]),
        f"{name}.attention.head_count_kv": ("U32", config["num_key_value_heads"]),
        f"{name}.attention.key_length": ("U32", head_dim),
        f"{name}.attention.value_length": ("U32", head_dim),
        f"{name}.attention.layer_norm_rms_epsilon": ("F32", config["rms_norm_eps"]),
        f"{name}.rope.dimension_count": ("U32", head_dim),
        f"{name}.rope.freq_base": ("F32", rope.get("rope_theta", 10000.0)),
        f"{name}.vocab_size": ("U32", config["vocab_size"]),
        **(of_experts if experts and name not in ("gemma3", "qwen2", "qwen3") else {}),
    }


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: str, value: Any) -> bytes:
    """kind: of the value, or of the items of a list."""
    if kind == "ARRAY":
        content = struct.pack("<IQ", HEADER_TYPES["STRING"], len(value)) + b"".join(map(text, value))
    elif isinstance(value, list):
        content = struct.pack(f"<IQ{len(value)}{SCALARS[kind]}", HEADER_TYPES[kind], len(value), *value)
        kind = "ARRAY"
    else:
        content = text(value) if kind == "STRING" else struct.pack(f"<{SCALARS[kind]}", value)
    return text(key) + struct.pack("<I", HEADER_TYPES[kind]) + content


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % ALIGNMENT)


class StoredTensor(NamedTuple):
    type_name: str
    shape: tuple[int, ...]
    data: bytes


def write_file(path: Path, entries: Mapping[str, tuple[str, Any]], tensors: Mapping[str, StoredTensor]) -> None:
    infos, data = b"", b""
    for name, tensor in tensors.items():
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        infos += text(name) + sizes + struct.pack("<IQ", TYPE_NUMBERS[tensor.type_name], len(data))
        data += padded(tensor.data)
    content = b"".join(entry(key, *value) for key, value in entries.items())
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + content + infos
    path.write_bytes(padded(start) + data)


TYPE_NUMBERS = {name: kind.number for name, kind in TYPES.items()} | {
    "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q2_K": 10, "Q3_K": 11, "IQ4_NL": 20, "IQ4_XS": 23, "IQ2_XXS": 16,
}  # fmt: skip


def type_of(stored_name: str, tensor: Tensor, kind: str) -> str:
    """The type that a file of this kind has for a tensor."""
    _, common, better = FILE_TYPES[kind]
    is_better = stored_name == "output.weight" or stored_name.endswith(("attn_v.weight", "ffn_down.weight"))
    chosen = better if is_better else common
    if kind == "MXFP4" and stored_name.endswith("_exps.weight"):
        return kind
    if tensor.ndim == 1 or stored_name.endswith((*ROUTERS, ".bias")):
        return "F32"
    return "Q8_0" if chosen in SIZES and tensor.shape[-1] % SIZES[chosen][0] else chosen


def store_model(source: Path, kind: str) -> tuple[dict[str, StoredTensor], dict[str, Tensor]]:
    """The tensors of a file, and the weights as a reader sees them, by dense name. `kind`: of FILE_TYPES."""
    config = json.loads((source / "config.json").read_text())
    is_gpt_oss, original = config["model_type"] == "gpt_oss", read_tensors(source)
    dense_tensors = split_gpt_oss(original) if is_gpt_oss else original
    groups: dict[str, dict[str, Place]] = {}
    for name in sorted(dense_tensors):
        place = place_of(config, name, dense_tensors[name].shape)
        groups.setdefault(place.name, {})[name] = place
    stored: dict[str, StoredTensor] = {}
    dense: dict[str, Tensor] = {}
    for stored_name, places in groups.items():
        tensors = [place.store(dense_tensors[name].float().contiguous()) for name, place in places.items()]
        type_name = type_of(stored_name, tensors[0], kind)
        all_blocks = [TYPES[type_name].quantise(tensor) for tensor in tensors]
        shape = (
            (len(tensors), *tensors[0].shape) if next(iter(places.values())).expert is not None else tensors[0].shape
        )
        data = b"".join(blocks.data.contiguous().numpy().tobytes() for blocks in all_blocks)
        stored[stored_name] = StoredTensor(type_name, tuple(shape), data)
        for (name, place), blocks in zip(places.items(), all_blocks, strict=True):
            dense[name] = place.load(blocks.weight).contiguous()
    return stored, join_gpt_oss(original, dense) if is_gpt_oss else dense


def fuse_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Gate and up of each expert in one tensor, as an option of llama.cpp's converter stores them."""
    fused = dict(stored)
    for name in [name for name in stored if "ffn_gate_exps" in name]:
        gate, up = fused.pop(name), fused.pop(name.replace("gate", "up"))
        experts, size = gate.shape[0], len(gate.data) // gate.shape[0]
        both = ((gate.data[n * size : (n + 1) * size], up.data[n * size : (n + 1) * size]) for n in range(experts))
        shape = (experts, 2 * gate.shape[1], *gate.shape[2:])
        data = b"".join(part for parts in both for part in parts)
        fused[name.replace("gate", "gate_up")] = StoredTensor(gate.type_name, shape, data)
    return fused


def write_gguf(
    source: Path, folder: Path, kind: str, parts: int = 1, is_fused: bool = False,
    extra: Mapping[str, tuple[str, Any]] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Write FILE, or parts of it, and config.json into a new folder. Returns the weights as a reader sees them.

    extra: entries of the metadata that replace others.
    """
    config = json.loads((source / "config.json").read_text())
    stored, dense = store_model(source, kind)
    stored = fuse_experts(stored) if is_fused else stored
    entries = {**metadata(config, FILE_TYPES[kind][0]), **(extra or {})}
    folder.mkdir(parents=True)
    shutil.copy(source / "config.json", folder)
    names, size = [*stored], -(-len(stored) // parts)
    for number in range(parts):
        path = folder / (FILE if parts == 1 else f"model-{number + 1:05}-of-{parts:05}.gguf")
        split = {} if parts == 1 else {"split.no": ("U32", number), "split.count": ("U32", parts)}
        piece = {name: stored[name] for name in names[number * size : (number + 1) * size]}
        write_file(path, {**(entries if number == 0 else {}), **split}, piece)
    return dense
