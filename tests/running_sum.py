"""A model with layers that keep a running sum of each sequence in a slot, beside layers with attention or with neither.

It exists in tests only, and uses the seam for state as a recurrent layer would: an op with a form for packed prompts,
one for decode rows and one for both, a mechanism, and modelling code that knows nothing of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tcdeploy.kernels.attention.metadata import AttentionMetadata
from tcdeploy.kernels.state.mechanism import Mechanism
from tcdeploy.kernels.state.mechanisms import MECHANISMS
from tcdeploy.planning.architecture import StateTensor

VOCAB_SIZE = 1000
SUM_LAYER, ATTENTION_LAYER, PLAIN_LAYER = "linear_attention", "full_attention", "moe"
HYBRID = (SUM_LAYER, ATTENTION_LAYER, PLAIN_LAYER, SUM_LAYER, ATTENTION_LAYER)
SUMS_ONLY = (SUM_LAYER, SUM_LAYER, SUM_LAYER)


@torch.library.custom_op("tcdeploy_test::running_sum_chunks", mutates_args=("state",))
def sum_chunks(x: Tensor, state: Tensor, starts: Tensor, seq_lens: Tensor, slots: Tensor) -> Tensor:
    """The sum over each token of x [tokens, dim] and those before it in its sequence, as float32.

    state [slots, dim] float32; starts [sequences + 1], seq_lens and slots [sequences] int32.
    """
    begins, ends = starts[:-1].long(), starts[1:].long()
    is_new = seq_lens == ends - begins  # not multiplied by 0: a slot may contain NaN
    initial = torch.where(is_new[:, None], 0.0, state[slots.long()]).double()
    sums = torch.cat([x.new_zeros(1, x.shape[1], dtype=torch.float64), x.double().cumsum(0)])
    tokens = torch.arange(x.shape[0], device=x.device)
    owner = torch.searchsorted(ends, tokens, right=True).clamp(max=len(slots) - 1)
    state[torch.where(seq_lens > 0, slots, 0).long()] = (sums[ends] - sums[begins] + initial).float()
    return (sums[1:] - sums[begins][owner] + initial[owner]).float()


@torch.library.custom_op("tcdeploy_test::running_sum_rows", mutates_args=("state",))
def sum_rows(x: Tensor, state: Tensor, seq_lens: Tensor, slots: Tensor) -> Tensor:
    """The same for decode rows, which have one token each: x [rows, dim]."""
    initial = torch.where((seq_lens == 1)[:, None], 0.0, state[slots.long()])
    out = initial + x.float()
    state[torch.where(seq_lens > 0, slots, 0).long()] = out
    return out


@torch.library.custom_op("tcdeploy_test::running_sum_mixed", mutates_args=("state",))
def sum_mixed(
    x: Tensor, state: Tensor, starts: Tensor, seq_lens: Tensor, slots: Tensor, row_seq_lens: Tensor, row_slots: Tensor
) -> Tensor:
    """The same for a step whose first starts[1] tokens are those of decode rows."""
    out = sum_chunks(x, state, starts, seq_lens, slots)
    count = min(len(row_slots), len(x))
    decodes = torch.arange(count, device=x.device) < starts[1]
    of_rows = sum_rows(x[:count], state, torch.where(decodes, row_seq_lens[:count], 0), row_slots[:count])
    out[:count] = torch.where(decodes[:, None], of_rows, out[:count])
    return out


@sum_chunks.register_fake
@sum_rows.register_fake
@sum_mixed.register_fake
def _(x: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


class RunningSumMechanism(Mechanism):
    name: ClassVar[str] = "running_sum"
    layer_types: ClassVar[frozenset[str]] = frozenset({SUM_LAYER})

    def claims(self, module: nn.Module) -> bool:
        return type(module) is RunningSum

    def state(self, module: nn.Module) -> tuple[StateTensor, ...]:
        dim: Any = module.value.out_features
        return (StateTensor("sums", (dim,), "float32"),)

    def forward(
        self, module: Any, state: tuple[Tensor, ...], metadata: AttentionMetadata, hidden_states: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        value, gate = module.value(hidden_states)[0], module.gate(hidden_states)[0]
        (sums,), (prefill, decode) = state, metadata
        if prefill is None:
            out = sum_rows(value, sums, decode.seq_lens, decode.slots)
        elif decode is None:
            out = sum_chunks(value, sums, prefill.cu_seqlens_q, prefill.seq_lens, prefill.slots)
        else:
            prompts = prefill.cu_seqlens_q, prefill.seq_lens, prefill.slots
            out = sum_mixed(value, sums, *prompts, decode.seq_lens, decode.slots)
        return module.combine(out, gate)[None], None


TEST_MECHANISMS = (RunningSumMechanism(),)


class RunningSumConfig(LlamaConfig):
    model_type = "tcdeploy_running_sum"
    layer_types: list[str] | None = None


class RunningSum(nn.Module):
    """The sum of a projection over all tokens so far, gated."""

    def __init__(self, config: RunningSumConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.value, self.gate = nn.Linear(size, 2 * size, bias=False), nn.Linear(size, 2 * size, bias=False)
        self.out = nn.Linear(2 * size, size, bias=False)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        sums = self.value(hidden_states).float().cumsum(dim=1)
        return self.combine(sums, self.gate(hidden_states)), None

    def combine(self, sums: Tensor, gate: Tensor) -> Tensor:
        return self.out((sums.sin() * gate.sigmoid()).to(gate.dtype))


class Plain(nn.Module):
    def __init__(self, config: RunningSumConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.linear(hidden_states).tanh(), None


class RunningSumForCausalLM(LlamaForCausalLM):
    config_class = RunningSumConfig

    def __init__(self, config: RunningSumConfig) -> None:
        super().__init__(config)
        for layer, layer_type in zip(self.model.layers, config.layer_types or (), strict=True):
            if layer_type != ATTENTION_LAYER:
                layer.self_attn = RunningSum(config) if layer_type == SUM_LAYER else Plain(config)
        self.post_init()


def register() -> None:
    """Make transformers and tcdeploy know the model. Several calls have the effect of one."""
    AutoConfig.register(RunningSumConfig.model_type, RunningSumConfig, exist_ok=True)
    AutoModelForCausalLM.register(RunningSumConfig, RunningSumForCausalLM, exist_ok=True)
    MECHANISMS.update({mechanism.name: mechanism for mechanism in TEST_MECHANISMS})


def unregister() -> None:
    """Make tcdeploy forget the mechanisms of the model."""
    for mechanism in TEST_MECHANISMS:
        MECHANISMS.pop(mechanism.name, None)


def make_config(layer_types: tuple[str, ...] = HYBRID, **fields: Any) -> RunningSumConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    }  # fmt: skip
    return RunningSumConfig(
        num_hidden_layers=len(layer_types), layer_types=list(layer_types), use_cache=False, **{**sizes, **fields}
    )


def save_model(folder: Path, layer_types: tuple[str, ...] = HYBRID) -> str:
    """Save the model with random weights. Returns the folder."""
    register()
    torch.manual_seed(46)
    RunningSumForCausalLM(make_config(layer_types)).eval().save_pretrained(folder)
    return str(folder)
