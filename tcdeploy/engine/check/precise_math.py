"""Runs a model's own code in a higher precision than that of its weights, without a copy of the weights.

Within `precise_math(low, high)` every operation that gets a tensor of the dtype `low` computes in `high` instead, and
conversions to `low` are left out. So the activations are `high` from the first operation on, and each weight is
converted when an operation reads it. Operations that only move data (views, indexing) keep `low`: their result is
exact. For an embedding, only the rows that are read are converted. An in-place operation on a tensor of the dtype `low`
rounds its result to `low`.

GEMMs of float32 activations and bfloat16 weights run on tensor cores: an activation is split into three bfloat16 terms,
and the three bfloat16 GEMMs are accumulated in float32. On an H100 this takes a third of the time of a float32 GEMM and
needs no float32 copy of the weight.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tcdeploy.torch_compat.dynamo import dispatch_mode

aten = torch.ops.aten
MOVES_DATA = {aten.index.Tensor, aten.index_select.default, aten.gather.default}
GROUPED_GEMMS = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}
BFLOAT16_PIECES = 3  # of 8 bits each, like the 24 bits of a float32


@contextlib.contextmanager
def precise_math(low: torch.dtype, high: torch.dtype, has_convolutions: bool = True) -> Iterator[None]:
    """Compute in `high` wherever an operation would compute in `low`. Tensors made within the block are `high`.

    has_convolutions: whether the block may call torch.conv1d. If not, no function mode intercepts each call of torch.
    """
    biases = _BiasAfterConvolution() if has_convolutions else contextlib.nullcontext()
    with biases, dispatch_mode.handle_operations(_Raising(low, high)):
        yield


def has_convolutions(model: nn.Module) -> bool:
    """Whether a 1-D convolution may be part of the model: one of its parameters has three dimensions."""
    return any(parameter.ndim == 3 for parameter in model.parameters())


class _BiasAfterConvolution(TorchFunctionMode):
    """Adds the bias of a 1-D convolution to its result, since conv1d compares its dtype with that of the input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = _conv1d if func is torch.conv1d else func
        return function(*args, **(kwargs or {}))


def _conv1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any) -> Tensor:
    out: Tensor = torch.conv1d(input, weight, None, *rest, **options)
    return out if bias is None else out + bias[:, None]


class _Raising:
    """The handler of operations in `precise_math`."""

    def __init__(self, low: torch.dtype, high: torch.dtype) -> None:
        self._low, self._high = low, high

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = _kind(func)
        if kind == "moves data":
            return func(*args, **kwargs)
        if kind == "embedding":
            return self._raised(func(*args, **kwargs))
        if kind == "product" and _is_split_gemm(args, self._low, self._high):
            return _GEMMS[func](*args, **kwargs)
        if kind == "grouped product":
            return _grouped_gemm(*args, **kwargs)
        raised = [self._raised(value) for value in args]
        result = func(*raised, **{name: self._raised(value) for name, value in kwargs.items()})
        if kind == "in place" and raised[0] is not args[0]:
            return args[0].copy_(raised[0])
        return result

    def _raised(self, value: Any) -> Any:
        """`value` with tensors of the dtype `low`, and that dtype itself, raised to `high`; also those in lists."""
        if isinstance(value, Tensor):
            return value.to(self._high) if value.dtype is self._low else value
        if isinstance(value, list | tuple):
            return type(value)(self._raised(item) for item in value)
        return self._high if value is self._low else value


@functools.cache
def _kind(func: Any) -> str:
    """How `_Raising` computes an operation; "" if only its inputs are raised."""
    if func.is_view or func in MOVES_DATA or torch.Tag.inplace_view in func.tags:
        return "moves data"
    if func is aten.embedding.default:
        return "embedding"
    if func in _GEMMS:
        return "product"
    if func.name() in GROUPED_GEMMS:
        return "grouped product"
    return "in place" if dispatch_mode.is_in_place(func) else ""


def _is_split_gemm(args: tuple[Any, ...], low: torch.dtype, high: torch.dtype) -> bool:
    """Whether the last two arguments are float32 activations and a bfloat16 weight on a GPU."""
    activations, weight = args[-2:]
    dtypes = (high, low) == (activations.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
    return dtypes and weight.is_cuda and weight.ndim == 2


def split_gemm(activations: Tensor, weight: Tensor) -> Tensor:
    """[m, k] float32 times [k, n] bfloat16, as accurate as in float32: [m, n] float32."""
    pieces, rest = list[Tensor](), activations
    for number in range(BFLOAT16_PIECES):
        rest = rest - pieces[-1] if number else rest
        pieces.append(rest.to(torch.bfloat16))
    out = torch.mm(pieces.pop(), weight, out_dtype=torch.float32)  # the smallest first
    while pieces:
        out += torch.mm(pieces.pop(), weight, out_dtype=torch.float32)
    return out


def _addmm(bias: Tensor, activations: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * bias.to(torch.float32) + alpha * split_gemm(activations, weight)


def _grouped_gemm(activations: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    """Rows [offs[i-1], offs[i]) of `activations` [tokens, k] times weight[i] [k, n]. Rows after the last are zero."""
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm
    if _is_split_gemm((activations, weight[0]), weight.dtype, activations.dtype):
        multiply = split_gemm
    out = activations.new_zeros(activations.shape[0], weight.shape[2])
    start = 0
    for index, stop in enumerate(offs.tolist()):
        if stop > start:
            rows = activations[start:stop]
            matrix = weight[index] if multiply is split_gemm else weight[index].to(rows.dtype)
            out[start:stop] = multiply(rows, matrix)
        start = stop
    return out if bias is None else out + bias.to(out.dtype)


_GEMMS: dict[Any, Callable[..., Tensor]] = {aten.mm.default: split_gemm, aten.addmm.default: _addmm}
