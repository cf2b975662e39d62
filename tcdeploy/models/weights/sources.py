"""Describes where a model's tensors are in its checkpoint, so that threads can read them to their places.

transformers renames, merges and casts tensors while it loads them, and `pack_linears` packs layers. What they do is
recorded on tensors without values (convert/traced_tensor.py). Buffers that are computed, such as rotary frequencies,
are stored beside the description.

A source is a list in one of these forms, and is stored as JSON:

    ["tensor", NAME]                      a tensor of the checkpoint
    ["cat", DIM, [...]]                   sources, joined along a dimension
    ["stack", DIM, [...]]                 sources, as the elements of a new dimension
    ["slice", DIM, BEGIN, END, SOURCE]    elements [BEGIN, END) of a dimension
    ["permute", DIMS, SOURCE]             the dimensions in another order
    ["reshape", SHAPE, SOURCE]            the same elements in another shape
    ["view", DTYPE, SHAPE, NAME]          the bytes of a tensor of the checkpoint as another dtype
    ["convert", FUNCTION, SHAPE, ARGUMENTS, [...]]  the result of a function of weights/conversions.py, of sources
    ["same", NAME]                        another tensor of the model, whose memory it shares
    ["stored", NAME]                      a tensor that is stored beside the description
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tcdeploy.models.weights.conversions import CONVERSIONS, quantised_tensors
from tcdeploy.models.weights.reader import (
    THREADS,
    Copy,
    ReadTotal,
    StoredTensor,
    copying_tensors,
    read_elements,
    read_tensor,
)
from tcdeploy.planning.dtypes import dtype_name

CHUNK_ELEMENTS = 4 << 20
MAX_STORED_BYTES = 64 << 20
ALIGNMENT_BYTES = 512  # as in torch's CUDA caching allocator
Source: TypeAlias = list[Any]


class WeightSource(NamedTuple):
    """A tensor of the model: contiguous, of this dtype ("float32") and shape."""

    dtype: str
    shape: tuple[int, ...]
    source: Source


class DescribedWeights(NamedTuple):
    sources: dict[str, WeightSource]  # by name in the model
    stored: dict[str, Tensor]  # on the CPU


class LoadingWeights(NamedTuple):
    tensors: dict[str, Tensor]  # by name in the model
    total: ReadTotal


class WeightNotInCheckpointError(Exception):
    """A tensor of the model does not come from the checkpoint alone, or has other values."""


def describe_weights(
    model: nn.Module, traced: Mapping[str, Source], checkpoint: Mapping[str, StoredTensor]
) -> DescribedWeights:
    """Describe all parameters and buffers of `model`, and compare their values with the checkpoint, which is read once.

    traced: the sources of those that come from the checkpoint, by name. Raises WeightNotInCheckpointError.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors: dict[str, Tensor] = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    names: dict[tuple[object, ...], str] = {}
    sources: dict[str, WeightSource] = {}
    stored: dict[str, Tensor] = {}
    compared: list[tuple[str, Copy]] = []
    for name, tensor in tensors.items():
        first = names.setdefault(_memory(name, tensor), name)
        source: Source = ["same", first] if first != name else traced.get(name, ["stored", name])
        if source[0] == "stored":
            if name in parameters or tensor.nbytes + sum(item.nbytes for item in stored.values()) > MAX_STORED_BYTES:
                raise WeightNotInCheckpointError(f"{name} is not in the checkpoint")
            stored[name] = tensor.detach().cpu().contiguous()
        elif source[0] != "same":
            if not tensor.is_contiguous():
                raise WeightNotInCheckpointError(f"{name} is not contiguous")
            try:
                compared += [(name, copy) for copy in _copies(source, tensor.detach(), checkpoint)]
            except (KeyError, ValueError) as error:
                raise WeightNotInCheckpointError(f"{name} does not fit the checkpoint: {error}") from error
        sources[name] = WeightSource(dtype_name(tensor.dtype), tuple(tensor.shape), source)
    with ThreadPoolExecutor(THREADS) as threads:  # in one thread, the 16 GB of an 8B model took 31 s (H100 machine)
        for (name, _), is_equal in zip(compared, threads.map(lambda item: _is_equal(item[1]), compared), strict=True):
            if not is_equal:
                raise WeightNotInCheckpointError(f"{name} has other values than the checkpoint")
    return DescribedWeights(sources, stored)


def _memory(name: str, tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that share their memory. Empty tensors have none."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)


def _is_equal(copy: Copy) -> bool:
    """Whether the target has the values of the source.

    In chunks for which the allocator keeps its memory, because page faults took longer than reading. They are compared
    on the target's device: with 16 GB on an H200, the stage `record` takes 9.4 s of CPU time instead of 28.8. If the
    device has no memory left for that, they are compared on the host.
    """
    stored, target, evaluate, *_ = copy
    if evaluate is not None:
        [values] = evaluate()
        return _has_values(target.cpu(), values)
    elements = target.reshape(-1)
    for first in range(0, elements.numel(), CHUNK_ELEMENTS):
        chunk, values = elements[first : first + CHUNK_ELEMENTS], read_elements(stored, first, CHUNK_ELEMENTS)
        try:
            is_equal = _has_values(chunk, values)
        except torch.OutOfMemoryError:
            is_equal = _has_values(chunk.cpu(), values)
        if not is_equal:
            return False
    return True


def _has_values(tensor: Tensor, values: Tensor) -> bool:
    values = values.to(tensor.dtype).to(tensor.device)
    if tensor.dtype.itemsize == 1:  # torch compares no float8
        tensor, values = tensor.view(torch.uint8), values.contiguous().view(torch.uint8)
    return torch.equal(tensor, values)


@contextlib.contextmanager
def loading_weights(
    sources: Mapping[str, WeightSource], checkpoint: Mapping[str, StoredTensor], device: str
) -> Iterator[LoadingWeights]:
    """The tensors of a model, which are read from its checkpoint while the block runs.

    They are complete after the block, except those that `copy_stored` fills; before, each element is zero or complete.
    Raises KeyError or ValueError if the checkpoint lacks a tensor or has another shape, and as `copying_tensors`.
    """
    tensors, copies = _allocate(sources, device), list[Copy]()
    for name, (_, _, source) in sources.items():
        if source[0] == "same":
            tensors[name] = tensors[source[1]]
        elif source[0] != "stored":
            copies += _copies(source, tensors[name], checkpoint)
    with copying_tensors(_joined(copies)) as total:
        yield LoadingWeights(tensors, total)


def copy_stored(described: DescribedWeights, tensors: Mapping[str, Tensor]) -> None:
    """Copy what is stored beside the description into the tensors of `loading_weights`.

    Raises KeyError or ValueError if one is missing or has another shape or dtype.
    """
    for name, (dtype, shape, source) in described.sources.items():
        if source[0] == "stored":
            stored = described.stored[source[1]]
            if tuple(stored.shape) != tuple(shape) or dtype_name(stored.dtype) != dtype:
                raise ValueError(f"{name} is stored as {dtype_name(stored.dtype)} {list(stored.shape)}")
            tensors[name].copy_(stored)


def _allocate(sources: Mapping[str, WeightSource], device: str) -> dict[str, Tensor]:
    """Zeros for the tensors, in one allocation: on a GPU, one for each took about 0.1 s (8B, H100)."""
    begins: dict[str, int] = {}
    size = 0
    for name, (dtype, shape, source) in sources.items():
        if source[0] != "same":
            begins[name] = size
            num_bytes = math.prod(shape) * getattr(torch, dtype).itemsize
            size += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    memory = torch.zeros(size, dtype=torch.uint8, device=device)
    tensors: dict[str, Tensor] = {}
    for name, begin in begins.items():
        dtype, shape = getattr(torch, sources[name].dtype), sources[name].shape
        part = memory[begin : begin + math.prod(shape) * dtype.itemsize]
        tensors[name] = part.view(dtype).view(shape).detach()  # torch.compile treats views of a base differently
    return tensors


def evaluate(source: Source, checkpoint: Mapping[str, StoredTensor]) -> Tensor:
    """The tensor that a source describes, in host memory."""
    if stored := _stored(source, checkpoint):
        return read_tensor(stored)
    match source:
        case ["cat", dim, parts]:
            return torch.cat([evaluate(part, checkpoint) for part in parts], dim)
        case ["stack", dim, parts]:
            return torch.stack([evaluate(part, checkpoint) for part in parts], dim)
        case ["slice", dim, begin, end, inner]:
            return evaluate(inner, checkpoint).narrow(dim, begin, end - begin)
        case ["permute", dims, inner]:
            return evaluate(inner, checkpoint).permute(dims)
        case ["reshape", shape, inner]:
            return evaluate(inner, checkpoint).reshape(shape)
        case ["convert", function, _, arguments, parts]:
            return CONVERSIONS[function]([evaluate(part, checkpoint) for part in parts], *arguments)
    raise ValueError(f"unknown source {source[:1]}")


def _stored(source: Source, checkpoint: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The bytes of a file that have the values of a source, if there are such."""
    match source:
        case ["tensor", name]:
            return checkpoint[name]
        case ["view", dtype, shape, name]:
            return checkpoint[name].view(getattr(torch, dtype), tuple(shape))
        case ["slice", 0, begin, end, inner]:
            stored = _stored(inner, checkpoint)
            return stored and stored.rows(begin, end)
    return None


def _stored_parts(source: Source, checkpoint: Mapping[str, StoredTensor]) -> Iterator[StoredTensor]:
    """The parts of files that `evaluate` reads."""
    if stored := _stored(source, checkpoint):
        yield stored
        return
    match source:
        case ["cat" | "stack", _, parts] | ["convert", _, _, _, parts]:
            for part in parts:
                yield from _stored_parts(part, checkpoint)
        case [*_, inner]:
            yield from _stored_parts(inner, checkpoint)


def stored_names(source: Source) -> Iterator[str]:
    """The tensors of the checkpoint in a source."""
    match source:
        case ["tensor", name] | ["view", _, _, name]:
            yield name
        case ["cat" | "stack", _, parts] | ["convert", _, _, _, parts]:
            for part in parts:
                yield from stored_names(part)
        case [*_, inner]:
            yield from stored_names(inner)


def conversions(source: Source, function: str) -> Iterator[Source]:
    """The sources in a source that are the result of a function."""
    match source:
        case ["convert", name, *_] if name == function:
            yield source
        case ["cat" | "stack", _, parts] | ["convert", _, _, _, parts]:
            for part in parts:
                yield from conversions(part, function)
        case ["slice" | "permute" | "reshape", *_, inner]:
            yield from conversions(inner, function)


def replace_tensors(source: Source, replacements: Mapping[str, Source]) -> Source:
    """The source with other sources in the place of some tensors of the checkpoint."""
    match source:
        case ["tensor", name]:
            return replacements.get(name, source)
        case ["cat" | "stack" as kind, dim, parts]:
            return [kind, dim, [replace_tensors(part, replacements) for part in parts]]
        case ["slice" | "permute" | "reshape", *_, inner]:
            return [*source[:-1], replace_tensors(inner, replacements)]
    return source


def source_shape(source: Source, checkpoint: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    """Not by `evaluate` on meta tensors, for which torch imports its compiler."""
    match source:
        case ["tensor", name]:
            return checkpoint[name].shape
        case ["view" | "convert", _, shape, *_]:
            return tuple(shape)
        case ["cat", dim, parts]:
            shapes = [source_shape(part, checkpoint) for part in parts]
            return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
        case ["stack", dim, parts]:
            shape = source_shape(parts[0], checkpoint)
            return (*shape[:dim], len(parts), *shape[dim:])
        case ["slice", dim, begin, end, inner]:
            shape = source_shape(inner, checkpoint)
            return (*shape[:dim], end - begin, *shape[dim + 1 :])
        case ["permute", dims, inner]:
            shape = source_shape(inner, checkpoint)
            return tuple(shape[dim] for dim in dims)
        case ["reshape", shape, _]:
            return tuple(shape)
    raise ValueError(f"unknown source {source[:1]}")


def _copies(source: Source, target: Tensor, checkpoint: Mapping[str, StoredTensor]) -> Iterator[Copy]:
    """Copies that fill `target`, which is contiguous.

    Parts with a contiguous place are read into it; other sources are evaluated as a whole in host memory. Raises
    KeyError, or ValueError if the shapes differ.
    """
    if (shape := source_shape(source, checkpoint)) != tuple(target.shape):
        names = ", ".join(itertools.islice(stored_names(source), 3))
        raise ValueError(f"{names} has the shape {[*shape]}, not {[*target.shape]}")
    parts: list[tuple[Source, Tensor]] = []
    if stored := _stored(source, checkpoint):
        yield Copy(stored, target)
        return
    match source:
        case ["cat", dim, [["stack", 0, first], *others]] if dim and all(
            other[:2] == ["stack", 0] and len(other[2]) == len(first) for other in others
        ):  # gate and up of stacked experts: in the target, those of one expert are contiguous
            by_element = zip(first, *(other[2] for other in others), strict=True)
            in_order: Source = ["stack", 0, [["cat", dim - 1, [*pieces]] for pieces in by_element]]
            yield from _copies(in_order, target, checkpoint)
            return
        case ["cat", dim, sources]:
            sizes = [source_shape(part, checkpoint)[dim] for part in sources]
            parts = list(zip(sources, target.split(sizes, dim), strict=True))
        case ["stack", dim, sources]:
            parts = list(zip(sources, target.unbind(dim), strict=True))
        case ["reshape", _, inner]:
            parts = [(inner, target.view(source_shape(inner, checkpoint)))]
    if parts and all(piece.is_contiguous() for _, piece in parts):
        for part, piece in parts:
            yield from _copies(part, piece, checkpoint)
    else:
        read = list(_stored_parts(source, checkpoint))
        yield Copy(read[0], target, _Evaluation((source,), checkpoint), sum(stored.num_bytes for stored in read))


@dataclass(frozen=True)
class _Evaluation:
    """A call returns the values of sources, whose inputs are equal, in host memory."""

    sources: tuple[Source, ...]
    checkpoint: Mapping[str, StoredTensor]

    @property
    def key(self) -> str:
        """Equal for evaluations that can be one, "" if none can: the tensors of a quantised weight."""
        match self.sources[0]:
            case ["convert", "quantised", _, [*arguments, _], parts]:
                return json.dumps([arguments, parts])
        return ""

    def __call__(self) -> list[Tensor]:
        match self.sources:
            case [["convert", "quantised", _, [scheme, group_size, _], [weight]], *_]:
                tensors = quantised_tensors(evaluate(weight, self.checkpoint), scheme, group_size)
                return [tensors[source[3][-1]] for source in self.sources]
        return [evaluate(source, self.checkpoint) for source in self.sources]


def _joined(copies: Iterable[Copy]) -> Iterator[Copy]:
    """The same copies; the tensors of a quantised weight are computed together, so that it is read once."""
    groups: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        if isinstance(copy.evaluate, _Evaluation) and copy.evaluate.key:
            groups[copy.evaluate.key].append(copy)
        else:
            yield copy
    for first, *others in groups.values():
        evaluations = [copy.evaluate for copy in (first, *others) if isinstance(copy.evaluate, _Evaluation)]
        evaluation = _Evaluation(tuple(item.sources[0] for item in evaluations), evaluations[0].checkpoint)
        yield first._replace(evaluate=evaluation, others=tuple(copy.target for copy in others))
