"""Finds the modules to compile by structure: the decoder layers, their attention blocks and MLPs, and the head modules.

The probe has found the modules that call attention, or keep state in another way. A decoder layer is the nearest
ancestor of such a module that is an item of a ModuleList. Its attention block is the child that holds the module; every
other child with a matrix belongs to the MLP (norms hold vectors).

Layers of equal `LayerKind` are expected to have equal programs. Compile workers keep the first layers that have all
kinds. The trace decides in the end: torch's guards with jit programs, and export.py with packages.

Regions of one kind share one program, unless a constant differs; `explain` reports it. The kind of a layer is
`layer/N`, and that of an attention block is its name in the layer and N (`self_attn/0`), where N numbers the structures
of layers, such as with and without a sliding window. The kind of an MLP block is its name in the layer (`mlp`), and
that of a head module its path (`model.norm`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from tcdeploy.models.attention_calls import decoder_layer_position
from tcdeploy.planning.architecture import Architecture, LayerState


@dataclass(frozen=True)
class Region:
    """A module that is compiled on its own. `is_last`: the region whose output may be reduced to the sampled rows."""

    kind: str
    module: nn.Module
    is_head: bool = False  # runs before or after the layers; compiled in decode only
    is_last: bool = False


class LayerKind(NamedTuple):
    """What the program of a layer depends on, as far as its modules say: equal kinds have equal programs."""

    structure: Hashable  # its LayerStates, and its modules and tensors by name
    constants: Hashable  # attributes that programs may depend on: not those that count the layers (`layer_idx`)


@dataclass(frozen=True)
class DecoderLayer:
    path: str
    module: nn.Module
    states: tuple[LayerState, ...]  # usually one
    attention: tuple[nn.Module, ...]  # the block of each state: attention, or what the layer has in its place
    mlp: tuple[nn.Module, ...]  # one module, or the bare matrices of a layer without an MLP module
    kind: LayerKind


def layer_kinds(layers: Sequence[nn.Module], states: Sequence[tuple[LayerState, ...]]) -> list[LayerKind]:
    """The kind of each layer of a model."""
    numbers = _layer_numbers(layers)

    def kind_of(layer: nn.Module, states: tuple[LayerState, ...]) -> LayerKind:
        kept = tuple(dataclasses.replace(state, path="") for state in states)
        modules = tuple((path, type(child)) for path, child in layer.named_modules())
        named = (*layer.named_parameters(), *layer.named_buffers())
        tensors = tuple((name, tensor.shape, tensor.dtype) for name, tensor in named)
        constants = frozenset(item for item in _constants(layer).items() if item[0] not in numbers)
        return LayerKind((kept, modules, tensors), constants)

    return list(map(kind_of, layers, states))


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
    states: dict[str, tuple[LayerState, ...]] = {}  # by path of the layer
    for state in architecture.layer_states:
        path = "{}.{}".format(*decoder_layer_position(model, state.path))
        states[path] = (*states.get(path, ()), state)
    kinds = layer_kinds([model.get_submodule(path) for path in states], list(states.values()))
    return [_find_layer(model, path, states[path], kind) for path, kind in zip(states, kinds, strict=True)]


def _find_layer(model: nn.Module, path: str, states: tuple[LayerState, ...], kind: LayerKind) -> DecoderLayer:
    layer = model.get_submodule(path)
    block_names = [state.path.removeprefix(path + ".").split(".")[0] for state in states]
    others = [child for name, child in layer.named_children() if name not in block_names]
    mlp = tuple(child for child in others if any(parameter.ndim >= 2 for parameter in child.parameters()))
    return DecoderLayer(path, layer, states, tuple(map(layer.get_submodule, block_names)), mlp, kind)


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
    structures = list(dict.fromkeys(layer.kind.structure for layer in layers))
    regions: list[Region] = []
    for layer in layers:
        number = structures.index(layer.kind.structure)
        regions += [Region(f"layer/{number}", layer.module)] if region == "layer" else _blocks(layer, number)
    return [*regions[:-1], dataclasses.replace(regions[-1], is_last=True)]


def _blocks(layer: DecoderLayer, number: int) -> list[Region]:
    names = {child: name for name, child in layer.module.named_children()}
    attention = [Region(f"{names[module]}/{number}", module) for module in layer.attention]
    return [*attention, *(Region(names[module], module) for module in layer.mlp)]
