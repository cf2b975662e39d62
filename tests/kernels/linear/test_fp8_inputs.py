"""Inputs that are quantised to FP8: the codes and scales of the kernel, and products with them.

Expected values are computed in float64 from definitions that are written out here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.linear.fp8_inputs import (
    QuantisedInputs,
    fp8_linear,
    quantised,
    scaled_product,
)
from tcdeploy.kernels.linear.scheme_linear import scheme_linear
from tcdeploy.planning.schemes import SCHEMES
from tests.kernels.linear.matmul_cases import assert_agrees, rand, relative_error
from tests.kernels.linear.scheme_cases import weight_tensors
from tests.kernels.linear.test_scheme_kernel import spilled_bytes
from tests.triton_tools import compile_for_hopper, record_launches

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


def expected_codes(scheme: str, x: Tensor) -> QuantisedInputs:
    """Codes [rows, k], and scales [groups, rows]: the largest of a group becomes 448."""
    groups = x.float().unflatten(1, (-1, GROUPS[scheme] or x.shape[1]))
    largest = groups.abs().amax(2).clamp(min=1e-12)
    factors = torch.full_like(largest, 448) / largest
    codes = (groups * factors[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return QuantisedInputs(codes.flatten(1), (largest / torch.full_like(largest, 448)).t())


def expected_inputs(scheme: str, x: Tensor) -> Tensor:
    """x after quantisation, in float64."""
    codes, scales = expected_codes(scheme, x)
    return codes.double() * scales.t().double().repeat_interleave(x.shape[1] // len(scales), 1)


def expected(scheme: str, x: Tensor, tensors: list[Tensor], bias: Tensor | None = None) -> Tensor:
    y = expected_inputs(scheme, x) @ SCHEMES[scheme].dequantise(tensors, torch.float64).T
    return (y if bias is None else y + bias.double()).to(x.dtype)


# The kernel


@each_scheme
@pytest.mark.parametrize("rows", [1, 5, 33, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_codes_and_scales_are_those_of_torch(scheme: str, rows: int, dtype: torch.dtype, device: str) -> None:
    x = inputs_of(scheme, rows, dtype, device)
    codes, scales = expected_codes(scheme, x)
    found = quantised(scheme, x)
    padded_rows = math.ceil(rows / 4) * 4 if scheme == "fp8_block" else rows
    assert found.codes.shape == (padded_rows, x.shape[1]) and found.scales.shape == (len(scales), padded_rows)
    assert torch.equal(found.codes[:rows].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scales[:, :rows], scales)
    assert not found.codes[rows:].view(torch.uint8).any(), "rows that are appended are zero"
    assert found.scales[:, rows:].isfinite().all()


@each_scheme
def test_columns_of_a_wider_matrix_are_quantised(scheme: str, device: str) -> None:
    x = inputs_of(scheme, 5, device=device)
    slices = torch.cat([x * 2, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]]
    assert torch.equal(quantised(scheme, slices).scales, quantised(scheme, x).scales)
    assert torch.equal(quantised(scheme, slices).codes.view(torch.uint8), quantised(scheme, x).codes.view(torch.uint8))


def test_all_columns_of_a_long_row_that_is_no_power_of_two_are_quantised(device: str) -> None:
    x = torch.full((2, 3072), 1.5, device=device)
    x[1, -1] = -6.0
    codes, scales = quantised("fp8_channel", x)
    assert scales.tolist() == [[pytest.approx(1.5 / 448), pytest.approx(6 / 448)]]
    assert (codes[0].float() == 448).all() and (codes[1, :-1].float() == 112).all() and codes[1, -1].float() == -448


@each_scheme
def test_zeros_and_values_below_the_smallest_scale_become_zeros(scheme: str, device: str) -> None:
    x = inputs_of(scheme, 4, torch.float32, device)
    x[1], x[2] = 0, 1e-30
    codes, scales = quantised(scheme, x)
    assert not codes[1:3].float().any() and codes[0].float().any()
    assert scales.isfinite().all() and (scales > 0).all()


@each_scheme
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_input_that_is_not_finite_makes_the_outputs_of_its_row_nan(scheme: str, value: float, device: str) -> None:
    x = inputs_of(scheme, 4, device=device)
    x[2, 7] = value
    codes, scales = quantised(scheme, x)
    assert codes[2].float().isnan().any() and codes[[0, 1, 3]].float().isfinite().all()
    assert scales[:, [0, 1, 3]].isfinite().all()
    y = fp8_linear(scheme, x.cpu(), tensors_of(scheme), None)
    assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


@each_scheme
def test_rounding_in_plain_torch_equals_the_codes_times_the_scales(scheme: str) -> None:
    x, fp8_inputs = inputs_of(scheme, 6), SCHEMES[scheme].fp8_inputs
    assert fp8_inputs is not None
    assert torch.equal(fp8_inputs.round(x.view(2, 3, -1)).view_as(x), expected_inputs(scheme, x).bfloat16())
    assert_close(fp8_inputs.round(x.float()).double(), expected_inputs(scheme, x), rtol=1e-6, atol=0)


@each_scheme
def test_the_kernel_is_compiled_once_for_all_numbers_of_rows_and_does_not_spill(
    scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    for rows in (128, 129, 1):
        quantised(scheme, torch.zeros(rows, 14336, dtype=torch.bfloat16))
    compiled = [compile_for_hopper(launch) for launch in launches]
    ptx = compiled[0].asm["ptx"]
    assert {item.asm["ptx"] for item in compiled} == {ptx}
    assert "ld.global.v4.b32" in ptx and spilled_bytes(ptx, tmp_path) == 0
    assert "st.global.v4.b32" in ptx or "st.global.v2.b32" in ptx
    assert "e4m3x2" in ptx, "codes are converted in hardware"


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
    ("fp8_channel", 48, 72, False), ("fp8_channel", 48, 1 << 17, False), ("fp8_block", 4096, 14336, True),
    ("fp8_block", 128, 512, True), ("fp8_block", 128, 640, False), ("fp8_block", 576, 7168, False),
    ])  # fmt: skip
def test_weights_whose_inputs_may_be_quantised(scheme: str, n: int, k: int, is_taken: bool) -> None:
    fp8_inputs = SCHEMES[scheme].fp8_inputs
    assert fp8_inputs is not None and fp8_inputs.takes(n, k) == is_taken


def test_other_schemes_keep_inputs_of_16_bits() -> None:
    assert {name for name, scheme in SCHEMES.items() if scheme.fp8_inputs is not None} == {*GROUPS}


@each_scheme
@each_odd_number_of_rows
@pytest.mark.parametrize("has_bias", [False, True])
def test_torch_accepts_the_layouts_of_codes_and_scales(
    scheme: str, rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch checks meta tensors as it checks those on a GPU."""
    record_launches(monkeypatch)
    n, k = SIZES[scheme]
    inputs = QuantisedInputs(*(item.to("meta") for item in quantised(scheme, torch.zeros(rows, k))))
    bias = torch.empty(n, dtype=torch.bfloat16, device="meta") if has_bias else None
    y = scaled_product(scheme, inputs, tensors_of(scheme, "meta"), bias, rows)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((rows, n), torch.bfloat16, True)


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
