"""The mechanism of Kimi Delta Attention (KDA), as in Kimi Linear: a gated delta rule with a decay for each channel.

It calls the module's own projections and gated norm; the convolution and the rule are ops. Modules are recognised by
their attributes, as in gated_delta_net.py. A module whose forget gate has a lower bound is not recognised, because it
computes another formula.
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
    "num_heads", "head_dim", "qkv_dim", "conv_dim", "conv_kernel_size", "activation", "q_proj", "k_proj", "v_proj",
    "conv1d", "forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj",
)  # fmt: skip
GATE_ATTRIBUTES = ("f_a_proj", "f_b_proj", "dt_bias", "A_log")


class KimiDeltaMechanism(Mechanism):
    name: ClassVar[str] = "kimi_delta"
    layer_types: ClassVar[frozenset[str]] = frozenset({"linear_attention"})

    def claims(self, module: nn.Module) -> bool:
        if not all(hasattr(module, name) for name in ATTRIBUTES) or module.activation != "silu":
            return False
        gate = module.forget_gate
        bounds = [value for name, value in vars(gate).items() if name.endswith("lower_bound")]
        return all(hasattr(gate, name) for name in GATE_ATTRIBUTES) and not any(bounds)

    def state(self, module: Any) -> tuple[StateTensor, ...]:
        return (
            StateTensor("conv", (module.conv_kernel_size - 1, module.conv_dim), ""),
            StateTensor("delta", (module.num_heads, module.head_dim, module.head_dim), "float32"),
        )

    def forward(
        self, module: Any, state: tuple[Tensor, ...], metadata: AttentionMetadata, hidden_states: Tensor, **_: Any
    ) -> Tensor:
        """hidden_states [1, tokens, hidden] -> the same."""
        conv, delta = state
        gate, sequences = module.forget_gate, sequences_of(metadata)
        qkv = torch.cat([project(hidden_states) for project in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        weight = module.conv1d.weight.squeeze(1)
        qkv = causal_conv(qkv[0], conv, weight, module.conv1d.bias, module.activation, *sequences)
        a, b = gate.f_b_proj(gate.f_a_proj(hidden_states)), module.b_proj(hidden_states)
        out = gated_delta(qkv, a[0], b[0], gate.A_log.flatten(), gate.dt_bias, delta, *sequences)
        z = module.g_b_proj(module.g_a_proj(hidden_states))
        normed = module.o_norm(out[None], z.unflatten(-1, (-1, module.head_dim)))
        projected: Tensor = module.o_proj(normed.flatten(2))
        return projected
