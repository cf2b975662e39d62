"""Interleaved int4 weights: their order, products of one row, the dense weight, and mistakes that tests must find."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.linear import scheme_matmul
from tcdeploy.kernels.linear.int4_scheme import interleave
from tcdeploy.kernels.linear.scheme_matmul import (
    dequantised,
    dequantised_matmul,
    fused_scheme_linear,
    is_fusable,
    matmul,
)
from tcdeploy.kernels.linear.scheme_operands import operands
from tcdeploy.kernels.linear.scheme_tiles import (
    MAX_INTERLEAVED_ROWS,
    N8_B1024,
    N8_B2048,
    SCHEME_GEMV_TILES,
    RegisterGemmTile,
    SchemeGemvTile,
    choose_tile,
)
from tcdeploy.kernels.linear.scheme_values import unpack_nibbles
from tcdeploy.planning.schemes import SCHEMES, checkpoint_scheme, linear_scheme
from tests.kernels.linear.matmul_cases import EPS, assert_agrees, pointers_used_before_wait, rand
from tests.kernels.linear.scheme_cases import (
    FORMS,
    INTERLEAVED,
    product,
    reference,
    run,
    weight_tensors,
)
from tests.triton_tools import compile_for_hopper, device, record_launches, spilled_bytes

__all__ = ["device"]

CASE, K = "int4 in groups of 128", 768
each_case = pytest.mark.parametrize("case", INTERLEAVED)
TILES = [SCHEME_GEMV_TILES[N8_B1024], SCHEME_GEMV_TILES[N8_B2048]]


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(11)).to(torch.uint8)


# The order


def test_each_code_is_where_the_definition_says() -> None:
    weight = random_bytes(3, 64)
    codes, words = unpack_nibbles(weight), interleave(weight).contiguous().view(torch.int32)
    for chunk in range(4):
        for t in range(4):
            for i in range(4):
                for odd in range(2):
                    code = words[:, 4 * chunk + t] >> 4 * i + 16 * odd & 15
                    assert torch.equal(code, codes[:, 32 * chunk + 8 * i + 2 * t + odd].int())


@pytest.mark.parametrize("name", ["int4_bfloat16", "int4_float32_permuted"])
def test_both_orders_hold_the_same_weight(name: str) -> None:
    weight = torch.randn(16, 512)
    order = SCHEMES[name].linear_order
    assert order is not None and order.scheme == f"{name}_interleaved"
    plain, stored = SCHEMES[name].quantise(weight, 128), SCHEMES[order.scheme].quantise(weight, 128)
    assert torch.equal(order.reorder(plain[0]), stored[0]) and not torch.equal(plain[0], stored[0])
    for first, second in zip(plain[1:], stored[1:], strict=True):
        assert torch.equal(first, second)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(SCHEMES[name].dequantise(plain, dtype), SCHEMES[order.scheme].dequantise(stored, dtype))


@pytest.mark.parametrize(
    ("name", "columns", "group", "is_interleaved"),
    [
        ("int4_float16", 768, 128, True), ("int4_float16", 768, 768, True), ("int4_bfloat16_permuted", 768, 256, True),
        ("int4_float16", 768, 64, False), ("int4_float16", 192, 192, False), ("int4_float16_zeros", 768, 128, False),
        ("mxfp4", 768, 0, False), ("fp8_channel", 768, 768, False), ("int8", 768, 128, False),
    ],
)  # fmt: skip
def test_which_weights_linear_layers_store_so(name: str, columns: int, group: int, is_interleaved: bool) -> None:
    scheme = linear_scheme(name, columns, group)
    assert scheme == (f"{name}_interleaved" if is_interleaved else name)
    assert checkpoint_scheme(scheme) == name and linear_scheme(scheme, columns, group) == scheme


@pytest.mark.parametrize("shapes", [[(8, 96), (8, 3)], [(8, 64), (8, 2)], [(8, 96), (8, 1)]])
def test_other_shapes_are_errors(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="no weight has the shapes"):
        SCHEMES["int4_bfloat16_interleaved"].dense_shape(shapes)


# One row, and the dense weight


@each_case
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
@pytest.mark.parametrize("form", FORMS)
def test_one_row_agrees(
    case: str, tile: SchemeGemvTile, form: str, device: str, poisoned_outputs: list[Tensor]
) -> None:
    x, tensors, extras = product(case, 1, form, device=device, n=32, k=K)
    assert_agrees(run(case, x, tensors, extras, tile=tile), reference(case, x, tensors, extras))
    assert poisoned_outputs[0][1:].isnan().all(), "rows past the batch were written"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_codes_have_their_values(dtype: torch.dtype, device: str) -> None:
    weight = torch.arange(64, dtype=torch.uint8) * 37 + torch.arange(256, dtype=torch.uint8)[:, None]
    tensors = [weight.to(device), torch.full((256, 1), 0.5, dtype=torch.bfloat16, device=device)]
    values = SCHEMES["int4_bfloat16_interleaved"].dequantise(tensors, dtype)
    for column in (0, 1, 9, 22, 31, 40):
        x = torch.zeros(1, 128, dtype=dtype, device=device)
        x[0, column] = 1
        assert_close(matmul("int4_bfloat16_interleaved", x, tensors)[0], values[:, column], rtol=0, atol=0)


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_dense_weight_is_that_of_the_scheme(case: str, dtype: torch.dtype, device: str) -> None:
    tensors = [tensor.to(device) for tensor in weight_tensors(case, 24, K)]
    expected, columns = SCHEMES[INTERLEAVED[case][0]].dequantise(tensors, dtype), operands(*scheme_of(case, tensors))
    stored = expected if columns.columns is None else expected[:, columns.columns]
    assert torch.equal(dequantised(INTERLEAVED[case][0], tensors, dtype), stored)


def scheme_of(case: str, tensors: list[Tensor]) -> tuple[str, list[Tensor]]:
    return INTERLEAVED[case][0], tensors


@each_case
def test_many_rows_are_multiplied_by_the_dense_weight(case: str, device: str) -> None:
    x, tensors, extras = product(case, 130, "plain", device=device, n=32, k=K)
    bias = rand(32, device=device)
    y = dequantised_matmul(INTERLEAVED[case][0], x, tensors, bias)
    precise = reference(case, x, tensors, {**extras, "addend": bias})
    assert (y - precise).norm() < 0.01 * precise.norm(), "the dense weight has 8 bits of mantissa"


@each_case
@pytest.mark.parametrize("form", ["added", "normed and gated"])
def test_on_a_cpu_the_op_agrees(case: str, form: str) -> None:
    x, tensors, extras = product(case, 1, form, n=32, k=K)
    arguments = (x, tensors, extras.get("addend"), extras["gated"], extras.get("norm"), EPS, INTERLEAVED[case][0])
    assert_agrees(fused_scheme_linear(*arguments), reference(case, x, tensors, extras))
    torch.library.opcheck(fused_scheme_linear.overload, arguments)


def test_only_kernels_that_know_the_order_are_chosen() -> None:
    for rows in range(1, MAX_INTERLEAVED_ROWS + 1):
        for n, k in ((2048, 2048), (4096, 4096), (28672, 4096), (4096, 14336)):
            assert isinstance(choose_tile(rows, n, k, 2, True), SchemeGemvTile | RegisterGemmTile)


@pytest.mark.parametrize(("rows", "scheme", "is_taken"), [
    (384, "int4_bfloat16_interleaved", True), (385, "int4_bfloat16_interleaved", False), (129, "int4_bfloat16", False),
])  # fmt: skip
def test_how_many_rows_the_kernels_take(rows: int, scheme: str, is_taken: bool) -> None:
    tensors = weight_tensors(CASE, 64, K)
    assert is_fusable(scheme, rows, torch.bfloat16, tensors) == is_taken


# Mistakes that the tolerance must not hide

FAULTS = {
    "not interleaved": lambda weight: SCHEMES["int4_bfloat16"].linear_order.reorder(weight),  # type: ignore[union-attr]
    "words swapped": lambda weight: weight.unflatten(1, (-1, 2, 4)).flip(2).flatten(1),
    "nibbles swapped": lambda weight: weight << 4 | weight >> 4,
    "halves of words swapped": lambda weight: weight.unflatten(1, (-1, 2, 2)).flip(2).flatten(1),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rows", [1, 19])
def test_another_order_exceeds_the_tolerance(fault: str, rows: int, device: str) -> None:
    x, tensors, extras = product(CASE, rows, "plain", device=device, n=32, k=K)
    y = run(CASE, x, tensors, extras)
    assert_agrees(y, reference(CASE, x, tensors, extras))
    with pytest.raises(AssertionError):
        assert_agrees(y, reference(CASE, x, [FAULTS[fault](tensors[0]), *tensors[1:]], extras))


# Compiled for Hopper


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
@pytest.mark.parametrize("form", ["normed and gated", "added"])
def test_the_order_costs_the_gemv_no_instruction(
    tile: SchemeGemvTile, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Inputs are in the order of the codes without a copy in shared memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(scheme_matmul, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    x, tensors, extras = product(CASE, 1, form, n=256, k=4096)
    for name in ("int4_bfloat16", "int4_bfloat16_interleaved"):
        matmul(name, x, tensors, **extras, eps=EPS, tile=tile)
    plain, interleaved = (compile_for_hopper(item, runs_ptxas=False).asm for item in launches)
    assert plain["ptx"].count("\n\t") == interleaved["ptx"].count("\n\t")
    loads = re.findall(r"ld\.global\S*evict_first\S*", interleaved["ptx"])
    assert loads and all(load.endswith(".v4.b32") for load in loads)
    assert pointers_used_before_wait(interleaved["ttir"]) <= {"weight"}
    assert spilled_bytes(interleaved["ptx"], tmp_path) == 0


def test_the_dense_weight_is_written_in_wide_stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    dequantised(INTERLEAVED[CASE][0], weight_tensors(CASE, 256, 4096), torch.bfloat16)
    compiled = compile_for_hopper(launches[0], runs_ptxas=False)
    stores = re.findall(r"st\.global\S*", compiled.asm["ptx"])
    assert stores and all(store.endswith((".v4.b32", ".v2.b32")) for store in stores), set(stores)
    assert len(re.findall(r"ld\.global", compiled.asm["ptx"])) == 2, "a thread loads its codes and their scale"
    assert spilled_bytes(compiled.asm["ptx"], tmp_path) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_real_shapes_agree_on_a_gpu(form: str) -> None:
    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336)):
        x, tensors, extras = product(CASE, 1, form, device="cuda", n=n, k=k)
        for tile in TILES:
            assert_agrees(run(CASE, x, tensors, extras, tile=tile), reference(CASE, x, tensors, extras))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_the_op_of_a_linear_layer_agrees_on_a_gpu(rows: int) -> None:
    x, tensors, extras = product(CASE, rows, "plain", device="cuda", n=4096, k=4096)
    y = torch.ops.tcdeploy.scheme_linear(x, tensors, None, INTERLEAVED[CASE][0])
    precise = reference(CASE, x, tensors, extras)
    assert (y - precise).norm() < 0.01 * precise.norm()
