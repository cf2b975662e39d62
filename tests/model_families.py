"""Small random models of many families, for tests of regions, parity and unsupported models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tcdeploy.planning.architecture import Architecture

LAYERS = 4
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {**_SIZES, "head_dim": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = 16

SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen2": _SIZES,
    "qwen3": _HEADS,
    "mistral": {**_SIZES, "sliding_window": WINDOW},
    "gemma2": {**_HEADS, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**_HEADS, "sliding_window": WINDOW, "num_hidden_layers": 7},
    "phi3": {**_SIZES, "sliding_window": WINDOW},
    "gpt_oss": {**_HEADS, **_EXPERTS, "sliding_window": WINDOW},
    "mixtral": {**_SIZES, **_EXPERTS},
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 512,
             "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip
LAYER_KINDS = {"gemma2": 2, "gemma3_text": 2, "gpt_oss": 2}  # kinds of decoder layers; 1 for other families

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2}, "linear_attention"),
    "bloom": ({"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "never calls"),
    "falcon": (
        {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        "never calls",
    ),
    "doge": (
        {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "does not look its attention up",
    ),
    "llama4_text": ({**_HEADS, "num_local_experts": 2, "attention_chunk_size": 64}, "chunked_attention"),
    "qwen3_next": ({**_HEADS, "num_experts": 8, "num_experts_per_tok": 2}, "linear_attention"),
}  # fmt: skip


SHAPE_ONLY: dict[str, dict[str, Any]] = {  # supported; used for their architecture only
    "cohere": _SIZES,
    "qwen2_moe": {
        **_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip


def save_config(family: str, folder: Path, **changes: Any) -> str:
    """Save the family's small config to `folder`, without weights: use it with load_format dummy."""
    from transformers import AutoConfig

    sizes = {**SUPPORTED, **SHAPE_ONLY, **{name: config for name, (config, _) in UNSUPPORTED.items()}}[family]
    AutoConfig.for_model(family, **{**sizes, **changes}).save_pretrained(folder)
    return str(folder)


def probe(config: PreTrainedConfig) -> Architecture:
    """The Architecture of the model. Raises UnsupportedModelError with the reason."""
    from tcdeploy.models.probe import probe_model

    return probe_model(config).architecture
