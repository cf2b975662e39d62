"""Quantises linear layers and stacked experts of a model, for random weights, fake tensors and traced tensors.

A loaded checkpoint that is quantised already goes through quantised_weights.py instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from tcdeploy.models.convert.scheme_experts import stacked_weights
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.models.convert.scheme_weight import SchemeExperts
from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.planning.schemes import SCHEMES, Scheme

# (scheme, weight, columns that share a scale): the tensors of the scheme. weight: [rows, columns], or those of experts
# [experts, rows, columns], whose tensors are stacked.
Quantise: TypeAlias = Callable[[Scheme, Tensor, int], Sequence[Tensor]]


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

    quantise: `quantise_traced` for traced tensors. Returns the schemes by path. A weight whose columns are not a
    multiple of the group size stays dense, and so does a head that is tied to the embedding.
    """
    return {**_quantise_linears(model, scheme_of, quantise), **_quantise_experts(model, scheme_of, quantise)}


def _quantise_linears(
    model: nn.Module, scheme_of: Callable[[str], LayerScheme | None], quantise: Quantise
) -> dict[str, LayerScheme]:
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    schemes: dict[str, LayerScheme] = {}
    for path, module in list(model.named_modules()):
        choice = scheme_of(path) if type(module) is nn.Linear and id(module.weight) not in tied else None
        if choice is None or (choice.group_size and module.in_features % choice.group_size):
            continue
        scheme = SCHEMES[choice.scheme]
        tensors = quantise(scheme, module.weight.detach(), choice.group_size or module.in_features)
        layer = SchemeLinear(scheme, tensors, module.bias)
        model.set_submodule(path, layer)
        schemes[path] = layer.layer_scheme
    return schemes


def _quantise_experts(
    model: nn.Module, scheme_of: Callable[[str], LayerScheme | None], quantise: Quantise
) -> dict[str, LayerScheme]:
    """Experts in a scheme with permuted columns stay dense, because those of a checkpoint are dequantised too."""
    schemes: dict[str, LayerScheme] = {}
    for stacked in list(stacked_weights(model)):
        choice = scheme_of(stacked.path)
        if choice is None or (choice.group_size and stacked.columns % choice.group_size):
            continue
        scheme = SCHEMES[choice.scheme]
        if scheme.row_block:
            weight = stacked.tensor.detach()
            weight = weight.transpose(1, 2) if stacked.is_transposed else weight
            tensors = quantise(scheme, weight, choice.group_size or stacked.columns)
            experts = SchemeExperts(scheme, tensors, len(weight))
            stacked.replace(experts)
            schemes[stacked.path] = experts.layer_scheme
    return schemes
