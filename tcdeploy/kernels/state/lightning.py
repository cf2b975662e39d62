"""The mechanism of lightning attention, as in MiniMax-01: linear attention with a fixed decay for each head.

Lightning attention is the recurrence of Mamba-2 with a time step of 1 and without the term d * v, so the op `mamba2`
computes it. The mechanism calls the module's own projections, norm and gate. Modules are recognised by their
attributes, as in gated_delta_net.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tcdeploy.kernels.attention.metadata import AttentionMetadata
from tcdeploy.kernels.state.mamba2 import mamba2
from tcdeploy.kernels.state.mechanism import Mechanism
from tcdeploy.kernels.state.sequences import sequences_of
from tcdeploy.planning.architecture import StateTensor

ATTRIBUTES = (
    "num_attention_heads", "head_dim", "act_fn", "norm", "qkv_proj", "out_proj", "output_gate", "slope_rate",
    "query_decay", "key_decay", "diagonal_decay",
)  # fmt: skip
TIME_STEP = 1.0


class LightningMechanism(Mechanism):
    name: ClassVar[str] = "lightning"
    layer_types: ClassVar[frozenset[str]] = frozenset({"linear_attention"})

    def claims(self, module: nn.Module) -> bool:
        return all(hasattr(module, name) for name in ATTRIBUTES)

    def state(self, module: Any) -> tuple[StateTensor, ...]:
        return (StateTensor("kv", (module.num_attention_heads, module.head_dim, module.head_dim), "float32"),)

    def forward(
        self, module: Any, state: tuple[Tensor, ...], metadata: AttentionMetadata, hidden_states: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, tokens, hidden] -> (the same, None)."""
        (kv,), heads = state, module.num_attention_heads
        qkv = module.act_fn(module.qkv_proj(hidden_states))[0].unflatten(-1, (heads, 3, -1))
        vkq = qkv.flip(2).transpose(1, 2).flatten(1)  # [tokens, 3 * heads * head_dim]
        zeros = vkq.new_zeros(heads)
        a_log, dt = module.slope_rate.float().flatten().log(), zeros.expand(len(vkq), heads)
        out = mamba2(vkq, dt, a_log, zeros, zeros, TIME_STEP, TIME_STEP, kv, *sequences_of(metadata))
        gate = torch.sigmoid(module.output_gate(hidden_states))
        return module.out_proj(gate * module.norm(out.flatten(1)[None])), None
