"""Finds where each tensor of a model is in its checkpoint, by letting transformers load tensors that only record.

A `TracedTensor` has the shape and dtype of a tensor of the checkpoint, and no values. Operations that move elements,
such as those of transformers' conversions and of `pack_linears`, return other traced tensors, whose `source`
(weights/sources.py) says which elements they have. An operation that computes values is an error, which transformers
reports without its text; `Trace.problem` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tcdeploy.models.weights.reader import StoredTensor, equal_tensors
from tcdeploy.models.weights.sources import Source, evaluate, stored_names
from tcdeploy.planning.schemes import Scheme
from tcdeploy.torch_compat.tensors_without_storage import make_wrapper

PLACEMENT = {"device", "layout", "pin_memory", "non_blocking"}  # arguments that do not change a traced tensor


class UnknownOperationError(Exception):
    """An operation that computes values, or that no rule describes."""


class Trace:
    """The checkpoint that traced tensors come from.

    problem: the message of the first UnknownOperationError, "" if there was none.
    """

    def __init__(self, checkpoint: Mapping[str, StoredTensor]) -> None:
        self.checkpoint, self.problem = checkpoint, ""

    def tensors(self) -> dict[str, Tensor]:
        """A traced tensor for each tensor of the checkpoint."""
        return {name: self.tensor(name) for name in self.checkpoint}

    def tensor(self, name: str) -> Tensor:
        stored = self.checkpoint[name]
        return TracedTensor(["tensor", name], torch.empty(stored.shape, dtype=stored.dtype, device="meta"), self)


class TracedTensor(Tensor):
    """A tensor without values, which claims to be on the CPU. `origin`: torch.Tensor has a method `trace`."""

    source: Source
    origin: Trace

    @staticmethod
    def __new__(cls, source: Source, like: Tensor, trace: Trace) -> TracedTensor:
        """`like`: has the shape, strides and dtype."""
        tensor = make_wrapper(cls, like, "cpu")
        tensor.source, tensor.origin = source, trace
        return tensor

    def read(self) -> Tensor:
        """The values, from the files."""
        return evaluate(self.source, self.origin.checkpoint).to(self.dtype)

    def __deepcopy__(self, memo: Any) -> TracedTensor:
        """A copy of the model gets other tensors in place of its parameters and buffers (traced_model.py)."""
        raise UnknownOperationError("a weight is held outside of the parameters and buffers of its module")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0][0] if isinstance(args[0], list) else args[0]
        trace = next(item.origin for item in (first, *args) if isinstance(item, TracedTensor))
        try:
            return _apply(func, trace, args, kwargs or {})
        except UnknownOperationError as error:
            trace.problem = trace.problem or str(error)
            raise


def quantise_traced(scheme: Scheme, weight: Tensor, group_size: int) -> list[TracedTensor]:
    """The tensors of a scheme, which are computed from the dense weight [rows, columns] while it is read.

    Those of experts [experts, rows, columns] are computed expert by expert.
    """
    traced = _traced(weight)
    matrices = [_traced(matrix).source for matrix in weight.unbind()] if weight.ndim == 3 else [traced.source]
    shapes = scheme.quantise(torch.empty(weight.shape[-2:], dtype=weight.dtype, device="meta"), group_size)
    tensors: list[TracedTensor] = []
    for index, shape in enumerate(shapes):
        arguments = [scheme.name, group_size, index]
        parts = [["convert", "quantised", [*shape.shape], arguments, [matrix]] for matrix in matrices]
        source = ["stack", 0, parts] if weight.ndim == 3 else parts[0]
        like = shape.expand(*weight.shape[:-2], *shape.shape).contiguous()
        tensors.append(TracedTensor(source, like, traced.origin))
    return tensors


def _apply(func: Any, trace: Trace, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is torch.ops.aten.equal.default:  # transformers compares tied tensors if a checkpoint has both
        first, second = map(_traced, args)
        return first.source == second.source or _equal(first, second)
    rule = RULES.get(str(func.overloadpacket))
    if rule is None:
        raise UnknownOperationError(f"{func} computes values of weights")
    inputs = [*map(_without_values, args[0])] if isinstance(args[0], list) else _without_values(args[0])
    result = func(inputs, *args[1:], **{name: kwargs[name] for name in kwargs.keys() - PLACEMENT})
    if isinstance(result, Tensor):
        return TracedTensor(rule(result, *args), result, trace)
    return [TracedTensor(source, part, trace) for source, part in zip(rule(result, *args), result, strict=True)]


def _equal(first: TracedTensor, second: TracedTensor) -> bool:
    """Whether the values are equal. Both may have gigabytes: an embedding, and the head that is tied to it."""
    checkpoint = first.origin.checkpoint
    for name in (*stored_names(first.source), *stored_names(second.source)):
        if not checkpoint[name].path:  # its values cannot be read
            raise UnknownOperationError(f"{name} is stored in another format than a tensor that it is tied to")
    match first.source, second.source:
        case ["tensor", name], ["tensor", other] if first.dtype == second.dtype:
            return equal_tensors(checkpoint[name], checkpoint[other])
    return torch.equal(first.read(), second.read())


def _traced(tensor: Tensor) -> TracedTensor:
    if not isinstance(tensor, TracedTensor):
        raise UnknownOperationError("a weight is combined with a tensor that is not in the checkpoint")
    return tensor


def _without_values(tensor: Tensor) -> Tensor:
    _traced(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _same(result: Tensor, tensor: TracedTensor, *_: Any) -> Source:
    return tensor.source


def _cast(result: Tensor, tensor: TracedTensor, *_: Any) -> Source:
    """Values are cast once, when they are written, so the tensor must still have the dtype of the checkpoint."""
    stored = {tensor.origin.checkpoint[name].dtype for name in stored_names(tensor.source)}
    if result.dtype != tensor.dtype and stored != {tensor.dtype}:
        raise UnknownOperationError(f"weights are cast to {tensor.dtype}, and then to {result.dtype}")
    return tensor.source


def _pad(result: Tensor, tensor: TracedTensor, *_: Any) -> Source:
    """transformers pads the bias of an output layer to the vocabulary, usually by nothing."""
    if result.shape != tensor.shape:
        raise UnknownOperationError("weights are padded")
    return tensor.source


def _reshape(result: Tensor, tensor: TracedTensor, *_: Any) -> Source:
    return tensor.source if result.shape == tensor.shape else ["reshape", [*result.shape], tensor.source]


def _join(kind: str) -> Callable[..., Source]:
    def join(result: Tensor, tensors: list[TracedTensor], dim: int = 0) -> Source:
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise UnknownOperationError("weights of different dtypes are joined")
        sources, dim = [tensor.source for tensor in tensors], dim % result.ndim
        if kind == "cat" and len(sources) == 1:
            return sources[0]
        if kind == "cat" and dim > 0 and all(source[:2] == ["stack", 0] for source in sources):
            # Gates and ups of all experts. Joined expert by expert, each matrix is read into its place without a copy.
            experts = zip(*(source[2] for source in sources), strict=True)
            return ["stack", 0, [["cat", dim - 1, [*parts]] for parts in experts]]
        return [kind, dim, sources]

    return join


def _permute(result: Tensor, tensor: TracedTensor, dims: list[int]) -> Source:
    return ["permute", [dim % tensor.ndim for dim in dims], tensor.source]


def _transpose(result: Tensor, tensor: TracedTensor, first: int = 0, second: int = 1) -> Source:
    dims = [*range(tensor.ndim)]
    dims[first], dims[second] = dims[second], dims[first]
    return _permute(result, tensor, dims)


def _part(tensor: TracedTensor, dim: int, begin: int, length: int) -> Source:
    if length == tensor.shape[dim]:
        return tensor.source
    return ["slice", dim % tensor.ndim, begin, begin + length, tensor.source]


def _slice(
    result: Tensor, tensor: TracedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Source:
    if step != 1:
        raise UnknownOperationError("weights are sliced with a step")
    begin, _, _ = slice(start, end).indices(tensor.shape[dim])
    return _part(tensor, dim, begin, result.shape[dim])


def _split(results: list[Tensor], tensor: TracedTensor, sizes: Any, dim: int = 0) -> list[Source]:
    begins = [sum(part.shape[dim] for part in results[:index]) for index in range(len(results))]
    return [_part(tensor, dim, begin, part.shape[dim]) for begin, part in zip(begins, results, strict=True)]


def _select(result: Tensor, tensor: TracedTensor, dim: int, index: int) -> Source:
    index, dim = index % tensor.shape[dim], dim % tensor.ndim
    if dim == 0:
        return _element(tensor.source, index, [*result.shape])
    return ["reshape", [*result.shape], _part(tensor, dim, index, 1)]


def _element(source: Source, index: int, shape: list[int]) -> Source:
    """The element at `index` of dimension 0, with this shape. For stacked experts it is the source of that expert."""
    match source:
        case ["stack", 0, parts]:
            return parts[index]  # type: ignore[no-any-return]
        case ["permute", [0, *dims], inner]:
            order = [dim - 1 for dim in dims]
            return ["permute", order, _element(inner, index, [shape[order.index(dim)] for dim in range(len(order))])]
    return ["reshape", shape, ["slice", 0, index, index + 1, source]]


def _unbind(results: list[Tensor], tensor: TracedTensor, dim: int = 0) -> list[Source]:
    return [_select(result, tensor, dim, index) for index, result in enumerate(results)]


# By operation: (result, arguments of the operation) to the source of the result, or to those of several results.
RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("aten.alias", "aten.detach", "aten.clone", "aten.lift_fresh"), _same), "aten._to_copy": _cast,
    "aten.constant_pad_nd": _pad,
    **dict.fromkeys(("aten.view", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze"), _reshape),
    "aten.cat": _join("cat"), "aten.stack": _join("stack"), "aten.permute": _permute, "aten.transpose": _transpose,
    "aten.t": _transpose, "aten.slice": _slice, "aten.split": _split, "aten.split_with_sizes": _split,
    "aten.select": _select, "aten.unbind": _unbind,
}  # fmt: skip
