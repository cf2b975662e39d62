"""A quantised weight of a checkpoint, as the modules of this folder find it.

A format says which tensors are a weight, which of them become the tensors of a scheme (planning/schemes.py), and how
the dense weight is computed. Both are sources (weights/sources.py), so nothing is read here but small tensors on which
the scheme depends. `convert/quantised_weights.py` uses the scheme for linear layers and stacked experts, and the dense
weight everywhere else.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from tcdeploy.errors import ModelError
from tcdeploy.models.weights.reader import StoredTensor
from tcdeploy.models.weights.sources import Source, WeightSource, source_shape
from tcdeploy.planning.dtypes import dtype_name
from tcdeploy.planning.schemes import SCHEMES, linear_scheme

HINT = "download the model again, or use the config.json that belongs to these weights"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of scales


class LayerScheme(NamedTuple):
    """The scheme of a linear layer or of stacked experts. group_size: columns that share a scale; 0: fixed."""

    scheme: str
    group_size: int = 0


class QuantisedWeight(NamedTuple):
    """names: of its tensors in the checkpoint, also of those that are not used, such as scales of inputs.

    shape: of the dense weight [rows, columns], or [experts, columns, rows] for the experts of gpt-oss. dense: its
    source. scheme: "" if the format has none. tensors: of the scheme, in its order, those of experts with a leading
    dimension of experts. reason: why there is no scheme; "" for values that are only stored in another order.
    scales: names of tensors whose values are checked.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dense: Source
    scheme: str = ""
    tensors: tuple[WeightSource, ...] = ()
    reason: str = ""
    scales: tuple[str, ...] = ()


class Layer:
    """The tensors of a checkpoint whose names begin with the path of a layer, by the rest of the name."""

    def __init__(self, model: str, path: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.model, self.path, self.tensors = model, path, tensors

    def name(self, suffix: str) -> str:
        return f"{self.path}.{suffix}"

    def names(self, suffixes: Iterable[str]) -> tuple[str, ...]:
        """The names of those tensors that exist."""
        return tuple(self.name(suffix) for suffix in suffixes if suffix in self.tensors)

    def source(self, suffix: str) -> Source:
        return ["tensor", self.name(suffix)]

    def find(self, *suffixes: str) -> str | None:
        """The first suffix that the layer has."""
        return next((suffix for suffix in suffixes if suffix in self.tensors), None)

    def require(self, suffix: str, dtypes: Sequence[torch.dtype], shape: tuple[int, ...] | None = None) -> StoredTensor:
        """A tensor of one of the dtypes, and of the shape. Raises ModelError that names it."""
        stored = self.tensors.get(suffix)
        if stored is None:
            raise ModelError(f"the checkpoint of {self.model} lacks {self.name(suffix)}", HINT)
        if stored.dtype not in dtypes or (shape is not None and stored.shape != shape):
            expected = f"{' or '.join(map(dtype_name, dtypes))}{'' if shape is None else f' {[*shape]}'}"
            raise self.wrong(suffix, f"must be {expected}")
        return stored

    def require_matrix(self, suffix: str, dtypes: Sequence[torch.dtype]) -> StoredTensor:
        """As `require`, with rows and columns."""
        stored = self.require(suffix, dtypes)
        if len(stored.shape) != 2:
            raise self.wrong(suffix, "must have rows and columns")
        return stored

    def wrong(self, suffix: str, problem: str) -> ModelError:
        stored = self.tensors[suffix]
        described = f"{self.name(suffix)} of {self.model} is stored as {dtype_name(stored.dtype)} {[*stored.shape]}"
        return ModelError(f"{described}; it {problem}", HINT)


def converted(function: str, shape: tuple[int, ...], parts: Sequence[Source], *arguments: object) -> Source:
    return ["convert", function, [*shape], [*arguments], [*parts]]


def weight_in_scheme(
    layer: Layer, names: tuple[str, ...], scheme: str, sources: Sequence[Source], scales: tuple[str, ...]
) -> QuantisedWeight:
    """A weight whose tensors in the scheme have these sources. Raises ModelError if no weight has their shapes."""
    checkpoint = {layer.name(suffix): stored for suffix, stored in layer.tensors.items()}
    shapes, described = [source_shape(source, checkpoint) for source in sources], SCHEMES[scheme]
    with contextlib.suppress(ValueError, IndexError):
        rows, columns = described.dense_shape(shapes)
        pairs = list(zip(described.tensors, shapes, strict=True))
        if all(tensor.fits(shape, rows, columns) for tensor, shape in pairs):
            tensors = tuple(
                WeightSource(tensor.dtype, shape, source)
                for (tensor, shape), source in zip(pairs, sources, strict=True)
            )
            dense = converted("dequantised", (rows, columns), sources, scheme)
            return QuantisedWeight(names, (rows, columns), dense, scheme, tensors, scales=scales)
    stored = ", ".join(f"{name} {[*checkpoint[name].shape]}" for name in names)
    raise ModelError(f"tensors of {layer.model} have shapes that are impossible in {scheme}: {stored}", HINT)


def in_linear_order(weight: QuantisedWeight) -> QuantisedWeight:
    """A weight in a scheme, with its first tensor in the order in which linear layers store it (`linear_scheme`)."""
    (_, columns), (codes, *others) = weight.shape, weight.tensors
    groups = others[0].shape[1] if others and len(others[0].shape) == 2 else 1
    scheme = linear_scheme(weight.scheme, columns, columns // groups)
    if scheme == weight.scheme:
        return weight
    reordered = codes._replace(source=converted("in_linear_order", codes.shape, [codes.source], weight.scheme))
    return weight._replace(scheme=scheme, tensors=(reordered, *others))


def check_groups(layer: Layer, suffix: str, columns: int, groups: int) -> None:
    """Raise ModelError if the tensor's number of groups does not divide the columns."""
    if not groups or columns % groups:
        raise layer.wrong(suffix, f"has {groups} groups, which do not divide {columns} columns")


def num_elements(stored: StoredTensor) -> int:
    return math.prod(stored.shape)
