"""What planning needs to know about a model, as plain data that `models/probe.py` fills in. Does not import torch.

What a layer keeps between steps is one of three: K and V of each token in blocks (`AttentionSpec`), a few tensors of
each sequence in a slot (`SlotState`), or nothing (`NoState`). Memory, buffers and the inputs of programs follow from
it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# Keys of transformers' config that no program depends on: names, paths and token ids. Keys that start with "_" are
# ignored too.
LAYER_PATH = re.compile(r".*\.\d+(?=\.|$)")  # the beginning of a module path that names a decoder layer
IGNORED_CONFIG_KEYS = {
    "name_or_path", "architectures", "transformers_version", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "return_dict", "output_hidden_states",
    "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
}  # fmt: skip


@dataclass(frozen=True)
class AttentionSpec:
    """One attention block, as it calls the AttentionInterface."""

    path: str  # of the attention module inside the model, such as model.layers.0.self_attn
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int  # keys that a query can attend to; 0 for all
    softcap: float  # limit of the logits; 0 for none
    has_sinks: bool

    @property
    def kv_elements_per_token(self) -> int:
        return self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return ("k", "v")


@dataclass(frozen=True)
class StateTensor:
    """A tensor that a layer keeps for each sequence."""

    name: str
    shape: tuple[int, ...]  # of one sequence
    dtype: str  # a key of DTYPE_BYTES (planning/memory.py); "" for the compute dtype


@dataclass(frozen=True)
class SlotState:
    """State of fixed size per sequence, such as a running sum. Each sequence has a slot of its own."""

    path: str  # of the module that keeps it, such as model.layers.0.mixer
    mechanism: str  # how the module computes: its name in kernels/state/mechanisms.py
    tensors: tuple[StateTensor, ...]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)


@dataclass(frozen=True)
class NoState:
    """A layer that computes each token on its own."""

    path: str  # of a module inside the layer

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return ()


LayerState: TypeAlias = AttentionSpec | SlotState | NoState


@dataclass(frozen=True)
class Architecture:
    """A causal LM."""

    model_type: str
    class_name: str
    weight_bytes: Mapping[str, int]  # by model dtype, of all parameters and buffers; tied ones count once
    context: int  # longest sequence, in tokens; 0: the config has no limit, and no layer attends
    vocab_size: int
    dtype: str  # of the checkpoint; "" if neither the config nor the checkpoint states one
    layer_states: tuple[LayerState, ...]  # of all decoder layers, in order; one or more for each layer
    quantisation: str = ""  # method of the checkpoint
    schemes: Mapping[str, int] = field(default_factory=dict)  # linear layers whose weights stay quantised, by scheme
    fp8_inputs: bool = False  # the checkpoint, or --quantize fp8, asks for inputs of linear layers in FP8 too
    # Stacks of experts that stay quantised, by scheme. A layer has a stack for each projection, such as down_proj.
    expert_schemes: Mapping[str, int] = field(default_factory=dict)
    # Elements of the largest weight in a scheme, that of a packed group, of which a product may make a dense copy.
    largest_scheme_elements: int = 0
    is_multimodal: bool = False  # it also has parts for images, audio or video, which are not run
    # Longest sequence, in tokens, before longrope or dynamic rope changes the rotary frequencies of the whole batch, so
    # that sequences would affect each other's output; 0 for other models.
    rope_limit: int = 0
    peak_activation_elements: int = 0  # per token, that a layer holds at its widest, estimated from its linear layers
    packed_linears: tuple[tuple[str, ...], ...] = ()  # module paths of linear layers that one matrix can hold
    config_digest: str = ""  # as `digest_config` returns it

    @property
    def num_layers(self) -> int:
        """Decoder layers. The path of a state has the number of its layer as the last number."""
        return len({LAYER_PATH.match(state.path)[0] for state in self.layer_states})  # type: ignore[index]

    @property
    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """The layers that keep K and V."""
        return tuple(state for state in self.layer_states if isinstance(state, AttentionSpec))

    @property
    def slot_tensors(self) -> tuple[StateTensor, ...]:
        """What all layers together keep in the slot of a sequence."""
        return tuple(tensor for state in self.layer_states if isinstance(state, SlotState) for tensor in state.tensors)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token takes in all layers."""
        return sum(attention.kv_elements_per_token for attention in self.attention_layers)


def is_config_factor(name: str) -> bool:
    """Whether programs may depend on this key of the config."""
    return name not in IGNORED_CONFIG_KEYS and not name.startswith("_")


def digest_config(values: Mapping[str, Any]) -> str:
    """sha256 of the keys that programs may depend on, of a config as transformers writes it to JSON.

    Weights and their origin do not count: a model and its fine-tunes share programs.
    """
    factors = {name: value for name, value in values.items() if is_config_factor(name)}
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()
