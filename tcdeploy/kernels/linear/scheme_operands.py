"""The tensors of a quantised weight by their use in the kernels."""

from __future__ import annotations

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

    @property
    def per_byte(self) -> int:
        """Columns in a byte."""
        return 2 if self.format in ("int4", "e2m1") else 1

    @property
    def k(self) -> int:
        return self.weight.shape[-1] * self.per_byte

    @property
    def is_plain_int4(self) -> bool:
        """Whether a value is its code minus 8, and groups are multiples of 128 columns: for register_gemm.py."""
        return self.format == "int4" and self.zero is None and self.group % REGISTER_BLOCK_K == 0


def operands(scheme: str, tensors: Sequence[Tensor]) -> Operands:
    """The tensors of a weight in a scheme of FORMATS, in the scheme's order, by their use."""
    by_suffix = dict(zip((item.suffix for item in SCHEMES[scheme].tensors), tensors, strict=True))
    weight, scale = by_suffix["weight"], by_suffix["weight_scale"]
    zero, columns = by_suffix.get("weight_zero_point"), by_suffix.get("columns")
    groups = scale.shape[1] if scale.ndim == 2 else 1
    is_blocks = scheme == fp8_scheme.BLOCK_NAME
    is_row_scale = groups == 1 and not is_blocks and scheme not in (fp4_scheme.MXFP4_NAME, fp4_scheme.NVFP4_NAME)
    row_scale, group_scale = (scale, None) if is_row_scale else (by_suffix.get("weight_global_scale"), scale)
    found = Operands(FORMATS[scheme], weight, row_scale, group_scale, zero, columns, groups, 0, 1)
    if is_blocks:
        return found._replace(group=fp8_scheme.BLOCK, row_block=fp8_scheme.BLOCK)
    return found._replace(group=found.k // groups)
