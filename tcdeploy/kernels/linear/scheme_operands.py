"""The tensors of a quantised weight by their use in the kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tcdeploy.kernels.linear import fp4_scheme, fp8_scheme, int4_scheme, int8_scheme
from tcdeploy.kernels.linear.scheme_tiles import REGISTER_BLOCK_K
from tcdeploy.planning.schemes import SCHEMES

FORMATS = {  # how the kernels make values of a scheme's bytes
    fp8_scheme.CHANNEL_NAME: "fp8", fp8_scheme.BLOCK_NAME: "fp8", int8_scheme.NAME: "int8",
    fp4_scheme.MXFP4_NAME: "e2m1", fp4_scheme.NVFP4_NAME: "e2m1", **dict.fromkeys(int4_scheme.NAMES, "int4"),
}  # fmt: skip
TWO_PER_BYTE = ("int4", "e2m1")  # formats with two columns in a byte


class Operands(NamedTuple):
    """The tensors of a weight [n, k] by their use in the kernels."""

    format: str
    weight: Tensor  # [n, bytes]
    row_scale: Tensor | None  # n scales of rows
    group_scale: Tensor | None  # [n / row_block, groups]
    zero: Tensor | None  # [n, groups]
    columns: Tensor | None  # [k]
    groups: int
    group: int  # columns of a group; the last may be partial
    row_block: int  # rows that share the scales of groups
    is_interleaved: bool = False  # the codes of each 32 columns are in the order of `int4_scheme.interleave`

    @property
    def per_byte(self) -> int:
        """Columns in a byte."""
        return 2 if self.format in TWO_PER_BYTE else 1

    @property
    def is_register_operand(self) -> bool:
        """Whether the register GEMM takes the weight, in whole steps whose columns are in one group."""
        is_fp8 = self.format == "fp8" and self.k % REGISTER_BLOCK_K == self.group % REGISTER_BLOCK_K == 0
        return is_fp8 or self.is_interleaved

    @property
    def k(self) -> int:
        return self.weight.shape[-1] * self.per_byte


@functools.cache
def _suffixes(scheme: str) -> tuple[str, ...]:
    return tuple(item.suffix for item in SCHEMES[scheme].tensors)


def operands(scheme: str, tensors: Sequence[Tensor]) -> Operands:
    """Operands from the tensors of a weight, in the order of `scheme`, one of FORMATS. Called for each product."""
    by_suffix = dict(zip(_suffixes(scheme), tensors, strict=True))
    weight, scale, zero = by_suffix["weight"], by_suffix["weight_scale"], by_suffix.get("weight_zero_point")
    columns, kind = by_suffix.get("columns"), FORMATS[scheme]
    groups = scale.shape[1] if scale.ndim == 2 else 1
    if scheme == fp8_scheme.BLOCK_NAME:
        return Operands(kind, weight, None, scale, zero, columns, groups, fp8_scheme.BLOCK, fp8_scheme.BLOCK)
    is_row_scale = groups == 1 and scheme not in (fp4_scheme.MXFP4_NAME, fp4_scheme.NVFP4_NAME)
    row_scale, group_scale = (scale, None) if is_row_scale else (by_suffix.get("weight_global_scale"), scale)
    k = weight.shape[1] * (2 if kind in TWO_PER_BYTE else 1)
    is_interleaved = scheme in int4_scheme.INTERLEAVED_NAMES
    return Operands(kind, weight, row_scale, group_scale, zero, columns, groups, k // groups, 1, is_interleaved)
