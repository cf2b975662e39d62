"""Describes where a loaded model's tensors are in its checkpoint, so that they can be loaded without its code.

transformers renames, merges and casts tensors while it loads them, and `pack_linears` packs layers. What they did is
found by comparing values. Where several tensors of the checkpoint have the same values, such as biases of zeros, names
decide; otherwise the description would be wrong for another checkpoint of the same shapes. Buffers that are computed,
such as rotary frequencies, are stored beside the description.

A source is one of, as JSON:

    ["tensor", NAME]     a tensor of the checkpoint
    ["cat", [...]]       sources, joined along the first dimension
    ["stack", [...]]     sources, as the elements of the first dimension
    ["same", NAME]       another tensor of the model, whose memory it shares
    ["stored", NAME]     a tensor that is stored beside the description
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tcdeploy.models.weights.reader import THREADS, Copy, ReadTotal, StoredTensor, copying_tensors, read_elements

FINGERPRINT_ELEMENTS = 32
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
    """A tensor of the model is not in the checkpoint, or several tensors of the checkpoint have its values."""


def describe_weights(
    model: nn.Module, checkpoint: Mapping[str, StoredTensor], packed_linears: Iterable[tuple[str, ...]] = ()
) -> DescribedWeights:
    """Find all parameters and buffers of `model` in its checkpoint. Reads the checkpoint once.

    `packed_linears`: groups of module paths whose weights `pack_linears` has joined. Raises WeightNotInCheckpointError.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors: dict[str, Tensor] = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        names.setdefault(_memory(name, tensor), name)
    found = _find_all({name: tensors[name] for name in names.values()}, checkpoint, packed_linears)
    sources: dict[str, WeightSource] = {}
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        first = names[_memory(name, tensor)]
        source: Source | None = found[name] if first == name else ["same", first]
        if source is None:
            if name in parameters or tensor.nbytes + sum(item.nbytes for item in stored.values()) > MAX_STORED_BYTES:
                message = f"{name} is not in the checkpoint, or is equal to several tensors of it"
                raise WeightNotInCheckpointError(message)
            stored[name], source = tensor.detach().cpu().contiguous(), ["stored", name]
        sources[name] = WeightSource(_dtype_name(tensor.dtype), tuple(tensor.shape), source)
    return DescribedWeights(sources, stored)


def _memory(name: str, tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that share their memory. Empty tensors have none."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)


def _find_all(
    tensors: Mapping[str, Tensor], checkpoint: Mapping[str, StoredTensor], packed_linears: Iterable[tuple[str, ...]]
) -> dict[str, Source | None]:
    """Find tensors in several threads: in one, the 16 GB of an 8B model took 31 s (H100 machine)."""
    finder = _Finder(checkpoint, packed_linears, {tensor.dtype for tensor in tensors.values()})
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(finder.find, tensors, tensors.values())
        return dict(zip(tensors, found, strict=True))


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
    with copying_tensors(copies) as total:
        yield LoadingWeights(tensors, total)


def copy_stored(described: DescribedWeights, tensors: Mapping[str, Tensor]) -> None:
    """Copy what is stored beside the description into the tensors of `loading_weights`.

    Raises KeyError or ValueError if one is missing or has another shape or dtype.
    """
    for name, (dtype, shape, source) in described.sources.items():
        if source[0] == "stored":
            stored = described.stored[source[1]]
            if tuple(stored.shape) != tuple(shape) or _dtype_name(stored.dtype) != dtype:
                raise ValueError(f"{name} is stored as {_dtype_name(stored.dtype)} {list(stored.shape)}")
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
        tensors[name] = memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return tensors


def _copies(source: Source, target: Tensor, checkpoint: Mapping[str, StoredTensor]) -> Iterator[Copy]:
    kind, value = source
    if kind == "tensor":
        if checkpoint[value].shape != tuple(target.shape):
            raise ValueError(f"{value} has the shape {list(checkpoint[value].shape)}, not {list(target.shape)}")
        yield Copy(checkpoint[value], target)
    elif kind == "stack":
        for part, element in zip(value, target, strict=True):
            yield from _copies(part, element, checkpoint)
    else:
        start = 0
        for part in value:
            rows = checkpoint[part[1]].shape[0]
            yield from _copies(part, target[start : start + rows], checkpoint)
            start += rows
        if start != target.shape[0]:
            raise ValueError(f"{value} have {start} rows together, not {target.shape[0]}")


class _Finder:
    """Finds tensors of a checkpoint by their first elements, and then compares all."""

    def __init__(
        self,
        checkpoint: Mapping[str, StoredTensor],
        packed_linears: Iterable[tuple[str, ...]],
        dtypes: Iterable[torch.dtype],
    ) -> None:
        """`dtypes`: of the tensors that will be searched for."""
        self._checkpoint = checkpoint
        self._groups = {path: group for group in packed_linears for path in group}
        self._names = {dtype: self._index(dtype) for dtype in dtypes}  # by dtype after conversion, and fingerprint

    def find(self, name: str, tensor: Tensor) -> Source | None:
        """Where a contiguous tensor of the model comes from; None if nothing has its values, or if several do."""
        if not tensor.numel() or not tensor.is_contiguous():
            return None
        path, _, leaf = name.rpartition(".")
        tensor = tensor.detach()
        if path in self._groups and leaf.startswith("packed_"):
            parts = [f"{part}.{leaf.removeprefix('packed_')}" for part in self._groups[path]]
            if source := self._joined(tensor, parts):
                return source
        return self._joined(tensor, [name]) or self._stacked(tensor)

    def _joined(self, tensor: Tensor, names: Sequence[str] = ()) -> Source | None:
        """The tensor of the checkpoint, or those that are joined. `names`: in the model, to choose among equal ones.

        Several names are those of the parts of a packed layer.
        """
        parts: list[Source] = []
        start = 0
        while not parts or start < tensor.shape[0]:
            rest = tensor[start:] if tensor.ndim else tensor
            equal = [item for item in self._candidates(rest) if self._begins_with(item, rest)]
            if not parts and len(names) < 2:  # a tensor with all values is preferred to those with the first
                equal = [item for item in equal if self._checkpoint[item].shape == tuple(tensor.shape)] or equal
            if len(equal) > 1:
                named = self._named(names[len(parts)]) if len(parts) < len(names) else None
                equal = [item for item in equal if item == named]
            if not equal:
                return None
            parts.append(["tensor", equal[0]])
            if (shape := self._checkpoint[equal[0]].shape) == tuple(tensor.shape):
                return parts[0]
            start += shape[0]
        return ["cat", parts]

    def _stacked(self, tensor: Tensor) -> Source | None:
        if tensor.ndim < 2:
            return None
        parts: list[Source] = []
        for element in tensor:
            if (source := self._joined(element)) is None:  # usually at the first of perhaps 100,000 elements
                return None
            parts.append(source)
        return ["stack", parts]

    def _named(self, name: str) -> str | None:
        """The tensor of this name, with another prefix if there is only one such tensor."""
        if name in self._checkpoint:
            return name
        matching = [item for item in self._checkpoint if item.endswith(f".{name}") or name.endswith(f".{item}")]
        return matching[0] if len(matching) == 1 else None

    def _candidates(self, tensor: Tensor) -> list[str]:
        """Tensors that begin with the same elements."""
        fingerprint = _fingerprint(tensor.reshape(-1)[:FINGERPRINT_ELEMENTS])
        names, size = self._names[tensor.dtype], tensor.element_size()
        # A stored tensor with fewer elements than a fingerprint has a shorter one.
        lengths = range(size, len(fingerprint) + size, size)
        return [item for length in lengths for item in names.get(fingerprint[:length], ())]

    def _index(self, dtype: torch.dtype) -> dict[bytes, list[str]]:
        names: defaultdict[bytes, list[str]] = defaultdict(list)
        for name, stored in self._checkpoint.items():
            if stored.dtype.is_floating_point == dtype.is_floating_point:
                names[_fingerprint(read_elements(stored, 0, FINGERPRINT_ELEMENTS).to(dtype))].append(name)
        return names

    def _begins_with(self, name: str, tensor: Tensor) -> bool:
        """Whether the first rows of a tensor, or all of it, are a tensor of the checkpoint."""
        stored = self._checkpoint[name]
        if stored.shape != tuple(tensor.shape):
            if not (tensor.ndim and stored.shape and 0 < stored.shape[0] < tensor.shape[0]):
                return False
            tensor = tensor[: stored.shape[0]]
        return stored.shape == tuple(tensor.shape) and _is_equal(stored, tensor)


def _is_equal(stored: StoredTensor, tensor: Tensor) -> bool:
    """In chunks for which the allocator keeps its memory, because page faults took longer than reading."""
    elements = tensor.reshape(-1)
    for first in range(0, elements.numel(), CHUNK_ELEMENTS):
        chunk = elements[first : first + CHUNK_ELEMENTS].cpu()
        if not torch.equal(read_elements(stored, first, CHUNK_ELEMENTS).to(tensor.dtype), chunk):
            return False
    return True


def _fingerprint(elements: Tensor) -> bytes:
    return bytes(elements.contiguous().view(torch.uint8).cpu().numpy())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
