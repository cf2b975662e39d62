"""What a model is made of, as far as deploying it needs: plain facts, no torch.

`models/probe.py` finds them by running the model on fake tensors; `plan.py` reads them. Keeping the record here lets
a test plan for any model on any machine, and lets a plan be explained without loading a weight.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Of transformers' config: names, places and token ids, which no program is made from; nor from what begins with "_".
IGNORED_CONFIG_KEYS = {
    "name_or_path", "architectures", "transformers_version", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "return_dict", "output_hidden_states",
    "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
}  # fmt: skip


@dataclass(frozen=True)
class AttentionSpec:
    """One attention block, as it calls the AttentionInterface. `window` counts keys (0: all); `softcap` 0: none."""

    path: str  # of the attention module inside the model: model.layers.0.self_attn
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int
    softcap: float
    has_sinks: bool

    @property
    def kv_elements_per_token(self) -> int:
        return self.kv_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True)
class Architecture:
    """A causal LM: `context` in tokens, `parameters` counted once when tied, `dtype` the checkpoint's own.

    `longrope_limit` is the length beyond which its rotary factors depend on the longest sequence of a batch (longrope), so
    that neighbours would change one another's answers; 0 where there is none. `packed_linears` are groups of linear layers
    that read the same input: their weights can be one matrix. `config_digest` stands for all that the config says.
    """

    model_type: str
    class_name: str
    parameters: int
    context: int
    vocab_size: int
    dtype: str
    attention_layers: tuple[AttentionSpec, ...]
    longrope_limit: int = 0
    peak_activation_elements: int = (
        0  # numbers per token that a layer holds at its widest, estimated from its linear layers
    )
    packed_linears: tuple[
        tuple[str, ...], ...
    ] = ()  # module paths: (layers.0.q_proj, layers.0.k_proj, layers.0.v_proj)
    config_digest: str = ""

    @property
    def kv_elements_per_token(self) -> int:
        """K and V numbers that one token adds over all layers."""
        return sum(attention.kv_elements_per_token for attention in self.attention_layers)


def is_config_factor(name: str) -> bool:
    """Whether programs may be made from this value of the config."""
    return name not in IGNORED_CONFIG_KEYS and not name.startswith("_")


def digest_config(values: Mapping[str, Any]) -> str:
    """sha256 of what programs may be made from in a model's config, as transformers writes it into JSON.

    Weights do not count, nor where they come from: a model and its fine-tunes have the same programs.
    """
    kept = {name: value for name, value in values.items() if is_config_factor(name)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
