"""Packs linear layers that read the same input (q, k, v; gate, up) into one matrix, so that one GEMM computes all.

Each layer becomes a `PackedSlice`: a range of rows of a matrix that the group shares. In eager mode it multiplies by
its own rows and returns what the plain layer returned. While torch.compile traces, it multiplies by the whole matrix
and slices the result; the GEMMs of a group are then identical, and `programs/passes/cse.py` keeps one. Modelling code
is unchanged. Quantised layers become slices of one `SchemeLinear` in the same way, if their scheme can be packed.

The packed matrix is the only copy: the original weights are freed as soon as they have been copied into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tcdeploy.models.convert.scheme_linear import SchemeLinear, packable
from tcdeploy.planning.schemes import SCHEMES

EMPTY_CACHE_ABOVE_BYTES = 1 << 30  # of unused cached memory: a packed matrix does not fit into the blocks of its parts


class PackedSlice(nn.Module):
    """Rows [start, stop) of a packed linear layer with weight [rows, in_features] and bias [rows]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, start: int, stop: int) -> None:
        super().__init__()
        self.packed_weight, self.packed_bias = weight, bias
        self.start, self.stop = start, stop

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return functional.linear(x, self.packed_weight, self.packed_bias)[..., self.start : self.stop]
        return functional.linear(x, self.weight, self.bias)

    @property
    def weight(self) -> Tensor:
        return self.packed_weight[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        return None if self.packed_bias is None else self.packed_bias[self.start : self.stop]


@torch.no_grad()
def pack_linears(model: nn.Module, packed_linears: tuple[tuple[str, ...], ...]) -> None:
    """Replace each group of linear layers (module paths in `model`) by slices of one packed layer, in place.

    A group whose layers are not all plain nn.Linear of one dtype and device, or all `packable`, is left unchanged.
    Smaller groups are packed first: a packed matrix that reused the memory block of a larger weight would waste the
    rest of it.
    """
    for paths in sorted(packed_linears, key=lambda paths: _parameter_count(model, paths)):
        layers: list[Any] = [model.get_submodule(path) for path in paths]
        if _can_be_packed(layers):
            _pack(layers, model, paths)
            if torch.cuda.is_available():
                unused_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
                if unused_bytes > EMPTY_CACHE_ABOVE_BYTES:
                    torch.cuda.empty_cache()


def _parameter_count(model: nn.Module, paths: tuple[str, ...]) -> int:
    return sum(parameter.numel() for path in paths for parameter in model.get_submodule(path).parameters())


def _can_be_packed(layers: list[Any]) -> bool:
    if all(isinstance(layer, SchemeLinear) for layer in layers):
        return packable(layers)
    is_plain = all(map(_is_plain_linear, layers))
    return is_plain and len({(layer.weight.dtype, layer.weight.device) for layer in layers}) == 1


def _is_plain_linear(layer: Any) -> bool:
    """Whether a layer multiplies by its weight and adds its bias, and does nothing else.

    Quantised checkpoints keep the class and add scales or a forward of their own, or store 8-bit weights.
    """
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    tensors = {name for name, _ in (*layer.named_parameters(), *layer.named_buffers())}
    weight = layer.weight
    return tensors <= {"weight", "bias"} and weight.is_floating_point() and weight.element_size() >= 2


def _pack(layers: list[Any], model: nn.Module, paths: tuple[str, ...]) -> None:
    is_quantised = isinstance(layers[0], SchemeLinear)
    parts = [layer.tensors if is_quantised else [layer.weight] for layer in layers]
    tensors = [nn.Parameter(torch.cat(pieces), requires_grad=False) for pieces in zip(*parts, strict=True)]
    has_bias = layers[0].bias is not None
    bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False) if has_bias else None
    start = 0
    for path, layer in zip(paths, layers, strict=True):
        packed: nn.Module
        if is_quantised:
            stop = start + layer.rows
            packed = SchemeLinear(SCHEMES[layer.scheme], tensors, bias, start, stop)
        else:
            stop = start + layer.weight.shape[0]
            packed = PackedSlice(tensors[0], bias, start, stop)
        model.set_submodule(path, packed)
        start = stop
