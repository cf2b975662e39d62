"""The op `tcdeploy::scheme_linear`: a linear layer whose weight is stored in a scheme (planning/schemes.py).

Programs call it as an opaque node, which names the scheme. At run time it calls the first kernel in KERNELS for the
scheme that fits the device, the number of rows and the shapes. Without one it dequantises the weight and multiplies, in
plain torch.

From `fp8_min_rows` rows on it quantises the inputs too (fp8_inputs.py). That changes values, so the number is an
argument of the op: it is part of the graph and of its cache key. The plan decides it (planning/activations.py). In
programs, a pass replaces such products by several nodes (programs/passes/fp8_inputs.py).

A module of this folder that defines a scheme adds it to SCHEMES and its kernels to KERNELS, and is imported by ops.py.
Cache keys hold the sources of this folder, and the graph holds the name of the scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.linear.fp8_inputs import fp8_linear
from tcdeploy.planning.schemes import SCHEMES

# function(x [rows, k], tensors of a weight [n, k], bias [n] or None): a new tensor [rows, n] in x's dtype, contiguous
SchemeFunction: TypeAlias = Callable[[Tensor, list[Tensor], Tensor | None], Tensor]


def _accepts_all(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    return True


class SchemeKernel(NamedTuple):
    """A kernel for inputs of min_rows to max_rows rows (max_rows None: of any number) that it `accepts`.

    The tensors of the weight are contiguous. They have the role of weights, so a kernel that is launched with PDL may
    read them before the previous kernel has ended (torch_compat/inductor/pdl.py).
    """

    device: str  # "cuda" or "cpu"
    function: SchemeFunction
    min_rows: int = 1
    max_rows: int | None = None
    accepts: Callable[[Tensor, Sequence[Tensor]], bool] = _accepts_all  # of x [rows, k] and the weight's tensors

    def fits(self, rows: Tensor, tensors: Sequence[Tensor]) -> bool:
        is_row_count = self.min_rows <= len(rows) <= (self.max_rows or len(rows))
        return self.device == rows.device.type and is_row_count and self.accepts(rows, tensors)


KERNELS: dict[str, tuple[SchemeKernel, ...]] = {}  # by name of the scheme


@custom_op("scheme_linear")
def scheme_linear(x: Tensor, tensors: list[Tensor], bias: Tensor | None, scheme: str, fp8_min_rows: int = 0) -> Tensor:
    """x [..., k] @ w [n, k].T + bias [n]: [..., n] in x's dtype, contiguous. `tensors`: of w, in the scheme's order.

    Inputs of `fp8_min_rows` rows and more are quantised to FP8; 0: none are.
    """
    rows = x.reshape(-1, x.shape[-1])
    if 0 < fp8_min_rows <= len(rows):
        return fp8_linear(scheme, rows, tensors, bias).view(*x.shape[:-1], -1)
    for kernel in KERNELS.get(scheme, ()):
        if kernel.fits(rows, tensors):
            out = kernel.function(rows, tensors, bias)
            break
    else:
        out = torch.nn.functional.linear(rows, SCHEMES[scheme].dequantise(tensors, x.dtype), bias)
    return out.view(*x.shape[:-1], out.shape[-1])


@scheme_linear.register_fake
def _(x: Tensor, tensors: list[Tensor], bias: Tensor | None, scheme: str, fp8_min_rows: int = 0) -> Tensor:
    n, _ = SCHEMES[scheme].dense_shape([tuple(tensor.shape) for tensor in tensors])
    return x.new_empty(*x.shape[:-1], n)
