"""Find what to compile: the decoder layers, and in each its attention block and its MLP, by structure alone.

The probe knows which modules call attention. A decoder layer is the nearest ancestor that stands in a ModuleList; its
attention block is the child on the way down; its MLP is every other child that holds a matrix (norms hold vectors).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tcdeploy.models.probe import decoder_layer_position
from tcdeploy.planning.architecture import Architecture


@dataclass(frozen=True)
class DecoderLayer:
    path: str
    layer: nn.Module
    attention: nn.Module
    mlp: tuple[nn.Module, ...]  # one module, or the bare matrices where a layer holds them itself


def find_layers(model: nn.Module, architecture: Architecture) -> list[DecoderLayer]:
    return [_find_layer(model, spec.path) for spec in architecture.attention_layers]


def _find_layer(model: nn.Module, attention_path: str) -> DecoderLayer:
    stack, index = decoder_layer_position(model, attention_path)
    path = f"{stack}.{index}"
    layer = model.get_submodule(path)
    block_name = attention_path.removeprefix(path + ".").split(".")[0]
    mlp = tuple(child for name, child in layer.named_children() if name != block_name and _holds_matrix(child))
    return DecoderLayer(path, layer, layer.get_submodule(block_name), mlp)


def _holds_matrix(module: nn.Module) -> bool:
    return any(parameter.ndim >= 2 for parameter in module.parameters())


def find_head_modules(model: nn.Module, layers: list[DecoderLayer]) -> list[nn.Module]:
    """What a step runs before and after the layers and is worth a program: final norm, rotary factors, head.

    Neighbours of the stack of layers, on every level above it. Embeddings are one kernel as they are. Rotary factors
    that depend on the longest position choose their formula on the host, and stay eager.
    """
    path = layers[0].path.rpartition(".")[0].split(".")
    neighbours: list[nn.Module] = []
    for level in range(len(path)):
        parent = model.get_submodule(".".join(path[:level]))
        neighbours += [child for name, child in parent.named_children() if name != path[level]]
    return [one for one in neighbours if not isinstance(one, nn.Embedding | nn.Dropout) and not _depends_on_length(one)]


def _depends_on_length(module: nn.Module) -> bool:
    return getattr(module, "rope_type", "default") in ("dynamic", "longrope")


def regions_to_compile(model: nn.Module, layers: list[DecoderLayer], region: str) -> list[nn.Module]:
    """The modules that are compiled in place, in the order in which they run."""
    if region == "layer":
        return [layer.layer for layer in layers]
    if region == "blocks":
        return [module for layer in layers for module in (layer.attention, *layer.mlp)]
    return [model]
