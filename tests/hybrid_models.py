"""Small random models whose layers keep state in slots, by family, and the answers of transformers with them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 1000
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_DELTA_NET = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_expand": 2,
    "mamba_chunk_size": 64,  # only the reference reads it, and takes longer with larger chunks
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_SIZES, **_EXPERTS, **_DELTA_NET},
    "qwen3_5_text": {**_SIZES, **_DELTA_NET, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    }},
    "qwen3_5_moe_text": {**_SIZES, **_EXPERTS, **_DELTA_NET, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    }},
    "olmo_hybrid": {**_SIZES, **_DELTA_NET},
    "kimi_linear": {
        **_SIZES, "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3,
        "linear_num_heads": 4, "linear_head_dim": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "bamba": {**_SIZES, **_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [2]},
    "mamba2": {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16,
        "n_groups": 2, "state_size": 24, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    },
    "zamba2": {
        **_SIZES, "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8,
        "mamba_ngroups": 2, "mamba_d_state": 24, "num_key_value_heads": 4,
        "time_step_min": 1e-9,  # the decode steps of `generate` do not apply it
    },
    "granitemoehybrid": {
        **_SIZES, **_MAMBA, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "nemotron_h": {
        **_SIZES, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 5,
        "moe_shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
    },
    "falcon_h1": {
        **_SIZES, **_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128, "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
    },
    "mamba": {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 12, "time_step_rank": 6,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    },
    "falcon_mamba": {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 12, "time_step_rank": 6,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    },
    "jamba": {
        **_SIZES, "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "mamba_d_state": 12, "mamba_dt_rank": 6,
    },
    "zamba": {
        **_SIZES, "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 12,
        "mamba_dt_rank": 6, "num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
    },
    "minimax": {
        **_SIZES, "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "lfm2": {**_SIZES, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "conv_L_cache": 3,
             "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        **_SIZES, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "conv_L_cache": 3,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1,
    },
}  # fmt: skip


def save_model(family: str, folder: Path, **sizes: Any) -> str:
    """Save a model with random weights, whose state changes what it generates. Returns the folder."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **sizes})
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "norm" not in name:
            nn.init.normal_(parameter, std=0.15)
        elif parameter.ndim == 3:  # experts and convolutions
            nn.init.normal_(parameter, std=0.15 if "experts" in name else 0.5)
        elif name.endswith("A_log"):
            nn.init.uniform_(parameter, -4.0, 0.5)  # decays of 0.3 to 0.99 per token
    model.save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def answers(model: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Transformers' greedy continuation of each prompt alone."""
    return [list(answer) for answer in _answers(model, tuple(map(tuple, prompts)), tokens)]


def load_reference(model: str) -> Any:
    """Transformers' model in float32."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@functools.cache
def _answers(model: str, prompts: tuple[tuple[int, ...], ...], tokens: int) -> list[list[int]]:
    reference = load_reference(model)
    outputs = [
        reference.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        for prompt in prompts
    ]
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


def prompt_logprobs(model: str, prompt: list[int]) -> list[float]:
    """Transformers' log-probability of each token of the prompt but the first."""
    reference = load_reference(model)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    chosen: list[float] = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    return chosen
