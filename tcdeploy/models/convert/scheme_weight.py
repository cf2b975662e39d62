"""A weight that is stored in a scheme (planning/schemes.py): its tensors, as parameters of a module.

`SchemeLinear` multiplies by one. `SchemeExperts` holds those of all experts of a layer. Code that only needs the
tensors of a weight or its sizes handles both through `SchemeWeight`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.planning.schemes import SCHEMES, Scheme


class SchemeWeight(nn.Module):
    """A weight [rows, in_features]; with `experts`, one for each, in tensors with a leading dimension of experts.

    The tensors are parameters, named by suffix. experts: their number, 0 for a single weight.
    """

    def __init__(self, scheme: Scheme, tensors: Sequence[Tensor], experts: int = 0) -> None:
        super().__init__()
        self.scheme = scheme.name  # Dynamo would guard each field of the object
        self.suffixes = tuple(tensor.suffix for tensor in scheme.tensors)
        for suffix, tensor in zip(self.suffixes, tensors, strict=True):
            parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(suffix, parameter)
        self.experts = experts
        shapes = [tuple(tensor.shape[1 if experts else 0 :]) for tensor in tensors]
        self.rows, self.in_features = scheme.dense_shape(shapes)

    @property
    def tensors(self) -> list[Tensor]:
        """Of the whole weight, in the scheme's order."""
        return [getattr(self, suffix) for suffix in self.suffixes]

    @property
    def layer_scheme(self) -> LayerScheme:
        """The scheme with the columns that share a scale, 0 if the scheme fixes their number."""
        shape = self.tensors[1].shape[1 if self.experts else 0 :]
        is_grouped = len(shape) == 2 and self.in_features % shape[1] == 0
        return LayerScheme(self.scheme, self.in_features // shape[1] if is_grouped else 0)


class SchemeExperts(SchemeWeight):
    """The weights of all experts of a layer, in place of a parameter of their module."""

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights [experts, rows, in_features]. For tests: the result takes the memory of dense experts."""
        scheme = SCHEMES[self.scheme]
        experts = zip(*self.tensors, strict=True)
        return torch.stack([scheme.dequantise(tensors, dtype) for tensors in experts])


def count_elements(module: nn.Module) -> int:
    """Elements of a module's parameters, each counted once; those of a quantised weight as in the dense matrix."""
    counts = {id(parameter): parameter.numel() for parameter in module.parameters()}
    for child in module.modules():
        if isinstance(child, SchemeWeight):
            first, *others = child.tensors
            elements = child.rows * child.in_features * max(child.experts, 1)
            counts |= {id(first): elements, **dict.fromkeys(map(id, others), 0)}
    return sum(counts.values())
