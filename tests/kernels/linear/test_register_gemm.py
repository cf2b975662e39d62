"""The GEMM of interleaved int4 and FP8 weights: its results, and that compiled kernels keep the values in registers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.testing import assert_close
from triton.backends.compiler import GPUTarget

from tcdeploy.kernels.linear import register_gemm, register_gemm_kernel
from tcdeploy.kernels.linear.register_gemm import MAX_BLOCK_M, count_tiles, fit_parts
from tcdeploy.kernels.linear.scheme_codes import _fragment_values, _plain_fragment
from tcdeploy.kernels.linear.scheme_matmul import matmul
from tcdeploy.kernels.linear.scheme_operands import operands
from tcdeploy.kernels.linear.scheme_tiles import (
    F128_V,
    F128_V_S8,
    MAX_INTERLEAVED_ROWS,
    REGISTER_GEMM_TILES,
    WIDE_N,
    RegisterGemmTile,
    choose_tile,
    register_gemm_tile,
)
from tcdeploy.planning.schemes import SCHEMES
from tests import triton_tools
from tests.kernels.linear.matmul_cases import assert_agrees, assert_reads_only
from tests.kernels.linear.scheme_cases import (
    INTERLEAVED,
    SCHEME_OF,
    assert_product_agrees,
    product,
    reference,
    run,
    weight_tensors,
)
from tests.triton_tools import (
    HOPPER_SHARED_BYTES,
    compile_for_hopper,
    device,
    record_launches,
    specialization_key,
    spilled_bytes,
    triton_interpreter,
)

__all__ = ["device"]

CASE = "int4 in groups of 128"
ALL_CASES = (CASE, "fp8_block", "fp8_channel")
# Of tiles with a limit of registers, so that two programs fit on an SM. Only fp8_block in `f128` with 64 rows spills:
# 32 bytes with Triton 3.6, and 56 with 3.7.
MAX_SPILLED_BYTES = 64
each_tile = pytest.mark.parametrize("tile", REGISTER_GEMM_TILES, ids=lambda tile: tile.name)
SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))


def name_of(value: object) -> str:
    return value.name if isinstance(value, RegisterGemmTile) else str(value)


def chosen_tiles(case: str) -> list[tuple[str, RegisterGemmTile, int, str]]:
    """The tiles that the heuristics choose, with one number of rows for each padded number, and the form."""
    weight = operands(SCHEME_OF[case][0], weight_tensors(case, 256, 1024))
    chosen = {
        (rows, choose_tile(rows, n, k, weight.per_byte, True), "gated" if n > 2 * k else "added")
        for rows in (16, 32, 64, 128)
        for n, k in SHAPES
    }
    return [(case, tile, rows, form) for rows, tile, form in sorted(chosen) if isinstance(tile, RegisterGemmTile)]


CHOSEN_TILES = [item for case in ALL_CASES for item in chosen_tiles(case)]
each_chosen_product = pytest.mark.parametrize(("case", "tile", "rows", "form"), CHOSEN_TILES, ids=name_of)
each_chosen_tile = pytest.mark.parametrize(
    ("case", "tile"),
    dict.fromkeys((case, tile) for case, tile, *_ in CHOSEN_TILES if case != "fp8_channel"),
    ids=name_of,
)


@each_chosen_tile
@pytest.mark.parametrize("form", ["plain", "added", "gated"])
@pytest.mark.parametrize("rows", [5, 32])
def test_each_form_agrees_and_writes_only_its_rows(
    case: str, tile: RegisterGemmTile, form: str, rows: int, device: str, poisoned_outputs: list[Tensor]
) -> None:
    """The last tile has rows past the weight, and 1,024 columns are split into up to eight parts of whole steps."""
    x, tensors, extras = product(case, rows, form, device=device, n=160, k=1024)
    y = run(case, x, tensors, extras, tile=tile)
    assert_product_agrees(case, y, x, tensors, extras, tile)
    assert poisoned_outputs[0][rows:].isnan().all(), "rows past the batch were written"


@pytest.mark.parametrize("form", ["plain", "added", "gated"])
@pytest.mark.parametrize("n", [160, WIDE_N])
@pytest.mark.parametrize("rows", [129, 300])
def test_more_rows_than_a_program_multiplies(
    rows: int, n: int, form: str, device: str, poisoned_outputs: list[Tensor]
) -> None:
    """With one and with several parts of the columns. Rows of another program exceed the tolerance."""
    x, tensors, extras = product(CASE, rows, form, device=device, n=n, k=256)
    y = run(CASE, x, tensors, extras)
    assert_product_agrees(CASE, y, x, tensors, extras)
    assert poisoned_outputs[0][rows:].isnan().all(), "rows past the batch were written"
    with pytest.raises(AssertionError):
        assert_product_agrees(CASE, y.roll(MAX_BLOCK_M, 0), x, tensors, extras)


@pytest.mark.parametrize(("rows", "n", "k", "parts"), [
    (128, 6144, 4096, 5), (256, 6144, 4096, 2), (384, 6144, 4096, 1), (129, 4096, 4096, 4), (256, 4096, 14336, 4),
    (384, 4096, 14336, 2), (384, 28672, 4096, 1),
])  # fmt: skip
def test_the_programs_of_many_rows_fit_the_gpu_at_once(rows: int, n: int, k: int, parts: int) -> None:
    """Unless the tiles alone are more programs."""
    tile = register_gemm_tile(rows, n, k)
    assert fit_parts(tile, rows, n, k) == parts
    assert tile.scales_values and (parts == 1 or parts * math.prod(count_tiles(tile, rows, n)) <= 2 * 132)


def test_all_numbers_of_many_rows_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    for rows in (100, 128, 129, 256, 384):
        x, tensors, extras = product(CASE, rows, "gated", n=WIDE_N, k=256)
        run(CASE, x, tensors, extras)
    assert len({specialization_key(launch) for launch in launches}) == 1 < len(launches)


@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("splits", [3, 8, 64])
def test_parts_may_differ_by_a_step(case: str, splits: int, device: str) -> None:
    """Eight steps of one or two times 128 columns; more parts than steps are not made."""
    for unroll in (1, 2):
        x, tensors, extras = product(case, 19, "added", torch.float16, device, n=64, k=8 * 128 * unroll)
        y = run(case, x, tensors, extras, tile=RegisterGemmTile("uneven", 64, splits, 4, 3, unroll=unroll))
        assert_agrees(y, reference(case, x, tensors, extras))


@pytest.mark.parametrize("case", INTERLEAVED)
@pytest.mark.parametrize("rows", [19, 70])
def test_groups_of_any_width_agree(case: str, rows: int, device: str) -> None:
    x, tensors, extras = product(case, rows, "added", torch.float16, device, n=64, k=768)
    tile = register_gemm_tile(rows, 64, 768)
    if case != "int4 in groups of 768" and tile.scales_values and tensors[1].dtype != x.dtype:
        tensors[1] = tensors[1].to(x.dtype).to(tensors[1].dtype)  # the kernel rounds these scales to x's dtype
    assert_product_agrees(case, run(case, x, tensors, extras), x, tensors, extras, tile)


@pytest.mark.parametrize("case", [CASE, "fp8_block"])
def test_inputs_may_be_slices(case: str, device: str) -> None:
    x, tensors, extras = product(case, 19, "plain", torch.float16, device, n=64, k=256)
    columns = torch.cat([x[:, :3], x * 2, x, x], 1)[:, 256 + 3 : 2 * 256 + 3]
    assert_agrees(run(case, columns, tensors, extras), reference(case, x, tensors, extras))


@each_chosen_tile
def test_the_kernel_reads_only_its_inputs(case: str, tile: RegisterGemmTile, monkeypatch: pytest.MonkeyPatch) -> None:
    x, tensors, extras = product(case, 19, "gated", n=160, k=128)  # one part
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, x, *tensors) as loads:
        y = run(case, x, tensors, extras, tile=tile)
    assert_product_agrees(case, y, x, tensors, extras, tile)
    assert sum(loads) >= x.numel() + tensors[0].numel() // 4, "words of four bytes"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [32, 100])
def test_all_codes_have_their_values(rows: int, dtype: torch.dtype, device: str) -> None:
    """Each row of the input is 1 in one column, so that the product is some columns of the weight, exactly."""
    x = torch.zeros(rows, 128, dtype=dtype)
    x[torch.arange(rows), torch.arange(rows) + 7] = 1
    weight = torch.arange(64, dtype=torch.uint8) * 37 + torch.arange(256, dtype=torch.uint8)[:, None]
    tensors = [weight.to(device), torch.full((256, 1), 0.5, dtype=torch.bfloat16, device=device)]
    y = matmul("int4_bfloat16_interleaved", x.to(device), tensors)
    assert_close(y, SCHEMES["int4_bfloat16_interleaved"].dequantise(tensors, dtype)[:, 7 : 7 + rows].T, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [32, 64])
def test_all_fp8_codes_have_their_values(rows: int, dtype: torch.dtype, device: str) -> None:
    """Subnormal ones too. Each row of the input is 1 in one column."""
    x = torch.zeros(rows, 128, dtype=dtype)
    x[torch.arange(rows), torch.arange(rows) * 2 % 128 + 1] = 1
    codes = (torch.arange(128) * 37 + torch.arange(256)[:, None]).to(torch.uint8)
    codes[codes & 127 == 127] = 0  # not a number
    tensors = [codes.view(torch.float8_e4m3fn).to(device), torch.full((256,), 0.5, device=device)]
    y = matmul("fp8_channel", x.to(device), tensors)
    weight = SCHEMES["fp8_channel"].dequantise(tensors, dtype)
    assert_close(y, weight[:, torch.arange(rows) * 2 % 128 + 1].T, rtol=0, atol=0)


@pytest.mark.parametrize("case", [CASE, "fp8_block"])
@pytest.mark.parametrize("rows", [19, 70])
def test_a_scale_of_the_next_group_exceeds_the_tolerance(case: str, rows: int, device: str) -> None:
    x, tensors, extras = product(case, rows, "plain", device=device, n=160, k=768)
    y = run(case, x, tensors, extras)
    assert_product_agrees(case, y, x, tensors, extras)
    with pytest.raises(AssertionError):
        assert_product_agrees(case, y, x, [tensors[0], tensors[1].roll(-1, 1)], extras)


@pytest.mark.parametrize("distance", [1, 2, 8, 16])
def test_swapped_fp8_columns_exceed_the_tolerance(distance: int, device: str) -> None:
    x, tensors, extras = product("fp8_block", 19, "plain", device=device, n=64, k=256)
    y = run("fp8_block", x, tensors, extras)
    swapped = x.unflatten(1, (-1, 2, distance)).flip(2).flatten(1)
    with pytest.raises(AssertionError):
        assert_product_agrees("fp8_block", y, swapped, tensors, extras)


@pytest.mark.parametrize(("rows", "n", "k", "name"), [
    (1, 4096, 4096, "n4_b2048"), (8, 4096, 4096, "n16_k512"), (9, 4096, 4096, "f128_s4"), (64, 6144, 4096, "f128_s4"),
    (32, 4096, 14336, "f128_s8"), (33, 4096, 14336, "f128_s4"), (9, 28672, 4096, "f128"), (64, 28672, 4096, "f128"),
    (65, 4096, 4096, "m128_n64_s4"),
])  # fmt: skip
def test_tiles_of_fp8(rows: int, n: int, k: int, name: str) -> None:
    assert choose_tile(rows, n, k, 1, True).name == name


@pytest.mark.parametrize(("scheme", "k", "is_register_operand"), [
    ("fp8_block", 256, True), ("fp8_channel", 256, True), ("fp8_block", 192, False), ("fp8_channel", 192, False),
    ("int8", 256, False),
])  # fmt: skip
def test_which_8_bit_weights_the_register_gemm_takes(scheme: str, k: int, is_register_operand: bool) -> None:
    weight = operands(scheme, list(SCHEMES[scheme].quantise(torch.randn(32, k))))
    assert weight.is_register_operand == is_register_operand


def test_scales_multiply_the_values_only_where_the_sums_are_too_many() -> None:
    for n, k in SHAPES:
        rows = [rows for rows in range(2, MAX_INTERLEAVED_ROWS + 1) if not register_gemm_tile(rows, n, k).scales_values]
        assert rows == [*range(2, (32 if n == 28672 else 64) + 1)]


@each_chosen_product
def test_values_go_from_codes_to_the_tensor_cores_in_registers(
    case: str, tile: RegisterGemmTile, rows: int, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of the tensor cores' instructions takes the weight from registers, and codes are copied 16 bytes at once.

    x is copied to the shared memory from which the tensor cores read it, for FP8 weights two columns at once.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    x, tensors, extras = product(case, rows, form, n=512, k=4096)
    run(case, x, tensors, extras, tile=tile)
    compiled = compile_for_hopper(launches[0], runs_ptxas=False)
    ptx = compiled.asm["ptx"]
    instructions = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)
    assert instructions and set(instructions) == {"{"}
    sizes = set(re.findall(r"cp\.async\.(?:ca|cg)\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx))
    assert sizes == ({"0x10"} if case == CASE else {"0x10", "0x4"})
    assert "stmatrix" not in ptx[: ptx.rindex("wgmma.mma_async")], "no operand is written back to shared memory"
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    assert spilled_bytes(ptx, tmp_path) <= (MAX_SPILLED_BYTES if tile.max_registers and case != CASE else 0)


@pytest.mark.parametrize("tile", [F128_V, F128_V_S8], ids=lambda tile: REGISTER_GEMM_TILES[tile].name)
def test_products_of_many_rows_leave_nothing_on_the_stack(
    tile: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each step would read a pointer back before it can load the scales."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(register_gemm, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    x, tensors, extras = product(CASE, 256, "plain", n=512, k=4096)
    run(CASE, x, tensors, extras, tile=REGISTER_GEMM_TILES[tile])
    assert spilled_bytes(compile_for_hopper(launches[0], runs_ptxas=False).asm["ptx"], tmp_path) == 0


def test_a_product_that_is_not_awaited_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(register_gemm_kernel, "_wait_for_dot", unchanged)
    launches = record_launches(monkeypatch)
    x, tensors, extras = product("fp8_channel", 32, "plain", n=512, k=4096)
    run("fp8_channel", x, tensors, extras)
    with pytest.raises(AssertionError, match="registers"):
        compile_for_hopper(launches[0], runs_ptxas=False)


@each_chosen_product
def test_kernels_with_two_stages_compile_for_ada_and_fit_its_shared_memory(
    case: str, tile: RegisterGemmTile, rows: int, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_tools, "HOPPER", GPUTarget("cuda", 89, 32))  # the target of `compile_for_hopper`
    monkeypatch.setattr(register_gemm, "max_stages", lambda device: 2)
    launches = record_launches(monkeypatch)
    x, tensors, extras = product(case, rows, form, n=512, k=4096)
    run(case, x, tensors, extras, tile=tile)
    assert compile_for_hopper(launches[0]).metadata.shared <= 99 << 10


@pytest.mark.parametrize(("shared_kib", "stages"), [(99, 2), (163, 4), (227, 4)])
def test_stages_depend_on_the_shared_memory(shared_kib: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert register_gemm.max_stages.__wrapped__(torch.device("cuda", 0)) == stages


@triton.jit
def unchanged(sums):
    return sums


@triton.jit
def both_forms_kernel(out, words, scales):
    """Writes the values of 256 words by PTX and in the plain form: without scales, and then with a scale per word."""
    codes, factors = tl.load(words + tl.arange(0, 256)[:, None]), tl.load(scales + tl.arange(0, 256))
    offsets = tl.arange(0, 2048)
    DTYPE: tl.constexpr = out.dtype.element_ty
    first, second = _plain_fragment(codes, 0, DTYPE), _plain_fragment(codes, 1, DTYPE)
    third, last = _plain_fragment(codes, 2, DTYPE), _plain_fragment(codes, 3, DTYPE)
    plain = tl.join(tl.join(first, third), tl.join(second, last))
    tl.store(out + offsets, tl.reshape(_fragment_values(codes, None, DTYPE), (2048,)))
    tl.store(out + 2048 + offsets, tl.reshape(plain, (2048,)))
    tl.store(out + 4096 + offsets, tl.reshape(_fragment_values(codes, factors, DTYPE), (2048,)))
    tl.store(out + 6144 + offsets, tl.reshape(plain * factors[:, None, None, None, None], (2048,)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ptx_and_the_plain_form_make_the_same_values(dtype: torch.dtype) -> None:
    words = torch.randint(-(2**31), 2**31, (256,), dtype=torch.int32, device="cuda")
    out = torch.full((4, 2048), float("nan"), dtype=dtype, device="cuda")
    both_forms_kernel[(1,)](out, words, torch.randn(256, device="cuda").to(dtype))
    assert torch.equal(out[0], out[1]) and torch.equal(out[2], out[3])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["plain", "added", "gated"])
@pytest.mark.parametrize("rows", [3, 16, 32, 64, 128])
def test_real_shapes_agree_on_a_gpu(form: str, rows: int) -> None:
    """With the tiles of the heuristics."""
    for n, k in SHAPES:
        for case in ALL_CASES:
            x, tensors, extras = product(case, rows, form, device="cuda", n=n, k=k)
            assert_product_agrees(case, run(case, x, tensors, extras), x, tensors, extras)
