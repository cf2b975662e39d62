"""Finds the modules to compile by structure: the decoder layers, their attention blocks and MLPs, and the head modules.

The probe has found the modules that call attention. A decoder layer is the nearest ancestor of such a module that is an
item of a ModuleList. Its attention block is the child that holds the module; every other child with a matrix belongs to
the MLP (norms hold vectors).

Regions of one kind are called alike, and normally share one program; `explain` reports what keeps them from it.
`layer_kinds` predicts which layers do, from their modules and constants, so that compile workers can keep few layers;
export.py finds out, from the graphs. The kind of a layer is `layer/N`, that of an attention block is its name in the
layer and N (`self_attn/0`), where N numbers the different attentions of the model, such as with and without a sliding
window. The kind of an MLP block is its name in the layer (`mlp`), and that of a head module its path (`model.norm`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import nn

from tcdeploy.models.attention_calls import decoder_layer_position
from tcdeploy.planning.architecture import Architecture, AttentionSpec


@dataclass(frozen=True)
class Region:
    """A module that is compiled on its own. `is_last`: the region whose output may be reduced to the sampled rows."""

    kind: str
    module: nn.Module
    is_head: bool = False  # runs before or after the layers; compiled in decode only
    is_last: bool = False


@dataclass(frozen=True)
class DecoderLayer:
    path: str
    module: nn.Module
    attention: nn.Module
    mlp: tuple[nn.Module, ...]  # one module, or the bare matrices of a layer without an MLP module
    attention_kind: int  # equal for layers that attend alike


def layer_kinds(layers: list[DecoderLayer]) -> list[Hashable]:
    """Equal for layers with equal programs: they attend alike, and have modules, tensors and constants alike."""

    def kind_of(layer: DecoderLayer, constants: Hashable) -> Hashable:
        modules = tuple((path, type(child)) for path, child in layer.module.named_modules())
        named = (*layer.module.named_parameters(), *layer.module.named_buffers())
        tensors = tuple((name, tensor.shape, tensor.dtype) for name, tensor in named)
        return layer.attention_kind, modules, tensors, constants

    return list(map(kind_of, layers, layer_constants([layer.module for layer in layers])))


def layer_constants(layers: Sequence[nn.Module]) -> list[frozenset[tuple[tuple[str, str], object]]]:
    """The constants of each layer that programs may depend on: not those that count the layers (`layer_idx`)."""
    numbers = _layer_numbers(layers)
    return [frozenset(item for item in _constants(layer).items() if item[0] not in numbers) for layer in layers]


def _constants(layer: nn.Module) -> dict[tuple[str, str], object]:
    """Attributes that programs may depend on, by the path of their module and their name."""
    return {
        (path, name): value
        for path, child in layer.named_modules()
        for name, value in vars(child).items()
        if isinstance(value, bool | int | float | str)
    }


def _layer_numbers(layers: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """The constants that count the layers (`layer_idx`), on which programs do not depend."""
    offsets: dict[tuple[str, str], set[int | None]] = {}
    for index, layer in enumerate(layers):
        for key, value in _constants(layer).items():
            offset = value - index if isinstance(value, int) and not isinstance(value, bool) else None
            offsets.setdefault(key, set()).add(offset)
    return {key for key, values in offsets.items() if len(values) == 1 and None not in values}


def find_layers(model: nn.Module, architecture: Architecture) -> list[DecoderLayer]:
    """The decoder layers of `model`, in order."""
    specs = [dataclasses.replace(spec, path="") for spec in architecture.attention_layers]
    kinds = list(dict.fromkeys(specs))
    return [
        _find_layer(model, attention, kinds.index(spec))
        for attention, spec in zip(architecture.attention_layers, specs, strict=True)
    ]


def _find_layer(model: nn.Module, spec: AttentionSpec, attention_kind: int) -> DecoderLayer:
    stack, index = decoder_layer_position(model, spec.path)
    path = f"{stack}.{index}"
    layer = model.get_submodule(path)
    block_name = spec.path.removeprefix(path + ".").split(".")[0]
    others = [child for name, child in layer.named_children() if name != block_name]
    mlp = tuple(child for child in others if any(parameter.ndim >= 2 for parameter in child.parameters()))
    return DecoderLayer(path, layer, layer.get_submodule(block_name), mlp, attention_kind)


def find_head_modules(model: nn.Module, layers: list[DecoderLayer]) -> list[Region]:
    """The modules that run before and after the layers and are worth compiling: final norm, rotary embedding, LM head.

    These are the modules beside the stack of layers, at every level above it, except embeddings, which are one kernel.
    models/convert/static_rope.py has removed the data-dependent branch of rotary embeddings.
    """
    path = layers[0].path.rpartition(".")[0].split(".")
    regions: list[Region] = []
    for level in range(len(path)):
        parent_path = ".".join(path[:level])
        for name, child in model.get_submodule(parent_path).named_children():
            if name != path[level] and not isinstance(child, nn.Embedding | nn.Dropout):
                regions.append(Region(f"{parent_path}.{name}".removeprefix("."), child, is_head=True))
    return regions


def regions_to_compile(layers: list[DecoderLayer], region: str) -> list[Region]:
    """The regions of the layers for `--region layer` or `blocks`, in the order in which they run."""
    if region == "layer":
        regions = [Region(f"layer/{layer.attention_kind}", layer.module) for layer in layers]
    else:
        regions = [block for layer in layers for block in _blocks(layer)]
    return [*regions[:-1], dataclasses.replace(regions[-1], is_last=True)]


def _blocks(layer: DecoderLayer) -> list[Region]:
    names = {child: name for name, child in layer.module.named_children()}
    attention = Region(f"{names[layer.attention]}/{layer.attention_kind}", layer.attention)
    return [attention, *(Region(names[module], module) for module in layer.mlp)]
