"""config.json of a GGUF model, from the metadata of its file.

What the metadata lacks is a constant of the architecture, as in llama.cpp: whether the router normalises the weights of
experts, and the scale of attention in Gemma. Llama 3's rotary scaling is stored as a tensor of divisors. Its parameters
are those of the models of Meta, and formats/gguf_config.py compares the divisors that follow from them with the tensor.
Features that would be lost are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tcdeploy.errors import ModelError, UnsupportedModelError
from tcdeploy.models.weights.gguf_file import GgufTensor, read_f32_tensor
from tcdeploy.models.weights.gguf_names import ARCHITECTURE_KEY, FAMILIES

HINT = "put config.json and the tokenizer's files of the model that it was converted from beside the file"
# Keys of the metadata, after the name of the architecture, and the same in config.json
COMPARED = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}  # fmt: skip
KEYS = {
    **COMPARED, "context_length": "max_position_embeddings", "feed_forward_length": "intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window", "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
REQUIRED = {
    "block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon", "context_length",
}  # fmt: skip
REQUIRED_OF = {
    **dict.fromkeys(("llama", "qwen2", "phi3"), {"feed_forward_length"}),
    **dict.fromkeys(("qwen3", "gemma"), {"feed_forward_length", "attention.key_length"}),
    "gemma2": {"feed_forward_length", "attention.key_length", "attention.sliding_window", "attn_logit_softcapping",
               "final_logit_softcapping"},
    "gemma3": {"feed_forward_length", "attention.key_length", "attention.sliding_window"},
    "qwen2moe": {"expert_feed_forward_length", "expert_shared_feed_forward_length"},
    "qwen3moe": {"attention.key_length", "expert_feed_forward_length"},
    "gpt-oss": {"attention.key_length", "attention.sliding_window", "expert_feed_forward_length"},
}  # fmt: skip
REQUIRED_OF_EXPERTS = {"expert_count", "expert_used_count"}
# Settings of an architecture that the metadata does not state
CONSTANTS: dict[str, dict[str, Any]] = {"qwen3moe": {"norm_topk_prob": True}}
WITH_ATTENTION_BIAS = {"llama", "qwen3", "qwen3moe", "gpt-oss"}  # whose config states whether there is one
# The number of layers of the 27B models. They divide queries by the root of hidden size / heads, others by that of the
# head's size.
SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}
LOCAL_ROPE_THETA = 10000.0  # of the layers of Gemma 3 with a window
DEFAULT_ROPE_THETA = 10000.0  # of llama.cpp
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
Tensors = Mapping[str, tuple[Path, GgufTensor]]  # each with its file
STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of a turn, of a tool call


def config_from_metadata(path: Path, metadata: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """config.json. Raises ModelError if a key is missing, and UnsupportedModelError.

    path: of the file with the metadata, the first of the model. tensors: of all its files, by name.
    """
    architecture = str(metadata.get(ARCHITECTURE_KEY))
    if architecture not in FAMILIES:
        message = f"{path} has the architecture {architecture}, which is not supported in GGUF"
        raise UnsupportedModelError(message, f"use safetensors files; supported in GGUF: {', '.join(FAMILIES)}")
    has_experts = "blk.0.ffn_gate_inp.weight" in tensors
    config = {**_numbers(path, architecture, metadata, has_experts), **CONSTANTS.get(architecture, {})}
    config["model_type"] = FAMILIES[architecture].model_types[0]
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path} has no tensor token_embd.weight", "download the file again")
    config["vocab_size"] = tensors["token_embd.weight"][1].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["dtype"] = "bfloat16"  # of almost all models; the file may store other types
    _adapt(config, architecture, has_experts)
    config["rope_parameters"] = _rope(path, architecture, metadata, config, tensors)
    if architecture in WITH_ATTENTION_BIAS:
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in STOP_KEYS]
    stop_ids = list(dict.fromkeys(number for number in ids if number is not None))
    config["eos_token_id"] = stop_ids[0] if len(stop_ids) == 1 else stop_ids or None
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    return config


def _numbers(path: Path, architecture: str, metadata: Mapping[str, Any], has_experts: bool) -> dict[str, Any]:
    """By their names in config.json. Raises ModelError if a required key is missing: the config class would fill in the
    default of its type.
    """
    required = REQUIRED | REQUIRED_OF[architecture] | (REQUIRED_OF_EXPERTS if has_experts else set())
    numbers: dict[str, Any] = {}
    for key, name in KEYS.items():
        full_key = f"{architecture}.{key}"
        value = _number(path, metadata, full_key)
        if not value and key in required:
            found = "no" if value is None else "0 as"
            raise ModelError(f"{path} has {found} {full_key} in its metadata", HINT)
        if value is not None:
            numbers[name] = value
    return numbers


def _number(path: Path, metadata: Mapping[str, Any], key: str) -> Any:
    """A number that is not negative; None if it is missing. Raises ModelError for another value.

    The file stores fractions in float32. They are rounded to the value in config.json: 1e-6 instead of 9.99999997e-7.
    """
    value = metadata.get(key)
    if isinstance(value, list):
        raise UnsupportedModelError(f"{path} has {key} for each layer, which is not supported", HINT)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ModelError(f"{path} has {key} = {value!r:.40}, which is not a possible number", HINT)
    return _rounded(value)


def _rounded(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _adapt(config: dict[str, Any], architecture: str, has_experts: bool) -> None:
    """Give values the names and forms that the config class of this architecture has."""
    if architecture == "llama":
        if has_experts:
            config |= {"model_type": "mixtral", "num_local_experts": config["num_experts"]}
        elif config.get("sliding_window"):
            config["model_type"] = "mistral"
    elif architecture == "gpt-oss":
        config |= {"num_local_experts": config["num_experts"], "intermediate_size": config["moe_intermediate_size"]}
    elif architecture == "phi3":
        config["sliding_window"] = config.get("sliding_window") or None
    elif architecture in SCALED_BY_HIDDEN_SIZE:
        heads_size = config["hidden_size"] // config["num_attention_heads"]
        is_scaled = config["num_hidden_layers"] == SCALED_BY_HIDDEN_SIZE[architecture]
        config["query_pre_attn_scalar"] = heads_size if is_scaled else config.get("head_dim", heads_size)


def _rope(
    path: Path, architecture: str, metadata: Mapping[str, Any], config: dict[str, Any], tensors: Tensors
) -> dict[str, Any]:  # fmt: skip
    """`rope_parameters`. Also sets the head's size, if only the number of rotated columns states it."""
    prefix = f"{architecture}.rope"
    rope: dict[str, Any] = {"rope_type": "default"}
    rope["rope_theta"] = float(_number(path, metadata, f"{prefix}.freq_base") or DEFAULT_ROPE_THETA)
    rotated = _number(path, metadata, f"{prefix}.dimension_count")
    if architecture == "llama" and rotated:
        config.setdefault("head_dim", rotated)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if rotated and rotated != head_dim:
        if architecture != "phi3":
            problem = f"{prefix}.dimension_count = {rotated}, but heads of {head_dim} columns"
            raise UnsupportedModelError(f"{path} has {problem}, which is not supported", HINT)
        rope["partial_rotary_factor"] = rotated / head_dim
    rope |= _scaling(path, prefix, metadata, tensors)
    if rope["rope_type"] == "longrope":
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if architecture != "gemma3":
        return rope
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE_THETA}}


def _scaling(path: Path, prefix: str, metadata: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    names = ("original_context_length", "factor")
    original, factor = (_number(path, metadata, f"{prefix}.scaling.{name}") for name in names)
    kind = metadata.get(f"{prefix}.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        divisors = read_f32_tensor(*tensors["rope_freqs.weight"])
        return {"rope_type": "llama3", "factor": _rounded(max(divisors)), **LLAMA3}
    if "rope_factors_long.weight" in tensors and original:
        lists = {f"{name}_factor": tensors[f"rope_factors_{name}.weight"] for name in ("long", "short")}
        values = {name: [*map(_rounded, read_f32_tensor(*tensor))] for name, tensor in lists.items()}
        return {"rope_type": "longrope", "original_max_position_embeddings": original, **values}
    if kind == "none":
        return {}
    if kind == "linear" and factor:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor and original:
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return yarn | ({"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} if "gpt-oss" in prefix else {})
    raise UnsupportedModelError(f"{path} has {prefix}.scaling.type = {kind}, which is not supported", HINT)
