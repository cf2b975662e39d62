"""A scheme that only tests have: int8 with one float32 scale for each row. It shows what a scheme consists of.

`scheme_registered` adds it to the tables of the package, with a kernel for the CPU that does not dequantise. `FAULTS`
are such kernels with a mistake each. Imports no transformers, as starts from packages do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor

from tcdeploy.kernels.linear.scheme_linear import KERNELS, SchemeFunction, SchemeKernel
from tcdeploy.planning.schemes import SCHEMES, Scheme, SchemeTensor


def quantise(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    scale = weight.float().abs().amax(1).clamp(min=1e-8) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def dequantise(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    weight, scale = tensors
    return weight.to(dtype) * scale.to(dtype)[:, None]


def dense_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    rows, columns = shapes[0]
    return rows, columns


SCHEME = Scheme(
    name="int8_rows",
    tensors=(
        SchemeTensor("weight", "int8", lambda rows, columns: (rows, columns)),
        SchemeTensor("weight_scale", "float32", lambda rows, columns: (rows,)),
    ),
    dense_shape=dense_shape,
    dequantise=dequantise,
    quantise=quantise,
    row_block=1,
)


def multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Scales the output, so that no dequantised weight is in memory."""
    out = (x.float() @ weight.float().T) * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def kernel(x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
    return multiply(x, *tensors, bias)


def without_scale(x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
    weight, scale = tensors
    return multiply(x, weight, torch.ones_like(scale), bias)


def one_scale_for_all_rows(x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
    weight, scale = tensors
    return multiply(x, weight, torch.full_like(scale, scale.mean().item()), bias)


def scale_of_the_next_row(x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
    weight, scale = tensors
    return multiply(x, weight, scale.roll(-1), bias)


def packed_scales_in_another_order(x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
    """As if the scales of layers had been joined in another order than their rows."""
    weight, scale = tensors
    return multiply(x, weight, torch.cat(scale.chunk(2)[::-1]), bias)


def read_as_uint8(x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
    weight, scale = tensors
    return multiply(x, weight.view(torch.uint8), scale, bias)


FAULTS: dict[str, SchemeFunction] = {
    function.__name__: function
    for function in (
        without_scale, one_scale_for_all_rows, scale_of_the_next_row, packed_scales_in_another_order, read_as_uint8,
    )
}  # fmt: skip


@contextlib.contextmanager
def scheme_registered(function: SchemeFunction | None = kernel, max_rows: int | None = None) -> Iterator[None]:
    """Within the block, the package has the scheme. `function`: of its kernel for the CPU; None: it has no kernel."""
    kernels = () if function is None else (SchemeKernel("cpu", function, max_rows=max_rows),)
    with mock.patch.dict(SCHEMES, {SCHEME.name: SCHEME}), mock.patch.dict(KERNELS, {SCHEME.name: kernels}):
        yield
