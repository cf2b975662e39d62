"""The kernels of quantised weights agree with the dequantised weight in float64, for each scheme and epilogue.

The values of a weight are exact in the kernels, and sums are float32, so the tolerance is that of the output's
rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.linear.int4_scheme import INTERLEAVED_NAMES
from tcdeploy.kernels.linear.scheme_linear import KERNELS
from tcdeploy.kernels.linear.scheme_matmul import (
    dequantised,
    dequantised_matmul,
    fused_scheme_linear,
    is_fusable,
    matmul,
)
from tcdeploy.kernels.linear.scheme_operands import operands
from tcdeploy.kernels.linear.scheme_tiles import (
    M64_N128,
    MAX_SUMS,
    N8_B2048,
    N64_K256,
    SCHEME_GEMM_TILES,
    SCHEME_GEMV_TILES,
    SCHEME_SKINNY_GEMM_TILES,
    choose_tile,
    fit_skinny_gemm,
)
from tcdeploy.planning.schemes import SCHEMES
from tests.kernels.linear.matmul_cases import (
    EPS,
    assert_agrees,
    assert_reads_only,
    rand,
)
from tests.kernels.linear.scheme_cases import (
    CASES,
    FORMS,
    MAIN_CASES,
    K,
    assert_product_agrees,
    each_case,
    each_main_case,
    product,
    reference,
    rows_of,
    run,
    weight_tensors,
)
from tests.triton_tools import triton_interpreter

TILES = (*SCHEME_GEMV_TILES, *SCHEME_SKINNY_GEMM_TILES, *SCHEME_GEMM_TILES)

# Arithmetic


def is_quick(case: str, rows: int, form: str) -> bool:
    """Weights that are not in MAIN_CASES have one form per kernel by default, and one with a norm."""
    pairs = ((1, "added"), (1, "normed and gated"), (5, "gated"), (33, "added"))
    return (rows, form) in pairs or (case in MAIN_CASES and rows not in (2, 16))


@pytest.mark.parametrize(
    ("case", "rows", "form"),
    [
        pytest.param(case, rows, form, marks=() if is_quick(case, rows, form) else pytest.mark.long)
        for case in CASES
        for rows in (1, 2, 5, 16, 33)
        for form in FORMS
        if rows == 1 or "normed" not in form
    ],
)
def test_every_form_agrees_and_writes_only_its_rows(
    case: str, rows: int, form: str, device: str, poisoned_outputs: list[Tensor]
) -> None:
    x, tensors, extras = product(case, rows, form, device=device)
    assert_product_agrees(case, run(case, x, tensors, extras), x, tensors, extras)
    assert poisoned_outputs[0].shape[1] == rows_of(case) // (2 if extras["gated"] else 1)
    assert poisoned_outputs[0][rows:].isnan().all(), "rows past the batch were written"


@each_case
@pytest.mark.parametrize("rows", [1, 5])
def test_inputs_may_be_float16_and_slices(case: str, rows: int, device: str) -> None:
    x, tensors, extras = product(case, rows, "plain", torch.float16, device)
    packed = torch.cat([x * 2, x, x], 1)
    bias = rand(rows_of(case), dtype=torch.float16, device=device)
    for columns in (packed[:, K : 2 * K], torch.cat([x[:, :3], packed], 1)[:, K + 3 : 2 * K + 3]):
        extras["addend"] = bias
        assert_agrees(run(case, columns, tensors, extras), reference(case, x, tensors, extras))


@each_main_case
@pytest.mark.parametrize(
    "tile", [*SCHEME_GEMV_TILES, *SCHEME_SKINNY_GEMM_TILES, *SCHEME_GEMM_TILES], ids=lambda tile: tile.name
)
def test_every_tile_agrees(case: str, tile: Any, device: str) -> None:
    x, tensors, extras = product(case, 1 if tile in SCHEME_GEMV_TILES else 9, "gated", device=device, n=64, k=512)
    assert_product_agrees(case, run(case, x, tensors, extras, tile=tile), x, tensors, extras, tile)


@each_case
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_the_kernels_read_only_their_inputs(case: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permuted inputs are a copy. The tile of several rows has more rows than the weight."""
    if "permuted" in case:
        return
    x, tensors, extras = product(case, rows, "added")
    tiles = {1: SCHEME_GEMV_TILES[N8_B2048], 5: SCHEME_SKINNY_GEMM_TILES[N64_K256], 70: SCHEME_GEMM_TILES[M64_N128]}
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, x, *tensors, extras["addend"]) as loads:
        assert_product_agrees(case, run(case, x, tensors, extras, tile=tiles[rows]), x, tensors, extras, tiles[rows])
    assert sum(loads) >= x.numel() + sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_codes_have_their_values(rows: int, dtype: torch.dtype, device: str) -> None:
    """One column of the input is 1 and the others are 0, so that the product is a column of the weight, exactly."""
    codes = torch.arange(256, dtype=torch.uint8)
    tensors = {
        "fp8_channel": [codes.view(torch.float8_e4m3fn), torch.full((256,), 0.5)],
        "int8": [codes.view(torch.int8), torch.full((256, 1), 0.5)],
        "int4_bfloat16": [codes, torch.full((256, 1), 0.5, dtype=torch.bfloat16)],
        "int4_float16_zeros": [codes, torch.full((256, 1), 0.5).half(), (codes % 17)[:, None]],
        "mxfp4": [codes, torch.full((256, 2), 128, dtype=torch.uint8)],
        "nvfp4": [codes, torch.full((256, 4), 2.0).to(torch.float8_e4m3fn), torch.full((256,), 0.5)],
    }
    x = torch.zeros(rows, 64, dtype=dtype)
    x[-1, 9] = 1
    for name, (codes_of_row, *scales) in tensors.items():
        is_fp8 = name == "fp8_channel"
        width = 64 if name in ("fp8_channel", "int8") else 32
        weight = codes_of_row.view(torch.uint8)[:, None].repeat(1, width)
        if is_fp8:
            weight[weight & 127 == 127] = 0  # NaN
        parts = [weight.view(codes_of_row.dtype).to(device), *(item.contiguous().to(device) for item in scales)]
        column = SCHEMES[name].dequantise(parts, dtype)[:, 9]
        tile = SCHEME_GEMV_TILES[N8_B2048] if rows == 1 else None
        assert_close(matmul(name, x.to(device), parts, tile=tile)[-1], column, rtol=0, atol=0)


def test_special_exponents_of_mxfp4(device: str) -> None:
    """0 is 2**-127, and 255 is NaN."""
    weight = torch.full((16, 32), 0x22, dtype=torch.uint8)  # ones
    scale = torch.tensor([[0, 127]] * 8 + [[255, 127]] * 8, dtype=torch.uint8)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 0] = 2.0**120
    for rows in (1, 2):
        y = matmul("mxfp4", x.repeat(rows, 1).to(device), [weight.to(device), scale.to(device)])
        assert (y[:, :8] == 2.0**-7).all() and y[:, 8:].isnan().all()


# Mistakes that the tolerance must not hide


def changed(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda tensors: [change(tensor) if i == index else tensor for i, tensor in enumerate(tensors)]


def of_bytes(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: (
        change(tensor.view(torch.uint8)).view(tensor.dtype) if tensor.itemsize == 1 else change(tensor)
    )


def next_along(dim: int) -> Callable[[Tensor], Tensor]:
    return of_bytes(lambda tensor: tensor.roll(-1, dim))


def swap_nibbles(weight: Tensor) -> Tensor:
    return weight << 4 | weight >> 4


def dropped(scale: Tensor) -> Tensor:
    return torch.full_like(scale.float(), 127 if scale.dtype == torch.uint8 else 1).to(scale.dtype)


FAULTS = {
    "scale dropped": ([*CASES], changed(1, dropped)),
    "scale of the next row": ([*CASES], changed(1, next_along(0))),
    "scale of the next group": (
        ["fp8_block", "int8 by group", "int4", "int4 with zeros", "int4 permuted", "mxfp4", "nvfp4"],
        changed(1, next_along(1)),
    ),
    "nibbles swapped": ([case for case in CASES if "4" in case], changed(0, swap_nibbles)),
    "zero point off by one": ([case for case in CASES if "zeros" in case], changed(2, lambda zero: zero + 1)),
    "zero point of the next group": (["int4 with zeros"], changed(2, next_along(1))),
    "zero point of the next row": (["int4 by row"], changed(2, next_along(0))),
    "permutation ignored": (
        [case for case in CASES if "permuted" in case],
        lambda tensors: [*tensors[:-1], torch.arange(len(tensors[-1]), dtype=torch.int32)],
    ),
    "permutation inverted": (
        [case for case in CASES if "permuted" in case],
        lambda tensors: [*tensors[:-1], tensors[-1].argsort().int()],
    ),
    "global scale dropped": (["nvfp4"], changed(2, dropped)),
    "global scale of the next row": (["nvfp4"], changed(2, next_along(0))),
    "signs ignored": (["mxfp4", "nvfp4"], changed(0, lambda weight: weight & 0x77)),
}


@functools.cache
def interpreted_product(case: str, rows: int) -> Tensor:
    """The kernel's result, of the arguments of `product`; the same for all mistakes."""
    with pytest.MonkeyPatch.context() as patch, triton_interpreter(patch):
        return run(case, *product(case, rows, "plain"))


@pytest.mark.parametrize(("fault", "case"), [(fault, case) for fault, (cases, _) in FAULTS.items() for case in cases])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_mistake_exceeds_the_tolerance(fault: str, case: str, rows: int) -> None:
    x, tensors, extras = product(case, rows, "plain")
    y = interpreted_product(case, rows)
    assert_agrees(y, reference(case, x, tensors, extras))
    with pytest.raises(AssertionError):
        assert_agrees(y, reference(case, x, FAULTS[fault][1](tensors), extras))


# The op, and where the kernels are used


@each_case
@pytest.mark.parametrize("form", FORMS)
def test_on_a_cpu_the_op_agrees(case: str, form: str) -> None:
    x, tensors, extras = product(case, 1, form)
    arguments = (x, tensors, extras.get("addend"), extras["gated"], extras.get("norm"), EPS, CASES[case][0])
    assert_agrees(fused_scheme_linear(*arguments), reference(case, x, tensors, extras))
    has_fp8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors)  # which test_schema cannot compare
    if form in ("added", "normed and gated"):
        checks = ("test_schema",) if not has_fp8 else ()
        checks += ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(fused_scheme_linear.overload, arguments, test_utils=checks)


def test_every_scheme_has_a_kernel_for_decode_batches_on_a_gpu() -> None:
    assert KERNELS.keys() == SCHEMES.keys()
    for scheme, kernels in KERNELS.items():
        rows = [(item.device, item.min_rows, item.max_rows) for item in kernels]
        max_rows = None if scheme in INTERLEAVED_NAMES else 128  # None: it depends on the GPU
        assert rows == [("cuda", 1, max_rows), ("cuda", 1, None)], "the second writes the dense weight"


@pytest.mark.parametrize(
    ("case", "rows", "n", "k", "dtype", "gated", "is_supported"),
    [
        ("fp8_channel", 1, 160, 320, torch.bfloat16, False, True),
        ("fp8_channel", 128, 160, 320, torch.float16, True, True),
        ("fp8_channel", 129, 160, 320, torch.bfloat16, False, False),
        ("fp8_channel", 1, 160, 320, torch.float32, False, False),
        ("fp8_block", 1, 168, 320, torch.bfloat16, False, False),
        ("fp8_block", 1, 160, 336, torch.bfloat16, False, False),
        ("mxfp4", 1, 176, 320, torch.bfloat16, False, True),
        ("mxfp4", 1, 176, 320, torch.bfloat16, True, False),
        ("mxfp4", 1, 160, 352, torch.bfloat16, False, False),
        ("int4", 1, 160, 320, torch.bfloat16, False, True),
    ],
)
def test_shapes_that_the_kernels_do_not_take(
    case: str, rows: int, n: int, k: int, dtype: torch.dtype, gated: bool, is_supported: bool
) -> None:
    assert is_fusable(CASES[case][0], rows, dtype, weight_tensors(case, n, k), gated) == is_supported


@pytest.mark.parametrize(("rows", "sizes"), [(1, [960, 192, 96, 48, 32, 16]), (2, [960, 192, 96, 32])])
def test_groups_that_the_kernels_do_not_take(rows: int, sizes: list[int]) -> None:
    weight, columns = torch.zeros(16, 960, dtype=torch.int8), 960
    counts = [groups for groups in (1, 5, 10, 20, 30, 60, 120) if _is_int8_fusable(rows, weight, groups)]
    assert [columns // groups for groups in counts] == sizes


def _is_int8_fusable(rows: int, weight: Tensor, groups: int) -> bool:
    return is_fusable("int8", rows, torch.bfloat16, [weight, torch.ones(len(weight), groups)])


def test_tensors_that_are_not_contiguous_are_not_fusable() -> None:
    weight, scale = weight_tensors("fp8_channel")
    assert not is_fusable("fp8_channel", 1, torch.bfloat16, [weight.t().contiguous().t(), scale])


def test_the_sums_of_a_skinny_gemm_fit_registers() -> None:
    for tile in SCHEME_SKINNY_GEMM_TILES:
        for padded_rows in (8, 16, 32, 64):
            for group in (16, 32, 64, 96, 128, 4096):
                block_n, width, slices, num_stages = fit_skinny_gemm(tile, padded_rows, 12288, group)
                assert block_n * slices * padded_rows <= MAX_SUMS * tile.num_warps or slices == 1
                assert slices == 1 or slices >= tile.num_warps
                assert (
                    (group % width == 0 or group == 16)
                    and width >= 32
                    and block_n % 16 == 0
                    and 12288 % (width * slices) == 0
                )
                assert 3 <= num_stages <= 8


@pytest.mark.parametrize(("rows", "n", "names"), [
    (1, 2048, ("n2_b2048", "n2_b2048")), (1, 4096, ("n4_b2048", "n8_b2048")), (8, 4096, ("n16_k512", "n16_k512")),
    (8, 28672, ("n16_k1024", "n32_k512")), (9, 4096, ("n16_k1024", "n32_k512_s3")),
    (16, 28672, ("n16_k256", "n32_k512_s3")), (17, 28672, ("n64_k256", "n64_k256")),
    (33, 4096, ("n64_k256", "m64_n64_s4")), (33, 8448, ("n64_k128", "m64_n128")),
    (65, 4096, ("m128_n64_s4", "m128_n64_s4")), (128, 8448, ("m128_n128", "m128_n128")),
])  # fmt: skip
def test_the_tile_depends_on_rows_width_and_bits(rows: int, n: int, names: tuple[str, str]) -> None:
    assert tuple(choose_tile(rows, n, 4096, per_byte, False).name for per_byte in (1, 2)) == names


@pytest.mark.parametrize(("rows", "n", "k", "name"), [
    (1, 2048, 4096, "n2_b2048"), (1, 4096, 4096, "n8_b2048"), (1, 6144, 4096, "n8_b1024"), (2, 4096, 4096, "f64_s4"),
    (64, 6144, 4096, "f64_s4"), (32, 4096, 14336, "f128_s8"), (33, 4096, 14336, "f64_s4"), (16, 28672, 4096, "f64_s4"),
    (17, 28672, 4096, "f128u2"), (33, 28672, 4096, "f128_v"), (65, 6144, 4096, "f128_v_s8"),
    (128, 4096, 14336, "f128_v_s8"), (16, 57344, 8192, "f64_s4"),
])  # fmt: skip
def test_tiles_of_interleaved_int4(rows: int, n: int, k: int, name: str) -> None:
    assert choose_tile(rows, n, k, 2, True).name == name


def test_operands_name_the_use_of_each_tensor() -> None:
    uses = {case: operands(CASES[case][0], weight_tensors(case)) for case in CASES}
    assert {case: (item.format, item.group, item.groups, item.row_block) for case, item in uses.items()} == {
        "fp8_channel": ("fp8", 192, 1, 1),
        "fp8_block": ("fp8", 128, 2, 128),
        "int8 by row": ("int8", 192, 1, 1),
        "int8 by group": ("int8", 64, 3, 1),
        "int4 by row": ("int4", 192, 1, 1),
        "int4": ("int4", 32, 6, 1),
        "int4 with zeros": ("int4", 64, 3, 1),
        "int4 permuted": ("int4", 64, 3, 1),
        "int4 permuted with zeros": ("int4", 96, 2, 1),
        "mxfp4": ("e2m1", 32, 6, 1),
        "nvfp4": ("e2m1", 16, 12, 1),
    }


# On a GPU


@pytest.mark.gpu
@each_case
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 64, 100])
def test_real_shapes_agree_on_a_gpu(case: str, rows: int) -> None:
    """Also as the op `scheme_linear`, which uses the kernels."""
    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336)):
        x, tensors, extras = product(case, rows, "plain", device="cuda", n=n, k=k)
        torch.cuda.synchronize()  # the kernel may read the weights before earlier kernels end
        name = CASES[case][0]
        y = torch.ops.tcdeploy.scheme_linear(x, tensors, None, name)
        assert_product_agrees(case, y, x, tensors, extras)
        assert torch.equal(y, run(case, x, tensors, extras))


# More rows than the kernels take


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_dense_weight_is_that_of_the_scheme(case: str, dtype: torch.dtype, device: str) -> None:
    """All bits are equal, except that nvfp4 multiplies its two scales first.

    Triton's interpreter truncates to bfloat16 instead of rounding.
    """
    for n, k in ((0, K), (24, 576)):
        tensors = [tensor.to(device) for tensor in weight_tensors(case, n, k)]
        expected = SCHEMES[CASES[case][0]].dequantise(tensors, dtype)
        columns = operands(CASES[case][0], tensors).columns
        expected = expected if columns is None else expected[:, columns]
        dense = dequantised(CASES[case][0], tensors, dtype)
        rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-23}[dtype]
        is_exact = case != "nvfp4" and dtype != torch.bfloat16
        assert_close(dense, expected, rtol=0 if is_exact else rounding, atol=0)


@each_case
def test_many_rows_are_multiplied_by_the_dense_weight(case: str, device: str) -> None:
    x, tensors, extras = product(case, 96, "plain", device=device)
    bias = rand(rows_of(case), device=device)
    y = dequantised_matmul(CASES[case][0], x, tensors, bias)
    precise = reference(case, x, tensors, {**extras, "addend": bias})
    assert (y - precise).norm() < 0.01 * precise.norm(), "the dense weight has 8 bits of mantissa"
