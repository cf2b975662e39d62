"""What a model is made of, as far as deploying it needs: plain facts, no torch.

`models/probe.py` finds them by running the model on fake tensors; `plan.py` reads them. Keeping the record here lets
a test plan for any model on any machine, and lets a plan be explained without loading a weight.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionFacts:
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
    def kv_values_per_token(self) -> int:
        return self.kv_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True)
class Architecture:
    """A causal LM: `context` in tokens, `parameters` counted once when tied, `dtype` the checkpoint's own.

    `rope_limit` is the length beyond which its rotary factors depend on the longest sequence of a batch (longrope), so
    that neighbours would change one another's answers; 0 where there is none. `siblings` are groups of linear layers
    that read the same input: their weights can be one matrix.
    """

    model_type: str
    class_name: str
    parameters: int
    context: int
    vocab_size: int
    dtype: str
    attentions: tuple[AttentionFacts, ...]
    rope_limit: int = 0
    activation_values: int = 0  # numbers per token that a layer holds at its widest, estimated from its linear layers
    siblings: tuple[tuple[str, ...], ...] = ()  # module paths: (layers.0.q_proj, layers.0.k_proj, layers.0.v_proj)

    @property
    def kv_values_per_token(self) -> int:
        """K and V numbers that one token adds over all layers."""
        return sum(attention.kv_values_per_token for attention in self.attentions)
