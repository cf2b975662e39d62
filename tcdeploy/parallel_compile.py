"""The copy of a model that a compile worker (compile_process.py) compiles.

It has few layers, random weights and few KV blocks, because a second copy of the weights may not fit on the GPU. Layers
of a kind share their programs, and the number of KV blocks is a symbol in them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from tcdeploy.compiler.regions import find_layers, layer_kinds
from tcdeploy.engine.check_prompts import CheckPrompts
from tcdeploy.models.load import config_to_dict
from tcdeploy.models.short_config import layers_to_keep, shorten_config
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.memory import DTYPE_BYTES
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class ShortCopy(NamedTuple):
    """The copy of a model that workers compile: its config.json, its layers, and the bytes of its weights."""

    config: dict[str, Any]
    num_layers: int
    weight_bytes: int


def make_short_copy(model: nn.Module, config: PreTrainedConfig, plan: Plan, architecture: Architecture) -> ShortCopy:
    """The copy of a model with the first layers that have all of its programs. `model` may have fake tensors.

    Raises ModelError if its config cannot be shortened.
    """
    layers = find_layers(model, architecture)
    kinds = layer_kinds(layers)
    count = len(kinds) if plan.region == "model" else layers_to_keep(kinds)
    values = config_to_dict(shorten_config(config, len(kinds), count))
    values.pop("quantization_config", None)  # dequantised weights run the programs of others
    if architecture.dtype:
        values["dtype"] = architecture.dtype
    removed = tuple(f"{layer.path}." for layer in layers[count:])
    parameters = [parameter for name, parameter in model.named_parameters() if not name.startswith(removed)]
    elements = sum(parameter.numel() for parameter in parameters)
    return ShortCopy(values, count, elements * DTYPE_BYTES[plan.weight_dtype])


def worker_recipe(recipe: Recipe, plan: Plan, prompts: CheckPrompts) -> Recipe:
    """The recipe of a worker: the plan's choices that programs depend on, random weights, and few KV blocks."""
    checked = max(map(prompts.blocks_needed, plan.buckets))
    blocks = max(checked, plan.decode_buckets[-1].size, -(-plan.prefill_buckets[-1].size // plan.block_size)) + 1
    return dataclasses.replace(
        recipe,
        revision=None,
        load_format="dummy",
        generation_config="none",
        device=plan.device,
        graphs=plan.graphs,
        shapes="dynamic" if plan.prefill_buckets[0].min_size else "bucket",
        buckets=tuple(bucket.size for bucket in plan.prefill_buckets),
        batch_sizes=tuple(bucket.size for bucket in plan.decode_buckets),
        context=None,  # of the config, and at most what the blocks hold
        block_size=plan.block_size,
        kv_blocks=min(blocks, plan.kv_blocks),
        mixed_steps="on" if plan.mixed_steps else "off",
        cache_dir=plan.cache_dir,
    )
