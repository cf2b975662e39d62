"""The mechanism of gated delta nets, as in Qwen3-Next, Qwen3.5 and OLMo Hybrid.

Such a layer is a short convolution followed by the gated delta rule. In OLMo Hybrid, beta may be up to 2.

It calls the module's own projections and gated norm. The convolution and the rule are ops with the formulas of
transformers' modules, so a module is recognised by all attributes that these formulas use. A module that has the same
attributes but computes something else fails the parity check.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tcdeploy.kernels.attention.metadata import AttentionMetadata
from tcdeploy.kernels.state.causal_conv import causal_conv
from tcdeploy.kernels.state.gated_delta import gated_delta
from tcdeploy.kernels.state.mechanism import Mechanism
from tcdeploy.kernels.state.sequences import sequences_of
from tcdeploy.planning.architecture import StateTensor

ATTRIBUTES = (
    "num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim", "conv_dim", "conv_kernel_size",
    "activation", "conv1d", "A_log", "dt_bias",
)  # fmt: skip
JOINED = ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")  # Qwen3-Next
SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # Qwen3.5
OUTPUT = ("norm", "out_proj")  # Qwen3-Next and Qwen3.5
OLMO_HYBRID = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
OLMO_HYBRID_OUTPUT = ("o_norm", "o_proj")


class GatedDeltaNetMechanism(Mechanism):
    name: ClassVar[str] = "gated_delta_net"
    layer_types: ClassVar[frozenset[str]] = frozenset({"linear_attention"})

    def claims(self, module: nn.Module) -> bool:
        variants = ((*JOINED, *OUTPUT), (*SEPARATE, *OUTPUT), (*OLMO_HYBRID, *OLMO_HYBRID_OUTPUT, "allow_neg_eigval"))
        has_all = any(_has(module, (*ATTRIBUTES, *names)) for names in variants)
        return has_all and getattr(module, "activation", None) == "silu"

    def state(self, module: Any) -> tuple[StateTensor, ...]:
        return (
            StateTensor("conv", (module.conv_kernel_size - 1, module.conv_dim), ""),
            StateTensor("delta", (module.num_v_heads, module.head_k_dim, module.head_v_dim), "float32"),
        )

    def forward(
        self, module: Any, state: tuple[Tensor, ...], metadata: AttentionMetadata, hidden_states: Tensor, **_: Any
    ) -> Tensor:
        """hidden_states [1, tokens, hidden] -> the same."""
        conv, delta = state
        qkv, z, b, a = _project(module, hidden_states)
        sequences = sequences_of(metadata)
        weight = module.conv1d.weight.squeeze(1)
        qkv = causal_conv(qkv[0], conv, weight, module.conv1d.bias, module.activation, *sequences)
        max_beta = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
        out = gated_delta(qkv, a[0], b[0], module.A_log, module.dt_bias, delta, *sequences, max_beta=max_beta)
        names = OUTPUT if _has(module, OUTPUT) else OLMO_HYBRID_OUTPUT
        norm, project = (getattr(module, name) for name in names)
        normed = norm(out.flatten(0, 1), z.reshape(-1, module.head_v_dim))
        projected: Tensor = project(normed.view(1, -1, module.value_dim))
        return projected


def _has(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(hasattr(module, name) for name in names)


def _project(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(queries, keys and values [1, tokens, columns]; gate of the output; b and a [1, tokens, heads])."""
    if _has(module, OLMO_HYBRID):
        q, k, v, z, b, a = (getattr(module, name)(hidden_states) for name in OLMO_HYBRID)
        return torch.cat([q, k, v], dim=-1), z, b, a
    if not hasattr(module, JOINED[0]):
        return tuple(getattr(module, name)(hidden_states) for name in SEPARATE)  # type: ignore[return-value]
    joined = (module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states))
    *qkv, z, b, a = module.fix_query_key_value_ordering(*joined)
    return torch.cat([states.flatten(2) for states in qkv], dim=-1), z, b, a
