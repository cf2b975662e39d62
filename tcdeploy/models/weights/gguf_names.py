"""The names of tensors in GGUF files, and the names that transformers gives the same tensors.

A file names its architecture. All architectures use the same names for the same parts: `blk.3.attn_q.weight` is
`model.layers.3.self_attn.q_proj.weight`. The experts of a layer are stacked in one tensor [experts, rows, columns],
even if transformers loads them one by one. Their names therefore end as in GGUF:
`model.layers.3.mlp.experts.gate_exps`.

Tensors with an unknown name keep it, and are refused because of it (formats/gguf_config.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tcdeploy.errors import ModelError
from tcdeploy.models.weights.gguf_file import DAMAGED_HINT, GgufTensor, read_gguf

ARCHITECTURE_KEY = "general.architecture"
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
OUTSIDE_OF_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight", "output.bias": "lm_head.bias",
}  # fmt: skip
ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
DENSE_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
DENSE = {**ATTENTION, **DENSE_MLP, "ffn_norm": "post_attention_layernorm"}
QWEN_MOE = {
    **DENSE, "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
FOUR_NORMS = {
    **ATTENTION, **DENSE_MLP, "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
STACKED = {"ffn_gate_exps": "gate_exps", "ffn_up_exps": "up_exps", "ffn_down_exps": "down_exps",
           "ffn_gate_up_exps": "gate_up_exps"}  # fmt: skip


class Family(NamedTuple):
    """An architecture of GGUF.

    model_types: of config.json. layer: transformers' paths in a layer, by GGUF's name. experts: the path of the stacked
    experts in a layer. has_permuted_heads: the rows of q and k lie in another order (formats/gguf_weights.py).
    norm_offset: what GGUF adds to the weights of norms. has_interleaved_experts: the model has gate and up in turns.
    """

    model_types: tuple[str, ...]
    layer: Mapping[str, str]
    experts: str = "mlp.experts"
    has_permuted_heads: bool = False
    norm_offset: float = 0.0
    has_interleaved_experts: bool = False


FAMILIES = {
    "llama": Family(
        ("llama", "mistral", "mixtral"), {**DENSE, "ffn_gate_inp": "block_sparse_moe.gate"},
        "block_sparse_moe.experts", has_permuted_heads=True,
    ),
    "qwen2": Family(("qwen2",), DENSE), "qwen3": Family(("qwen3",), DENSE),
    "qwen2moe": Family(("qwen2_moe",), QWEN_MOE), "qwen3moe": Family(("qwen3_moe",), QWEN_MOE),
    "gemma": Family(("gemma",), DENSE, norm_offset=1.0), "gemma2": Family(("gemma2",), FOUR_NORMS, norm_offset=1.0),
    "gemma3": Family(("gemma3_text",), FOUR_NORMS, norm_offset=1.0),
    "phi3": Family(
        ("phi3",), {**DENSE, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "gpt-oss": Family(
        ("gpt_oss",),
        {**ATTENTION, "attn_sinks": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm",
         "ffn_gate_inp": "mlp.router"},
        has_interleaved_experts=True,
    ),
}  # fmt: skip


def named_tensors(paths: Sequence[Path]) -> Iterator[tuple[Path, str, GgufTensor]]:
    """The tensors of all files of a model, with transformers' names.

    Raises ModelError for a tensor that is in two files, and as `read_gguf`.
    """
    family = FAMILIES.get(str(read_gguf(paths[0]).metadata.get(ARCHITECTURE_KEY)))
    files: dict[str, Path] = {}
    for path in paths:
        for tensor in read_gguf(path).tensors:
            if tensor.name in files:
                message = f"the tensor {tensor.name} is in two files: {files[tensor.name]}, {path}"
                raise ModelError(message, DAMAGED_HINT)
            files[tensor.name] = path
            yield path, _name(tensor.name, family) if family else tensor.name, tensor


def is_known(name: str) -> bool:
    """Whether `named_tensors` has translated the name."""
    return name.startswith(("model.", "lm_head."))


def _name(name: str, family: Family) -> str:
    match = LAYER.fullmatch(name)
    if match is None:
        return OUTSIDE_OF_LAYERS.get(name, name)
    number, part, suffix = match.groups()
    layer = f"model.layers.{number}"
    if part in STACKED:
        return f"{layer}.{family.experts}.{STACKED[part]}{'_bias' if suffix == 'bias' else ''}"
    if part not in family.layer:
        return name
    path = family.layer[part]
    return f"{layer}.{path}" if path.endswith("sinks") else f"{layer}.{path}.{suffix}"
