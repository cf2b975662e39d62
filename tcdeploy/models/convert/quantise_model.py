"""Quantises linear layers and stacked experts of a model, for random weights, fake tensors and traced tensors.

A loaded checkpoint that is quantised already goes through quantised_weights.py instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tcdeploy.models.convert.scheme_experts import StackedWeight, stacked_weights
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.models.convert.scheme_weight import SchemeExperts
from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.planning.schemes import SCHEMES, Scheme, linear_scheme

# (scheme, weight, columns that share a scale): the tensors of the scheme. weight: [rows, columns], or those of experts
# [experts, rows, columns], whose tensors are stacked.
Quantise: TypeAlias = Callable[[Scheme, Tensor, int], Sequence[Tensor]]


class QuantisableWeight(NamedTuple):
    """A dense weight of `model` that has a scheme. group_size: the columns that share a scale."""

    model: nn.Module
    path: str
    scheme: Scheme
    group_size: int
    place: nn.Linear | StackedWeight

    @property
    def weight(self) -> Tensor:
        """[rows, columns], or that of experts [experts, rows, columns]."""
        if isinstance(self.place, nn.Linear):
            return self.place.weight.detach()
        weight = self.place.tensor.detach()
        return weight.transpose(1, 2) if self.place.is_transposed else weight

    def replace(self, tensors: Sequence[Tensor]) -> LayerScheme:
        """Put the tensors of the scheme in the weight's place."""
        if isinstance(self.place, nn.Linear):
            layer = SchemeLinear(self.scheme, tensors, self.place.bias)
            self.model.set_submodule(self.path, layer)
            return layer.layer_scheme
        experts = SchemeExperts(self.scheme, tensors, len(self.weight))
        self.place.replace(experts)
        return experts.layer_scheme


def quantise_values(scheme: Scheme, weight: Tensor, group_size: int) -> Sequence[Tensor]:
    """The tensors of the scheme. Experts are quantised as one matrix if no block of rows belongs to two of them.

    Quantising the 12,000 experts of a large model one by one would take minutes on fake tensors.
    """
    if weight.ndim == 2:
        return scheme.quantise(weight, group_size)
    experts, rows, _ = weight.shape
    if rows % scheme.row_block == 0:
        joined = scheme.quantise(weight.flatten(0, 1), group_size)
        return [tensor.unflatten(0, (experts, -1)) for tensor in joined]
    parts = [scheme.quantise(matrix, group_size) for matrix in weight]
    return [torch.stack(pieces) for pieces in zip(*parts, strict=True)]


def quantise_model(
    model: nn.Module, scheme_of: Callable[[str], LayerScheme | None], quantise: Quantise = quantise_values
) -> dict[str, LayerScheme]:
    """Quantise the linear layers and stacked experts that have a scheme, by path, in place.

    quantise: `quantise_traced` for traced tensors. Returns the schemes by path.
    """
    return {
        item.path: item.replace(quantise(item.scheme, item.weight, item.group_size))
        for item in quantisable_weights(model, scheme_of)
    }


def quantisable_weights(model: nn.Module, scheme_of: Callable[[str], LayerScheme | None]) -> list[QuantisableWeight]:
    """The weights that have a scheme: those of linear layers, then those of experts.

    A weight whose columns are not a multiple of the group size stays dense, and so does a head that is tied to the
    embedding. As in a loaded model, so do experts in a scheme whose columns are in another order.
    """
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linears: list[tuple[str, int, nn.Linear | StackedWeight]] = [
        (path, module.in_features, module)
        for path, module in model.named_modules()
        if type(module) is nn.Linear and id(module.weight) not in tied
    ]
    stacks = [(stacked.path, stacked.columns, stacked) for stacked in stacked_weights(model)]
    weights: list[QuantisableWeight] = []
    for path, columns, place in [*linears, *stacks]:
        choice = scheme_of(path)
        if choice is None or (choice.group_size and columns % choice.group_size):
            continue
        group_size, is_linear = choice.group_size or columns, isinstance(place, nn.Linear)
        scheme = SCHEMES[linear_scheme(choice.scheme, columns, group_size) if is_linear else choice.scheme]
        if scheme.row_block or is_linear:
            weights.append(QuantisableWeight(model, path, scheme, group_size, place))
    return weights
