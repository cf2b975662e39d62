"""A linear layer whose weight is stored in a scheme (planning/schemes.py), in place of nn.Linear.

In eager mode it dequantises the weight and multiplies in plain torch, so that the reference of the parity check runs no
kernel. While torch.compile or torch.export traces, it calls the op `tcdeploy::scheme_linear`. Like a `PackedSlice`
(packed_linears.py), it may be some of the rows of a weight that several layers share; then all of them call the op with
equal arguments, of which `programs/passes/cse.py` keeps one.

`quantise_inputs` sets the number of rows from which layers also quantise their inputs. In eager mode they round them,
and `rounding_inputs` decides it for all numbers of rows, as programs decide it when they are traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.planning.schemes import SCHEMES, Scheme

_rounds_inputs: ContextVar[bool | None] = ContextVar("rounds_inputs", default=None)  # see `rounding_inputs`


class SchemeLinear(nn.Module):
    """Rows [start, stop) of a linear layer, all by default. Its weight's tensors are parameters, named by suffix."""

    def __init__(
        self, scheme: Scheme, tensors: Sequence[Tensor], bias: nn.Parameter | None, start: int = 0,
        stop: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scheme = scheme.name  # Dynamo would guard each field of the object
        self.suffixes = tuple(tensor.suffix for tensor in scheme.tensors)
        for suffix, tensor in zip(self.suffixes, tensors, strict=True):
            parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(suffix, parameter)
        self.packed_bias = bias
        self.rows, self.in_features = scheme.dense_shape([tuple(tensor.shape) for tensor in tensors])
        self.start, self.stop = start, self.rows if stop is None else stop
        self.fp8_min_rows = 0  # of inputs that are quantised to FP8; 0: none are

    @property
    def tensors(self) -> list[Tensor]:
        """Of the whole weight, in the scheme's order."""
        return [getattr(self, suffix) for suffix in self.suffixes]

    @property
    def bias(self) -> Tensor | None:
        return None if self.packed_bias is None else self.packed_bias[self.start : self.stop]

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.tcdeploy.scheme_linear(
                x, self.tensors, self.packed_bias, self.scheme, self.fp8_min_rows
            )
            return out if self.stop - self.start == self.rows else out[..., self.start : self.stop]
        fp8_inputs, rounds_inputs = SCHEMES[self.scheme].fp8_inputs, _rounds_inputs.get()
        if rounds_inputs is None:
            rounds_inputs = x.shape[:-1].numel() >= self.fp8_min_rows
        if fp8_inputs is not None and self.fp8_min_rows and rounds_inputs:
            x = fp8_inputs.round(x)
        return functional.linear(x, self.dequantised(x.dtype), self.bias)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [stop - start, columns]. `packable` ensures that its rows are the same share of each tensor."""
        parts = self.tensors
        if self.stop - self.start < self.rows:
            ends = [(len(part) * self.start // self.rows, len(part) * self.stop // self.rows) for part in parts]
            parts = [part[start:stop] for part, (start, stop) in zip(parts, ends, strict=True)]
        return SCHEMES[self.scheme].dequantise(parts, dtype)


def packable(layers: Sequence[SchemeLinear]) -> bool:
    """Whether each tensor of the packed weight is that of the layers, joined at dimension 0."""
    block = SCHEMES[layers[0].scheme].row_block
    row_shapes = {(layer.scheme, *(tensor.shape[1:] for tensor in layer.tensors)) for layer in layers}
    return len(row_shapes) == 1 and block > 0 and all(layer.rows % block == 0 for layer in layers)


# (scheme, weight [rows, columns], columns that share a scale): the tensors of the scheme
Quantise: TypeAlias = Callable[[Scheme, Tensor, int], Sequence[Tensor]]


def quantise_values(scheme: Scheme, weight: Tensor, group_size: int) -> Sequence[Tensor]:
    return scheme.quantise(weight, group_size)


def quantise_linears(
    model: nn.Module, scheme_of: Callable[[str], LayerScheme | None], quantise: Quantise = quantise_values
) -> dict[str, LayerScheme]:
    """Quantise the linear layers that have a scheme, by path, in place. For random weights and fake tensors.

    quantise: how; traced tensors need another function. Returns the schemes by path. A layer whose columns are not a
    multiple of the group size stays dense, and so does a head that is tied to the embedding.
    """
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
        schemes[path] = layer_scheme(layer)
    return schemes


@contextlib.contextmanager
def rounding_inputs(rounds: bool) -> Iterator[None]:
    """In the block, eager layers that may quantise their inputs do so at any number of rows, or never."""
    token = _rounds_inputs.set(rounds)
    try:
        yield
    finally:
        _rounds_inputs.reset(token)


def quantise_inputs(parents: Iterable[nn.Module], min_rows: int) -> None:
    """Let the linear layers in these modules quantise inputs of `min_rows` rows and more, if their scheme can."""
    for layer in (layer for parent in parents for layer in parent.modules() if isinstance(layer, SchemeLinear)):
        fp8_inputs = SCHEMES[layer.scheme].fp8_inputs
        if fp8_inputs is not None and fp8_inputs.takes(layer.rows, layer.in_features):
            layer.fp8_min_rows = min_rows


def layer_scheme(layer: SchemeLinear) -> LayerScheme:
    """The scheme of a layer with the columns that share a scale, 0 if the scheme fixes their number."""
    scale = layer.tensors[1]
    is_grouped = len(scale.shape) == 2 and layer.in_features % scale.shape[1] == 0
    return LayerScheme(layer.scheme, layer.in_features // scale.shape[1] if is_grouped else 0)


def count_elements(module: nn.Module) -> int:
    """Elements of the parameters of a module, each once, with those of a quantised weight as in the dense matrix."""
    counts = {id(parameter): parameter.numel() for parameter in module.parameters()}
    for child in module.modules():
        if isinstance(child, SchemeLinear):
            first, *others = child.tensors
            counts |= {id(first): child.rows * child.in_features, **dict.fromkeys(map(id, others), 0)}
    return sum(counts.values())
