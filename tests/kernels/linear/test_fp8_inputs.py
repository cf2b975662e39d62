"""Inputs that are quantised to FP8: codes and scales, and products with them.

Expected values are computed in float64 from definitions that are written out here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.linear.fp8_inputs import fp8_linear, fp8_product, scaled_product
from tcdeploy.kernels.linear.fp8_scheme import quantise_inputs
from tcdeploy.kernels.linear.scheme_linear import scheme_linear
from tcdeploy.planning.schemes import SCHEMES
from tests.kernels.linear.matmul_cases import assert_agrees, rand, relative_error
from tests.kernels.linear.scheme_cases import weight_tensors

GROUPS = {"fp8_channel": 0, "fp8_block": 128}  # columns that share a scale; 0: all
SIZES = {"fp8_channel": (32, 192), "fp8_block": (256, 512)}  # n, k
each_scheme = pytest.mark.parametrize("scheme", GROUPS)
each_odd_number_of_rows = pytest.mark.parametrize("rows", [129, 130, 257])
ERROR_LIMIT = 4e-3  # of the norm of a product: roundings to bfloat16


def inputs_of(scheme: str, rows: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    """Rows and groups whose largest values differ much from each other."""
    torch.manual_seed(rows)
    k = SIZES[scheme][1]
    sizes = torch.exp2(torch.rand(rows, k // 64) * 12 - 6).repeat_interleave(64, 1)
    return (torch.randn(rows, k) * sizes).to(device, dtype)


def tensors_of(scheme: str, device: str = "cpu") -> list[Tensor]:
    return [tensor.to(device) for tensor in weight_tensors(scheme, *SIZES[scheme])]


def expected_codes(scheme: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, k], and scales [rows, groups]: the largest of a group becomes 448."""
    groups = x.float().unflatten(1, (-1, GROUPS[scheme] or x.shape[1]))
    largest = groups.abs().amax(2).clamp(min=1e-12)
    codes = (groups * (448 / largest)[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(1), largest / 448


def expected_inputs(scheme: str, x: Tensor) -> Tensor:
    """x after quantisation, in float64."""
    codes, scales = expected_codes(scheme, x)
    return codes.double() * scales.double().repeat_interleave(x.shape[1] // scales.shape[1], 1)


def expected(scheme: str, x: Tensor, tensors: list[Tensor], bias: Tensor | None = None) -> Tensor:
    y = expected_inputs(scheme, x) @ SCHEMES[scheme].dequantise(tensors, torch.float64).T
    return (y if bias is None else y + bias.double()).to(x.dtype)


# Codes and scales


@each_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_largest_value_of_a_group_becomes_the_largest_code(scheme: str, dtype: torch.dtype) -> None:
    x = inputs_of(scheme, 33, dtype)
    codes, scales = quantise_inputs(scheme, x.view(3, 11, -1))
    expected, expected_scales = expected_codes(scheme, x)
    assert torch.equal(codes.view(torch.uint8).view(33, -1), expected.view(torch.uint8))
    assert_close(scales.view(33, -1), expected_scales, rtol=2e-7, atol=0)
    groups = codes.float().view(33, scales.shape[-1], -1)
    assert (groups.abs().amax(2) == 448).all()


@each_scheme
def test_zeros_and_values_below_the_smallest_scale_become_zeros(scheme: str) -> None:
    x = inputs_of(scheme, 4, torch.float32)
    x[1], x[2] = 0, 1e-30
    codes, scales = quantise_inputs(scheme, x)
    assert not codes[1:3].float().any() and codes[0].float().any()
    assert scales.isfinite().all() and (scales > 0).all()


@each_scheme
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_input_that_is_not_finite_makes_the_outputs_of_its_row_nan(scheme: str, value: float, device: str) -> None:
    x = inputs_of(scheme, 20, device=device)
    x[2, 7] = value
    y = fp8_linear(scheme, x, tensors_of(scheme, device), None)
    assert y[2].isnan().all() and y[:2].isfinite().all() and y[3:].isfinite().all()


@each_scheme
def test_rounding_in_plain_torch_equals_the_codes_times_the_scales(scheme: str) -> None:
    x, fp8_inputs = inputs_of(scheme, 6), SCHEMES[scheme].fp8_inputs
    assert fp8_inputs is not None
    assert torch.equal(fp8_inputs.round(x.view(2, 3, -1)).view_as(x), expected_inputs(scheme, x).bfloat16())
    assert_close(fp8_inputs.round(x.float()).double(), expected_inputs(scheme, x), rtol=1e-6, atol=0)


# Products


@each_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_inputs_are_quantised_from_a_number_of_rows_on(scheme: str, dtype: torch.dtype) -> None:
    tensors, bias = tensors_of(scheme), rand(SIZES[scheme][0], dtype=dtype) * 100
    for rows in (7, 8, 9):
        x = inputs_of(scheme, rows, dtype)
        y = scheme_linear(x[None], tensors, bias, scheme, 8)[0]
        dense = SCHEMES[scheme].dequantise(tensors, torch.float64)
        exact = x.double() @ dense.T + bias.double()
        reference = expected(scheme, x, tensors, bias) if rows >= 8 else exact
        assert relative_error(y, reference) < (5e-3 if dtype == torch.bfloat16 else 1e-6)
        assert rows < 8 or relative_error(y, exact) > 1e-2, "rounding to FP8 can be seen"
        assert torch.equal(scheme_linear(x, tensors, bias, scheme), scheme_linear(x, tensors, bias, scheme, 0))


@each_scheme
@each_odd_number_of_rows
def test_products_agree_for_odd_numbers_of_rows(scheme: str, rows: int) -> None:
    x, tensors = inputs_of(scheme, rows), tensors_of(scheme)
    assert_agrees(scheme_linear(x, tensors, None, scheme, 128), expected(scheme, x, tensors))


FAULTS: dict[str, Any] = {
    "scale of inputs dropped": lambda x, tensors: (x / x.float().abs().amax(1, keepdim=True), tensors),
    "scale of weight dropped": lambda x, tensors: (x, [tensors[0], torch.ones_like(tensors[1])]),
    "scale of the next row of the weight": lambda x, tensors: (x, [tensors[0], tensors[1].roll(-1, 0)]),
    "rows off by one": lambda x, tensors: (x.roll(1, 0), tensors),
    "inputs not quantised": None,
}


@each_scheme
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_exceeds_the_tolerance(scheme: str, fault: str) -> None:
    x, tensors = inputs_of(scheme, 129), tensors_of(scheme)
    if FAULTS[fault] is None:
        y = scheme_linear(x, tensors, None, scheme)
    else:
        y = scheme_linear(*FAULTS[fault](x, tensors), None, scheme, 128)
    with pytest.raises(AssertionError):
        assert_agrees(y.to(x.dtype), expected(scheme, x, tensors))
    assert relative_error(y, expected(scheme, x, tensors)) > 2 * ERROR_LIMIT


@each_scheme
@pytest.mark.parametrize("has_bias", [False, True])
def test_opcheck_passes_on_both_sides_of_the_number_of_rows(scheme: str, has_bias: bool) -> None:
    tensors = tensors_of(scheme)
    bias = rand(SIZES[scheme][0]) if has_bias else None
    for x in (inputs_of(scheme, 4), inputs_of(scheme, 9), inputs_of(scheme, 10).view(2, 5, -1).transpose(0, 1)):
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(scheme_linear.overload, (x, tensors, bias, scheme, 8), test_utils=checks)


@pytest.mark.parametrize(("scheme", "n", "k", "is_taken"), [
    ("fp8_channel", 4096, 14336, True), ("fp8_channel", 48, 80, True), ("fp8_channel", 40, 80, False),
    ("fp8_channel", 48, 72, False), ("fp8_block", 4096, 14336, True),
    ("fp8_block", 128, 512, True), ("fp8_block", 128, 640, False), ("fp8_block", 576, 7168, False),
    ])  # fmt: skip
def test_weights_whose_inputs_may_be_quantised(scheme: str, n: int, k: int, is_taken: bool) -> None:
    fp8_inputs = SCHEMES[scheme].fp8_inputs
    assert fp8_inputs is not None and fp8_inputs.takes(n, k) == is_taken


def test_other_schemes_keep_inputs_of_16_bits() -> None:
    assert {name for name, scheme in SCHEMES.items() if scheme.fp8_inputs is not None} == {*GROUPS}


@each_scheme
def test_opcheck_of_the_product_of_codes(scheme: str) -> None:
    codes, scales = quantise_inputs(scheme, inputs_of(scheme, 6).view(2, 3, -1))
    for dtype in ("bfloat16", "float32"):
        arguments = (codes, scales if scheme == "fp8_block" else None, tensors_of(scheme), dtype)
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(fp8_product.overload, arguments, test_utils=checks)


@each_scheme
@each_odd_number_of_rows
def test_torch_accepts_the_layouts_of_codes_and_scales(scheme: str, rows: int) -> None:
    """torch checks meta tensors as it checks those on a GPU."""
    codes, scales = (item.to("meta") for item in quantise_inputs(scheme, torch.zeros(rows, SIZES[scheme][1])))
    applied = scales if scheme == "fp8_block" else None
    y = scaled_product(codes, applied, tensors_of(scheme, "meta"), torch.bfloat16)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((rows, SIZES[scheme][0]), torch.bfloat16, True)


@each_odd_number_of_rows
def test_scaled_mm_sums_codes_without_scales(rows: int) -> None:
    """torch has this product on a CPU too, but not that with scales of blocks."""
    x, tensors = inputs_of("fp8_channel", rows), tensors_of("fp8_channel")
    codes, _ = quantise_inputs("fp8_channel", x)
    sums = (codes.double() @ tensors[0].double().T).bfloat16()
    assert_agrees(scaled_product(codes, None, tensors, torch.bfloat16), sums)
    assert_agrees(fp8_product(codes, None, tensors, "bfloat16"), sums)


@pytest.mark.gpu
@each_scheme
@pytest.mark.parametrize("rows", [16, 128, 129, 130, 257, 2048])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_on_a_gpu_are_those_of_plain_torch(scheme: str, rows: int, has_bias: bool) -> None:
    """Also as the op, whose outputs of the same rows are equal bit by bit."""
    for n, k in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        torch.manual_seed(rows)
        x = torch.randn(rows, k, device="cuda").bfloat16() * torch.exp2(torch.rand(rows, 1, device="cuda") * 8 - 4)
        x = x.bfloat16()
        tensors = [tensor.cuda() for tensor in weight_tensors(scheme, n, k)]
        bias = torch.randn(n, device="cuda").bfloat16() * 100 if has_bias else None
        y = fp8_linear(scheme, x, tensors, bias)
        dense = SCHEMES[scheme].dequantise(tensors, torch.float64)
        precise = expected_inputs(scheme, x) @ dense.T + (0 if bias is None else bias.double())
        assert y.shape == (rows, n) and y.is_contiguous() and y.dtype == torch.bfloat16
        assert relative_error(y, precise) < ERROR_LIMIT
        assert relative_error(y, x.double() @ dense.T + (0 if bias is None else bias.double())) > 2 * ERROR_LIMIT
        assert torch.equal(torch.ops.tcdeploy.scheme_linear(x, tensors, bias, scheme, rows), y)


@pytest.mark.gpu
@each_scheme
def test_a_captured_product_replays_on_new_inputs(scheme: str) -> None:
    tensors = [tensor.cuda() for tensor in weight_tensors(scheme, 256, 512)]
    x = torch.randn(131, 512, device="cuda").bfloat16()
    fp8_linear(scheme, x, tensors, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp8_linear(scheme, x, tensors, None)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, fp8_linear(scheme, x, tensors, None))
