"""The mechanism of Mamba-2 mixers, as in Bamba, Granite 4, Nemotron-H and Falcon-H1.

It calls the module's own projections and gated norm; the convolution and the recurrence are ops. Modules are recognised
by their attributes, as in gated_delta_net.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tcdeploy.kernels.attention.metadata import AttentionMetadata
from tcdeploy.kernels.state.causal_conv import causal_conv
from tcdeploy.kernels.state.mamba2 import mamba2
from tcdeploy.kernels.state.mechanism import Mechanism
from tcdeploy.kernels.state.sequences import sequences_of
from tcdeploy.planning.architecture import StateTensor

ATTRIBUTES = (
    "num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size", "conv_dim", "conv_kernel_size",
    "activation", "time_step_limit", "conv1d", "A_log", "dt_bias", "D", "norm", "in_proj", "out_proj",
)  # fmt: skip


class Mamba2Mechanism(Mechanism):
    name: ClassVar[str] = "mamba2"
    layer_types: ClassVar[frozenset[str]] = frozenset({"linear_attention", "hybrid"})

    def claims(self, module: nn.Module) -> bool:
        return all(hasattr(module, name) for name in ATTRIBUTES) and module.activation == "silu"

    def state(self, module: Any) -> tuple[StateTensor, ...]:
        return (
            StateTensor("conv", (module.conv_kernel_size - 1, module.conv_dim), ""),
            StateTensor("ssm", (module.num_heads, module.ssm_state_size, module.head_dim), "float32"),
        )

    def forward(
        self, module: Any, state: tuple[Tensor, ...], metadata: AttentionMetadata, hidden_states: Tensor, **_: Any
    ) -> Tensor:
        """hidden_states [1, tokens, hidden] -> the same."""
        conv, ssm = state
        gate, xbc, dt = _project(module, hidden_states).split(
            [module.intermediate_size, module.conv_dim, module.num_heads], dim=-1
        )
        sequences = sequences_of(metadata)
        weight = module.conv1d.weight.squeeze(1)
        xbc = causal_conv(xbc[0], conv, weight, module.conv1d.bias, module.activation, *sequences)
        min_dt, max_dt = map(_finite, module.time_step_limit)
        out = mamba2(xbc, dt[0], module.A_log, module.dt_bias, module.D, min_dt, max_dt, ssm, *sequences)
        projected: Tensor = module.out_proj(_gated(module, out.flatten(1)[None], gate).to(hidden_states.dtype))
        return projected


def _finite(limit: float) -> float:
    """The upper limit is usually infinity. torch cannot load a package in which an op has an infinite argument."""
    return min(float(limit), torch.finfo(torch.float32).max)


def _project(module: Any, hidden_states: Tensor) -> Tensor:
    """The input projection. Falcon-H1 scales its input and its result."""
    if not hasattr(module, "mup_vector"):
        projected: Tensor = module.in_proj(hidden_states)
        return projected
    scaled: Tensor = module.in_proj(hidden_states * module.ssm_in_multiplier) * module.mup_vector
    return scaled


def _gated(module: Any, out: Tensor, gate: Tensor) -> Tensor:
    """The gated norm. Falcon-H1 may have the gate only."""
    if not getattr(module, "mamba_rms_norm", True):
        return out * functional.silu(gate)
    normed: Tensor = module.norm(out, gate)
    return normed
