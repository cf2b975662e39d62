"""Describes how the weight of a linear layer is stored if it is not one matrix in the model's dtype.

A `Scheme` names the tensors that hold a weight [rows, columns], and has their conversion to a matrix and back, in plain
torch. Bytes, loading, packing, parity and programs are derived from it. Kernels are registered by its name
(kernels/linear/scheme_linear.py), and models/formats/ finds the schemes of a checkpoint.

A dense weight has no scheme: its layer stays nn.Linear, and nothing here concerns it. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shape: TypeAlias = tuple[int, ...]
ShapePattern: TypeAlias = tuple[int | None, ...]  # None: a size that `dense_shape` checks, such as a number of groups


class SchemeTensor(NamedTuple):
    """A tensor of a weight. `shape`: of the tensor, from the rows and columns of the weight."""

    suffix: str  # after the path of the layer, also in the checkpoint
    dtype: str  # "int8", as torch names it
    shape: Callable[[int, int], ShapePattern]

    def fits(self, shape: Shape, rows: int, columns: int) -> bool:
        """Whether a tensor of this shape belongs to a weight [rows, columns]."""
        pattern = self.shape(rows, columns)
        return len(pattern) == len(shape) and all(map(_is_size, pattern, shape))


class FP8Inputs(NamedTuple):
    """How products with weights in a scheme quantise their inputs to FP8; planning/activations.py decides when.

    takes: (rows, columns) -> whether products with a weight of this shape can. round: inputs [..., columns] -> their
    values after quantisation, in the same dtype.
    """

    takes: Callable[[int, int], bool]
    round: Callable[[Tensor], Tensor]


class LinearOrder(NamedTuple):
    """The order in which linear layers store the first tensor of a weight, if it is not that of the scheme.

    scheme: the name of the scheme with this order; its other tensors are the same. takes: (columns, columns that share
    a scale) -> whether such weights have this order. reorder: the first tensor -> the same codes in this order.
    """

    scheme: str
    takes: Callable[[int, int], bool]
    reorder: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scheme:
    """How weights [rows, columns] are stored: as `tensors`, in this order wherever a scheme's tensors are a list.

    dense_shape: the rows and columns, from the shapes of the tensors. Raises ValueError or IndexError for shapes that
        no weight has.
    dequantise: the weight in the given dtype, from its tensors. It converts the scales too: the parity check calls it
        with a wider dtype than that of the plan.
    quantise: the inverse, for random weights, from the weight and the columns that share a scale, which is ignored if
        the scheme fixes their number. It also runs on fake tensors, which have no values.
    row_block: weights with equal columns are packed, by joining each of their tensors at dimension 0, if their numbers
        of rows are multiples of row_block: of the rows that share a scale, for example. 0: weights are not packed.
    fp8_inputs: None if inputs always keep their 16 bits.
    linear_order: None if linear layers store weights as checkpoints and experts do.
    """

    name: str
    tensors: tuple[SchemeTensor, ...]
    dense_shape: Callable[[Sequence[Shape]], tuple[int, int]]
    dequantise: Callable[[Sequence[Tensor], torch.dtype], Tensor]
    quantise: Callable[..., Sequence[Tensor]]
    row_block: int
    fp8_inputs: FP8Inputs | None = None
    linear_order: LinearOrder | None = None


SCHEMES: dict[str, Scheme] = {}  # by name


def linear_scheme(name: str, columns: int, group_size: int) -> str:
    """The scheme in which linear layers store weights of scheme `name` whose scales are for `group_size` columns."""
    order = SCHEMES[name].linear_order
    return order.scheme if order is not None and order.takes(columns, group_size) else name


def checkpoint_scheme(name: str) -> str:
    """The inverse of `linear_scheme`: the name of the scheme in which checkpoints store these weights."""
    orders = {item.linear_order.scheme: item.name for item in SCHEMES.values() if item.linear_order is not None}
    return orders.get(name, name)


INTERLEAVED_SUFFIX = "_interleaved"  # of the names of int4 schemes in the order of the tensor cores


def int4_scheme_name(dtype: str, zeros: bool, permuted: bool, interleaved: bool = False) -> str:
    """The scheme of four-bit integers (kernels/linear/int4_scheme.py) for scales of this dtype, "float16" for example.

    zeros: each group has a zero point. permuted: the columns are stored in another order. interleaved: the codes of
    each 32 columns are stored in the order of the tensor cores.
    """
    suffixes = {"_zeros": zeros, "_permuted": permuted, INTERLEAVED_SUFFIX: interleaved}
    return f"int4_{dtype}{''.join(suffix for suffix, has_suffix in suffixes.items() if has_suffix)}"


def _is_size(expected: int | None, size: int) -> bool:
    return expected is None or expected == size
