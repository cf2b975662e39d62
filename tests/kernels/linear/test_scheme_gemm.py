"""The GEMM of quantised weights: split columns, and that values made by PTX equal those of the plain form."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tcdeploy.kernels.linear.scheme_codes import _code_floats, _code_values, _plain_floats, _plain_values
from tcdeploy.kernels.linear.scheme_gemm import fit_splits
from tcdeploy.kernels.linear.scheme_tiles import M64_N64_S4, MAX_GEMM_ROWS, SCHEME_GEMM_TILES
from tests.kernels.linear.scheme_cases import assert_product_agrees, each_case, product, run
from tests.triton_tools import device

__all__ = ["device"]


@each_case
@pytest.mark.parametrize("form", ["added", "gated"])
@pytest.mark.parametrize("k", [384, 512])
def test_split_columns_agree(case: str, form: str, k: int, device: str) -> None:
    """384 columns have two equal parts of 64, and 512 have four. The rows are those of two tiles."""
    x, tensors, extras = product(case, 70, form, device=device, k=k)
    tile = SCHEME_GEMM_TILES[M64_N64_S4]
    assert_product_agrees(case, run(case, x, tensors, extras, tile=tile), x, tensors, extras, tile)


@pytest.mark.parametrize(("splits", "steps", "fitted"), [(4, 64, 4), (4, 6, 2), (4, 7, 1), (1, 64, 1)])
def test_columns_are_split_into_equal_parts(splits: int, steps: int, fitted: int) -> None:
    assert fit_splits(splits, steps) == fitted


def test_a_tile_covers_the_rows_of_the_largest_product() -> None:
    assert max(tile.block_m for tile in SCHEME_GEMM_TILES) == MAX_GEMM_ROWS


@triton.jit
def both_forms_kernel(out, codes, zeros, FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Writes the values of 256 codes by PTX and in the plain form: [form, low or high, code]."""
    code = tl.arange(0, 256)[None, None, :]
    bytes_ = tl.load(codes + code)
    zero = tl.load(zeros + code) if HAS_ZEROS else None
    DTYPE: tl.constexpr = out.dtype.element_ty
    if tl.float32 == DTYPE:
        low, high = _code_floats(bytes_, FORMAT)
        plain_low, plain_high = _plain_floats(bytes_, FORMAT)
    else:
        low, high = _code_values(bytes_, zero, FORMAT, DTYPE)
        plain_low, plain_high = _plain_values(bytes_, zero, FORMAT, DTYPE)
    tl.store(out + code, low)
    tl.store(out + 256 + code, high)
    tl.store(out + 512 + code, plain_low)
    tl.store(out + 768 + code, plain_high)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("format", "has_zeros"), [("int4", False), ("int4", True), ("e2m1", False)])
def test_ptx_and_the_plain_form_make_the_same_values(format: str, has_zeros: bool, dtype: torch.dtype) -> None:
    codes: Tensor = torch.arange(256, dtype=torch.uint8, device="cuda")
    out = torch.full((2, 2, 256), float("nan"), dtype=dtype, device="cuda")
    both_forms_kernel[(1,)](out, codes, codes % 17, format, has_zeros)
    assert torch.equal(out[0], out[1])
