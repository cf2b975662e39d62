"""Weights in the schemes of the package, and products with them, shared by the tests of their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers the schemes
from tcdeploy.kernels.linear.register_gemm import fit_parts, fit_unroll
from tcdeploy.kernels.linear.scheme_matmul import matmul
from tcdeploy.kernels.linear.scheme_operands import operands
from tcdeploy.kernels.linear.scheme_tiles import REGISTER_BLOCK_K, RegisterGemmTile, SchemeGemmTile, Tile, choose_tile
from tcdeploy.planning.schemes import SCHEMES
from tests.kernels.linear.matmul_cases import EPS, assert_agrees, expected, rand

N, K = 32, 192
BLOCK_N = 160  # rows of a weight in blocks, of which the last are partial
# Schemes, and the columns of a group where the shapes say them.
CASES = {
    "fp8_channel": ("fp8_channel", 0),
    "fp8_block": ("fp8_block", 0),
    "int8 by row": ("int8", K),
    "int8 by group": ("int8", 64),
    "int4 by row": ("int4_bfloat16_zeros", K),
    "int4": ("int4_bfloat16", 32),
    "int4 with zeros": ("int4_float16_zeros", 64),
    "int4 permuted": ("int4_float32_permuted", 64),
    "int4 permuted with zeros": ("int4_float16_zeros_permuted", 96),
    "mxfp4": ("mxfp4", 0),
    "nvfp4": ("nvfp4", 0),
}
INTERLEAVED = {  # they need other numbers of columns than K, multiples of 128
    "int4 in groups of 128": ("int4_bfloat16_interleaved", 128),
    "int4 in groups of 256": ("int4_float16_interleaved", 256),
    "int4 in groups of 768": ("int4_bfloat16_interleaved", 768),
    "int4 permuted in groups of 128": ("int4_float32_permuted_interleaved", 128),
}
SCHEME_OF = CASES | INTERLEAVED
FORMS = {  # addend, gated, norm
    "plain": (False, False, False),
    "added": (True, False, False),
    "gated": (False, True, False),
    "normed": (False, False, True),
    "normed and added": (True, False, True),
    "normed and gated": (False, True, True),
}
MAIN_CASES = ("fp8_channel", "fp8_block", "int4 with zeros", "nvfp4")  # one of each way to read values and scales
each_case = pytest.mark.parametrize("case", CASES)
each_main_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in MAIN_CASES else pytest.mark.long) for case in CASES]
)


def rows_of(case: str) -> int:
    return BLOCK_N if case == "fp8_block" else N


def weight_tensors(case: str, n: int = 0, k: int = K) -> list[Tensor]:
    """A weight [n or rows_of(case), k] whose scales, zero points and columns differ much from each other."""
    name, group = SCHEME_OF[case]
    n = n or rows_of(case)
    generator = torch.Generator().manual_seed(5)
    shapes = [item.shape(n, k) for item in SCHEMES[name].tensors]
    groups = k // (group if k % max(group, 1) == 0 else k) if group else 0
    return [
        _random_tensor(item.suffix, item.dtype, [groups if size is None else size for size in shape], generator)
        for item, shape in zip(SCHEMES[name].tensors, shapes, strict=True)
    ]


def _random_tensor(suffix: str, dtype: str, shape: list[int], generator: torch.Generator) -> Tensor:
    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if suffix == "columns":
        return torch.randperm(shape[0], generator=generator).int()
    if suffix == "weight_zero_point":
        return integers(0, 17).to(torch.uint8)
    if suffix == "weight" and dtype == "float8_e4m3fn":
        return torch.randn(shape, generator=generator).mul(50).clamp(-448, 448).to(torch.float8_e4m3fn)
    if suffix == "weight":
        return integers(*((-128, 128) if dtype == "int8" else (0, 256))).to(getattr(torch, dtype))
    if dtype == "uint8":  # exponents
        return integers(118, 124).to(torch.uint8)
    return torch.exp2(torch.rand(shape, generator=generator) * 5 - 8).to(getattr(torch, dtype))


def product(
    case: str, rows: int, form: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", n: int = 0, k: int = K
) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """x, the tensors of a weight, and the keyword arguments of `form`."""
    added, gated, normed = FORMS[form]
    n = n or rows_of(case)
    torch.manual_seed(rows)
    tensors = [tensor.to(device) for tensor in weight_tensors(case, n, k)]
    size = SCHEMES[SCHEME_OF[case][0]].dequantise(tensors, torch.float32).std().item()
    x, extras = rand(rows, k, dtype=dtype, device=device) / (size * k**0.5), {"gated": gated}
    if added:
        extras["addend"] = rand(rows, n, dtype=dtype, device=device) * 3
    if normed:
        extras |= {"norm": rand(k, dtype=dtype, device=device) / size}
        x = (x * size).to(dtype)
    return x.to(dtype), tensors, extras


def run(case: str, x: Tensor, tensors: list[Tensor], extras: dict[str, Any], **options: Any) -> Tensor:
    return matmul(SCHEME_OF[case][0], x, tensors, **extras, **({"eps": EPS} if "norm" in extras else {}), **options)


def reference(case: str, x: Tensor, tensors: list[Tensor], extras: dict[str, Any]) -> Tensor:
    return expected(x, SCHEMES[SCHEME_OF[case][0]].dequantise(tensors, torch.float64), **extras)


def product_of_rounded_parts(
    x: Tensor, values: Tensor, tile: RegisterGemmTile, gated: bool = False, addend: Tensor | None = None
) -> Tensor:
    """`sum_of_rounded_parts` with the parts into which the register GEMM splits the columns."""
    n, k = values.shape
    parts, size = fit_parts(tile, len(x), n, k), REGISTER_BLOCK_K * fit_unroll(tile, k)
    bounds = [part * (k // size) // parts * size for part in range(parts + 1)]
    return sum_of_rounded_parts(x, values, bounds, gated, addend)


def sum_of_rounded_parts(
    x: Tensor, values: Tensor, bounds: Sequence[int], gated: bool = False, addend: Tensor | None = None
) -> Tensor:
    """As `expected`, with the weight rounded to x's dtype. Sums of several parts of the columns are rounded too.

    On a CPU bfloat16 is truncated, as in Triton's interpreter.
    """

    def rounded(tensor: Tensor) -> Tensor:
        if x.is_cuda or x.dtype != torch.bfloat16:
            return tensor.to(x.dtype).double()
        return (tensor.float().view(torch.int32) & ~0xFFFF).view(torch.float32).double()

    inputs, weight = x.double(), rounded(values)
    parts = [inputs[:, first:end] @ weight[:, first:end].T for first, end in pairwise(bounds)]
    y = parts[0] if len(parts) == 1 else torch.stack([rounded(part) for part in parts]).sum(0)
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = gate * gate.sigmoid() * up
    return rounded(y if addend is None else y + addend.double()).to(x.dtype)


def assert_product_agrees(
    case: str, y: Tensor, x: Tensor, tensors: list[Tensor], extras: dict[str, Any], tile: Tile | None = None
) -> None:
    """Within the rounding of y. GEMM tiles also round the values of the weight, as a dense copy would, and some parts.

    Those of MXFP4 are exact in every dtype.
    """
    precise = reference(case, x, tensors, extras)
    weight = operands(SCHEME_OF[case][0], tensors)
    values = SCHEMES[SCHEME_OF[case][0]].dequantise(tensors, torch.float32)
    rounded = values.to(x.dtype).double()
    chosen = tile or choose_tile(len(x), len(weight.weight), weight.k, weight.per_byte, weight.is_register_operand)
    rounds_values = isinstance(chosen, SchemeGemmTile) or (
        isinstance(chosen, RegisterGemmTile) and chosen.scales_values
    )
    if not rounds_values or torch.equal(rounded, values.double()):
        assert_agrees(y, precise)
        return
    # Triton's interpreter truncates to bfloat16, so that errors add up.
    limit = 0.012
    if isinstance(chosen, RegisterGemmTile) and fit_parts(chosen, len(x), *rounded.shape) > 1:  # sums are rounded too
        of_copy = product_of_rounded_parts(x, values, chosen, **extras) - precise
        limit = 1.2 * float(of_copy.float().norm() / precise.float().norm())
    elif y.is_cuda:
        of_copy = expected(x, rounded, **extras) - precise
        limit = 1.2 * float(of_copy.float().norm() / precise.float().norm())
    assert (y - precise).float().norm() < limit * precise.float().norm()
