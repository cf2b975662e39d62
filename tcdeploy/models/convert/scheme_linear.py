"""A linear layer whose weight is stored in a scheme (planning/schemes.py), in place of nn.Linear.

In eager mode it dequantises the weight and multiplies in plain torch, so that the reference of the parity check runs no
kernel. While torch.compile or torch.export traces, it calls the op `tcdeploy::scheme_linear`. Like a `PackedSlice`
(packed_linears.py), it may be some of the rows of a weight that several layers share; then all of them call the op with
equal arguments, of which `programs/passes/cse.py` keeps one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tcdeploy.models.convert.scheme_weight import SchemeWeight
from tcdeploy.planning.schemes import SCHEMES, Scheme


class SchemeLinear(SchemeWeight):
    """Rows [start, stop) of a linear layer, all by default."""

    def __init__(
        self, scheme: Scheme, tensors: Sequence[Tensor], bias: nn.Parameter | None, start: int = 0,
        stop: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(scheme, tensors)
        self.packed_bias = bias
        self.start, self.stop = start, self.rows if stop is None else stop

    @property
    def bias(self) -> Tensor | None:
        return None if self.packed_bias is None else self.packed_bias[self.start : self.stop]

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.tcdeploy.scheme_linear(x, self.tensors, self.packed_bias, self.scheme)
            return out if self.stop - self.start == self.rows else out[..., self.start : self.stop]
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
