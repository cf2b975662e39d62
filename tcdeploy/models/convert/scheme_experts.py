"""Keeps stacked experts in their scheme: replaces the parameters of a module of experts by `SchemeExperts`.

transformers joins the matrices of a checkpoint's experts to one parameter [experts, n, k]. A stand-in for a quantised
matrix (quantised_weights.py) is joined in the same way, and the source of the parameter shows how.
`join_scheme_tensors` joins the tensors of the scheme alike. That is possible if whole matrices are stacked, or if their
rows are joined, since each row or block of rows has its own scales. Otherwise it raises CannotFollowError with the
reason, and the experts are dequantised.

Some models store transposed matrices [experts, k, n]. The tensors of a scheme are always those of [experts, n, k].

Only modules whose class supports transformers' interface for experts are changed. The code of other modules reads the
parameters itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from tcdeploy.models.convert.scheme_weight import SchemeExperts
from tcdeploy.models.formats.quantised_weight import QuantisedWeight
from tcdeploy.models.weights.sources import Source, WeightSource
from tcdeploy.planning.schemes import SCHEMES
from tcdeploy.torch_compat.transformers.experts_interface import supports_experts_interface

NAMES = ("gate_up_proj", "up_proj", "down_proj")
REORDERED = "transformers changes the order of the elements of experts"
DIFFERENT = "experts of a layer have different schemes or groups"


class StackedWeight(NamedTuple):
    """A parameter of a module of experts: [experts, n, k], or [experts, k, n] if it is transposed."""

    path: str
    module: nn.Module
    name: str
    is_transposed: bool

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.name)  # type: ignore[no-any-return]

    @property
    def rows(self) -> int:
        """n: the outputs of an expert."""
        return self.tensor.shape[2 if self.is_transposed else 1]

    @property
    def columns(self) -> int:
        """k: the inputs of an expert."""
        return self.tensor.shape[1 if self.is_transposed else 2]

    def replace(self, experts: SchemeExperts) -> None:
        delattr(self.module, self.name)
        self.module.add_module(self.name, experts)


class JoinedTensors(NamedTuple):
    """The tensors of a scheme, joined. is_transposed: whether the source transposes the dense weight."""

    scheme: str
    tensors: tuple[WeightSource, ...]
    is_transposed: bool


class CannotFollowError(Exception):
    """Why the tensors of a scheme cannot be joined like the dense weights."""


def stacked_weights(model: nn.Module) -> Iterator[StackedWeight]:
    """The weights of experts that can be replaced."""
    for path, module in model.named_modules():
        if supports_experts_interface(module):
            for name in NAMES:
                if getattr(getattr(module, name, None), "ndim", 0) == 3:
                    yield StackedWeight(f"{path}.{name}", module, name, bool(module.is_transposed))


def join_scheme_tensors(source: Source, weights: Mapping[str, QuantisedWeight], is_transposed: bool) -> JoinedTensors:
    """The tensors of stacked experts whose dense weight has this source. Raises CannotFollowError.

    weights: the stand-ins, by name. is_transposed: whether the module has [experts, k, n].
    """
    joined = _follow(source, weights)
    if len(joined.tensors[0].shape) != 3 or joined.is_transposed != is_transposed:
        raise CannotFollowError(REORDERED)
    return joined


def _follow(source: Source, weights: Mapping[str, QuantisedWeight]) -> JoinedTensors:
    match source:
        case ["tensor", name] if name not in weights:
            raise CannotFollowError("some experts of a layer are not quantised")
        case ["tensor", name]:
            weight = weights[name]
            if not weight.scheme:
                raise CannotFollowError(weight.reason)
            if SCHEMES[weight.scheme].row_block == 0:
                raise CannotFollowError("each expert has its own order of columns")
            return JoinedTensors(weight.scheme, weight.tensors, is_transposed=len(weight.shape) == 3)
        case ["stack", 0, parts]:
            joined = [_follow(part, weights) for part in parts]
            first = joined[0]
            if any(_layout(part) != _layout(first) for part in joined):
                raise CannotFollowError(DIFFERENT)
            tensors = [
                WeightSource(
                    dtype, (len(joined), *shape), ["stack", 0, [part.tensors[index].source for part in joined]]
                )
                for index, (dtype, shape, _) in enumerate(first.tensors)
            ]
            return first._replace(tensors=tuple(tensors))
        case ["cat", dim, parts]:
            return _join_rows([_follow(part, weights) for part in parts], dim)
        case ["permute", [*dims, last, before], inner] if [*dims, before, last] == [*range(len(dims) + 2)]:
            joined_inner = _follow(inner, weights)
            return joined_inner._replace(is_transposed=not joined_inner.is_transposed)
    raise CannotFollowError(REORDERED)


def _layout(joined: JoinedTensors) -> tuple[object, ...]:
    return joined.scheme, joined.is_transposed, [(dtype, shape) for dtype, shape, _ in joined.tensors]


def _join_rows(parts: Sequence[JoinedTensors], dim: int) -> JoinedTensors:
    """Join the rows of weights. dim: the dimension at which the dense weights are joined."""
    first, block = parts[0], SCHEMES[parts[0].scheme].row_block
    rows_dim = len(first.tensors[0].shape) - 2  # also of the other tensors of a scheme
    if dim != (rows_dim + 1 if first.is_transposed else rows_dim):
        raise CannotFollowError("transformers joins columns of experts")
    if len({(part.scheme, part.is_transposed) for part in parts}) > 1:
        raise CannotFollowError(DIFFERENT)
    if any(part.tensors[0].shape[rows_dim] % block for part in parts):
        raise CannotFollowError(f"the rows that transformers joins are not whole blocks of {block}")
    tensors: list[WeightSource] = []
    for dtype, shape, _ in first.tensors:
        pieces = [part.tensors[len(tensors)] for part in parts]
        others = {piece.shape[:rows_dim] + piece.shape[rows_dim + 1 :] for piece in pieces}
        if len(others) > 1:
            raise CannotFollowError(DIFFERENT)
        rows = sum(piece.shape[rows_dim] for piece in pieces)
        joined_shape = (*shape[:rows_dim], rows, *shape[rows_dim + 1 :])
        tensors.append(WeightSource(dtype, joined_shape, ["cat", rows_dim, [piece.source for piece in pieces]]))
    return first._replace(tensors=tuple(tensors))
