"""The mechanism of short convolutions, as in LFM2: a depthwise causal convolution between two products with gates."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from tcdeploy.kernels.attention.metadata import AttentionMetadata
from tcdeploy.kernels.state.causal_conv import causal_conv
from tcdeploy.kernels.state.mechanism import Mechanism
from tcdeploy.kernels.state.sequences import sequences_of
from tcdeploy.planning.architecture import StateTensor

ATTRIBUTES = ("conv_kernel_size", "bias", "conv", "in_proj", "out_proj")


class ShortConvMechanism(Mechanism):
    name: ClassVar[str] = "short_conv"
    layer_types: ClassVar[frozenset[str]] = frozenset({"conv"})

    def claims(self, module: nn.Module) -> bool:
        return type(module).__name__.endswith("ShortConv") and all(hasattr(module, name) for name in ATTRIBUTES)

    def state(self, module: Any) -> tuple[StateTensor, ...]:
        return (StateTensor("conv", (module.conv.kernel_size[0] - 1, module.conv.in_channels), ""),)

    def forward(
        self, module: Any, state: tuple[Tensor, ...], metadata: AttentionMetadata, hidden_states: Tensor, **_: Any
    ) -> Tensor:
        """hidden_states [1, tokens, hidden] -> the same."""
        before, after, x = module.in_proj(hidden_states)[0].chunk(3, dim=-1)
        weight = module.conv.weight.squeeze(1)
        out = causal_conv(before * x, *state, weight, module.conv.bias, "", *sequences_of(metadata))
        projected: Tensor = module.out_proj((after * out)[None])
        return projected
