"""A linear layer whose weight is stored in a scheme (planning/schemes.py), in place of nn.Linear.

In eager mode it dequantises the weight and multiplies in plain torch, so that the reference of the parity check runs no
kernel. While torch.compile or torch.export traces, it calls the op `tcdeploy::scheme_linear`. Like a `PackedSlice`
(packed_linears.py), it may be some of the rows of a weight that several layers share; then all of them call the op with
equal arguments, of which `programs/passes/cse.py` keeps one.

`quantise_inputs` sets the number of rows from which layers also quantise their inputs to FP8. In eager mode a layer
rounds its inputs to the same values. There, `rounding_inputs` decides for a whole step whether layers do so, as
programs decide when they are traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tcdeploy.models.convert.scheme_weight import SchemeWeight
from tcdeploy.planning.schemes import SCHEMES, Scheme

_rounds_inputs: ContextVar[bool | None] = ContextVar("rounds_inputs", default=None)  # see `rounding_inputs`


class SchemeLinear(SchemeWeight):
    """Rows [start, stop) of a linear layer, all by default."""

    def __init__(
        self, scheme: Scheme, tensors: Sequence[Tensor], bias: nn.Parameter | None, start: int = 0,
        stop: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(scheme, tensors)
        self.packed_bias = bias
        self.start, self.stop = start, self.rows if stop is None else stop
        self.fp8_min_rows = 0  # of inputs that are quantised to FP8; 0: none are

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


@contextlib.contextmanager
def rounding_inputs(rounds: bool) -> Iterator[None]:
    """In the block, eager layers that may quantise their inputs round them at any number of rows, or never."""
    token = _rounds_inputs.set(rounds)
    try:
        yield
    finally:
        _rounds_inputs.reset(token)


def quantise_inputs(parents: Iterable[nn.Module], min_rows: int) -> None:
    """Make the linear layers in these modules quantise inputs of `min_rows` rows and more, if their scheme can."""
    for layer in (layer for parent in parents for layer in parent.modules() if isinstance(layer, SchemeLinear)):
        fp8_inputs = SCHEMES[layer.scheme].fp8_inputs
        if fp8_inputs is not None and fp8_inputs.takes(layer.rows, layer.in_features):
            layer.fp8_min_rows = min_rows
