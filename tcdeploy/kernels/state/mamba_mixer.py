"""The mechanism of Mamba-1 mixers, as in Mamba, Falcon Mamba, Jamba and Zamba.

It calls the module's own projections and norms; the convolution and the scan are ops. Modules are recognised by their
attributes, as in gated_delta_net.py. In Zamba, channels are divided into heads, and each head has its own projections
to dt, B and C.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tcdeploy.kernels.attention.metadata import AttentionMetadata
from tcdeploy.kernels.state.causal_conv import causal_conv
from tcdeploy.kernels.state.mechanism import Mechanism
from tcdeploy.kernels.state.selective_scan import selective_scan
from tcdeploy.kernels.state.sequences import sequences_of
from tcdeploy.planning.architecture import StateTensor

ATTRIBUTES = (
    "ssm_state_size", "intermediate_size", "conv_kernel_size", "time_step_rank", "activation", "conv1d", "in_proj",
    "out_proj", "A_log", "D",
)  # fmt: skip
LINEAR = ("x_proj", "dt_proj")  # projections to dt, B and C
BY_HEAD = ("x_proj_weight", "dt_proj_weight", "dt_proj_bias")  # the same per head, in Zamba
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")  # Falcon Mamba and Jamba


class MambaMechanism(Mechanism):
    name: ClassVar[str] = "mamba"
    layer_types: ClassVar[frozenset[str]] = frozenset({"linear_attention", "hybrid"})

    def claims(self, module: nn.Module) -> bool:
        variants = (LINEAR, BY_HEAD)
        has_all = any(all(hasattr(module, name) for name in (*ATTRIBUTES, *variant)) for variant in variants)
        return has_all and module.activation == "silu"

    def state(self, module: Any) -> tuple[StateTensor, ...]:
        channels = module.intermediate_size
        return (
            StateTensor("conv", (module.conv_kernel_size - 1, channels), ""),
            StateTensor("ssm", (channels, module.ssm_state_size), "float32"),
        )

    def forward(
        self, module: Any, state: tuple[Tensor, ...], metadata: AttentionMetadata, hidden_states: Tensor, **_: Any
    ) -> Tensor:
        """hidden_states [1, tokens, hidden] -> [1, tokens, hidden]."""
        conv, ssm = state
        sequences, by_head = sequences_of(metadata), hasattr(module, BY_HEAD[0])
        projected = module.in_proj(hidden_states)[0]
        x, gate = projected.unflatten(1, (-1, 2)).unbind(-1) if by_head else projected.chunk(2, dim=-1)
        weight = module.conv1d.weight.squeeze(1)
        x = causal_conv(x.contiguous(), conv, weight, module.conv1d.bias, module.activation, *sequences)
        dt, b, c = (_project_by_head if by_head else _project)(module, x)
        a_log, d = module.A_log.view(-1, module.ssm_state_size), module.D.flatten()
        out = selective_scan(x, dt, b, c, a_log, d, ssm, *sequences)
        gated: Tensor = module.out_proj((out * functional.silu(gate))[None])
        return gated


def _sizes(module: Any) -> list[int]:
    return [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]


def _project(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dt [tokens, channels], B and C [tokens, state_size] of x [tokens, channels]."""
    parts = module.x_proj(x).split(_sizes(module), dim=-1)
    dt, b, c = (
        getattr(module, name)(part) if hasattr(module, name) else part for name, part in zip(NORMS, parts, strict=True)
    )
    return module.dt_proj(dt), b, c


def _project_by_head(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_project`, with B and C [tokens, heads * state_size]."""
    heads = len(module.x_proj_weight)
    parts = torch.einsum("thc,hkc->thk", x.unflatten(1, (heads, -1)), module.x_proj_weight)
    dt, b, c = parts.split(_sizes(module), dim=-1)
    dt = torch.einsum("thr,hcr->thc", dt, module.dt_proj_weight) + module.dt_proj_bias
    return dt.flatten(1), b.flatten(1), c.flatten(1)
