"""The GEMM of interleaved int4 weights on Hopper: its results on a GPU, and the machine code of compiled kernels."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.kernels.linear import hopper_gemm
from tcdeploy.kernels.linear.scheme_matmul import is_fusable
from tcdeploy.kernels.linear.scheme_tiles import (
    HOPPER_BLOCK_K,
    HOPPER_GEMM_TILES,
    MAX_INTERLEAVED_ROWS,
    MIN_HOPPER_ROWS,
    HopperGemmTile,
    RegisterGemmTile,
    choose_tile,
    count_hopper_tiles,
    fit_programs,
)
from tcdeploy.planning.schemes import SCHEMES
from tcdeploy.torch_compat.triton.gluon import supported, supports_wgmma
from tests.kernels.linear.scheme_cases import INTERLEAVED, product, reference, run, weight_tensors
from tests.triton_tools import (
    HOPPER_SHARED_BYTES,
    Instruction,
    Launch,
    compile_for_hopper,
    machine_code,
    overwritten_registers,
    record_launches,
    specialization_key,
)

CASE = "int4 in groups of 128"
H200 = 132  # multiprocessors
FORMS = ("plain", "added", "gated")
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ERROR_LIMIT = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
each_tile = pytest.mark.parametrize("tile", HOPPER_GEMM_TILES, ids=lambda tile: tile.name)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Launches of the kernel that products of a CPU tensor would make on Hopper."""
    monkeypatch.setattr(hopper_gemm, "supports_wgmma", lambda device: True)
    monkeypatch.setattr(hopper_gemm, "supports_pdl", lambda device: True)
    return record_launches(monkeypatch)


def launch_of(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch, tile: HopperGemmTile, form: str, has_parts: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> Launch:  # fmt: skip
    """The launch of four tiles, by two or three programs at once for each that an SM runs."""
    monkeypatch.setattr(hopper_gemm, "multiprocessors", lambda device: 3 if has_parts else 2)
    x, tensors, extras = product(CASE, tile.block_m, form, dtype, n=4 * tile.block_n, k=2048)
    run(CASE, x, tensors, extras, tile=tile)
    assert len(launches) == 1 + has_parts
    return launches[0]


@pytest.mark.parametrize("has_parts", [False, True], ids=["tiles", "parts"])
@pytest.mark.parametrize("form", FORMS)
@each_tile
def test_values_are_made_in_registers_while_the_tensor_cores_multiply(
    tile: HopperGemmTile, form: str, has_parts: bool, on_hopper: list[Launch], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dtype = torch.float16 if form == "added" else torch.bfloat16
    compiled = compile_for_hopper(launch_of(on_hopper, monkeypatch, tile, form, has_parts, dtype))
    ptx = compiled.asm["ptx"]
    loop = ptx[ptx.index("wgmma.mma_async") : ptx.rindex("cp.async.wait_group")]
    instructions = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)
    assert instructions and set(instructions) == {"{"}, "the weight is read from registers"
    assert set(re.findall(r"wgmma\.wait_group\S* (\d)", loop)) == {"1"}, "a product runs while values are made"
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)) == {"0x10"}
    assert not re.findall(r"st\.shared|stmatrix", ptx), "nothing is written back to shared memory"
    assert tile.stages // 2 % 2 == 0 or loop.count("bar.sync") == 0, "a step has one barrier, after it has waited"
    assert compiled.metadata.shared * tile.programs <= HOPPER_SHARED_BYTES
    assert_values_are_made_between_products(machine_code(compiled), tile)


def assert_values_are_made_between_products(code: list[Instruction], tile: HopperGemmTile) -> None:
    """Those of the two steps of an iteration. Nothing is spilled there."""
    products = [i for i, item in enumerate(code) if item.name.startswith("HGMMA")]
    end = next(i for i, item in enumerate(code) if item.name == "BRA" and i > products[-1])
    loop = [item.name for item in code[products[0] : end]]
    values = sum(name.startswith(("HFMA2", "HMUL2", "HADD2")) for name in loop)
    assert values == 2 * 2 * 16 * tile.block_n // 128, "two instructions for each pair of values"
    assert sum(name.startswith("WARPGROUP.DEPBAR") for name in loop) == 2
    assert not {"STL", "LDL", "STL.64", "LDL.64", "LDL.LU"} & {*loop}


def test_registers_that_are_overwritten_are_found(
    on_hopper: list[Launch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the last product of an iteration, which runs into the next."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = machine_code(compile_for_hopper(launch_of(on_hopper, monkeypatch, HOPPER_GEMM_TILES[0], "plain", False)))
    assert not overwritten_registers(code)
    last = max(i for i, item in enumerate(code) if item.name.startswith("HGMMA"))
    first = min(i for i, item in enumerate(code) if item.name.startswith("HGMMA"))
    for position in (last + 1, first):
        fault = Instruction(0, "IMAD.WIDE", [code[last].operands[1]])
        assert overwritten_registers([*code[:position], fault, *code[position:]])


def test_the_kernel_does_not_depend_on_the_number_of_rows(
    on_hopper: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in (257, 300, 512, 1000):
        x, tensors, extras = product(CASE, rows, "plain", n=4096, k=256)
        run(CASE, x, tensors, extras)
    kernels = {specialization_key(launch) for launch in on_hopper}
    assert len(kernels) == 3 < len(on_hopper), "with and without parts, and that which adds them"


def test_inputs_that_cannot_be_copied_in_16_bytes_are_copied_first(
    on_hopper: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, tensors, extras = product(CASE, 300, "plain", n=256, k=256)
    for columns in (torch.cat([x[:, :8], x], 1)[:, 8:], torch.cat([x, x], 1)[:, 3 : 3 + 256]):
        run(CASE, columns, tensors, extras)
    assert all(launch.args[2].is_contiguous() for launch in on_hopper if len(launch.args) > 20)
    on_hopper.clear()
    run(CASE, torch.cat([x, x], 1)[:, 256:], tensors, extras)
    assert on_hopper[0].args[2].stride() == (512, 1)


# Tiles


@each_tile
def test_programs_share_the_columns_of_all_tiles(tile: HopperGemmTile) -> None:
    """Each program computes whole groups of the usual size, and the kernels agree on who has which part."""
    choices = random.Random(5)
    for _ in range(300):
        rows, n, k = choices.randint(1, 1500), 16 * choices.randint(1, 200), HOPPER_BLOCK_K * choices.randint(1, 40)
        tiles, groups = count_hopper_tiles(tile, rows, n), k // HOPPER_BLOCK_K
        programs = fit_programs(tile, rows, n, k, choices.choice([78, 114, H200]))
        assert 1 <= programs <= tiles * groups
        if programs != tiles:
            assert_covers(tiles, groups, programs)


def assert_covers(tiles: int, groups: int, programs: int) -> None:
    """The arithmetic of _hopper_gemm_kernel and _sum_tiles_kernel."""
    work = tiles * groups
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for program in range(programs):
        begin, stop = program * work // programs, (program + 1) * work // programs
        position = begin
        while position < stop:
            tile = position // groups
            end = min((tile + 1) * groups, stop)
            parts.setdefault(tile, []).append((position, end, 2 * program + (position != begin)))
            position = end
    for tile in range(tiles):
        bounds = [bound for first, end, _ in parts[tile] for bound in (first, end)]
        assert bounds[0] == tile * groups and bounds[-1] == (tile + 1) * groups
        assert bounds[1:-1:2] == bounds[2::2], "without gaps"
        first_program = ((tile * groups + 1) * programs - 1) // work
        last_program = ((tile + 1) * groups * programs - 1) // work
        read = [2 * i + (i * work // programs // groups != tile) for i in range(first_program, last_program + 1)]
        assert read == [part for *_, part in parts[tile]]


def test_only_hopper_uses_the_tiles() -> None:
    for rows in range(2, 1000, 7):
        for n, k in SHAPES:
            is_hopper_tile = isinstance(choose_tile(rows, n, k, 2, True, True), HopperGemmTile)
            assert is_hopper_tile == (rows >= MIN_HOPPER_ROWS)
            if rows <= MAX_INTERLEAVED_ROWS:
                assert isinstance(choose_tile(rows, n, k, 2, True), RegisterGemmTile)


def test_any_number_of_rows_is_fused_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = weight_tensors(CASE, 64, 256)
    assert not is_fusable(INTERLEAVED[CASE][0], 100_000, torch.bfloat16, tensors)
    monkeypatch.setattr(hopper_gemm, "supports_wgmma", lambda device: True)
    assert is_fusable(INTERLEAVED[CASE][0], 100_000, torch.bfloat16, tensors)


@pytest.mark.parametrize(("capability", "is_supported"), [((8, 9), False), ((9, 0), True), ((10, 0), False)])
def test_other_gpus_do_not_use_the_kernel(
    capability: tuple[int, int], is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert supports_wgmma.__wrapped__(torch.device("cuda", 0)) == is_supported
    assert not supports_wgmma.__wrapped__(torch.device("cpu"))


# On a GPU


@pytest.fixture
def hopper() -> None:
    if not torch.cuda.is_available() or not supports_wgmma(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def assert_agrees_with_rounded_values(case: str, y: Tensor, x: Tensor, tensors: list[Tensor], extras: Any) -> None:
    """Values of the weight are rounded, as those of a dense copy, and so are the parts of sums."""
    precise = reference(case, x, tensors, extras)
    assert (y - precise).float().norm() < ERROR_LIMIT[x.dtype] * precise.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [64, 65, 127, 128, 129, 160, 255, 256, 257, 384, 511, 513, 1024, 1100, 4096])
def test_products_agree_around_the_borders_of_tiles(
    rows: int, form: str, hopper: None, poisoned_outputs: list[Tensor]
) -> None:
    """Few and many tiles, the last of which is partial, with an even and an odd number of groups."""
    for n, k in ((160, 256), (4096, 1024), (4128, 640)):
        poisoned_outputs.clear()
        x, tensors, extras = product(CASE, rows, form, device="cuda", n=n, k=k)
        y = run(CASE, x, tensors, extras)
        assert_agrees_with_rounded_values(CASE, y, x, tensors, extras)
        assert poisoned_outputs[0][rows:].isnan().all(), "rows past the batch were written"
        with pytest.raises(AssertionError):
            assert_agrees_with_rounded_values(CASE, y.roll(1, 0), x, tensors, extras)


@pytest.mark.gpu
@pytest.mark.parametrize("has_parts", [False, True], ids=["tiles", "parts"])
@pytest.mark.parametrize("form", FORMS)
@each_tile
def test_each_tile_and_form_agrees(
    tile: HopperGemmTile, form: str, has_parts: bool, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_parts:
        monkeypatch.setattr(hopper_gemm, "multiprocessors", lambda device: 7)
    else:
        monkeypatch.setattr(hopper_gemm, "fit_programs", lambda tile, rows, n, *_: count_hopper_tiles(tile, rows, n))
    for rows, dtype in ((3, torch.bfloat16), (300, torch.float16)):
        x, tensors, extras = product(CASE, rows, form, dtype, "cuda", n=1056, k=1152)
        y = run(CASE, x, tensors, extras, tile=tile)
        assert_agrees_with_rounded_values(CASE, y, x, tensors, extras)
        with pytest.raises(AssertionError):
            assert_agrees_with_rounded_values(CASE, y, x, [tensors[0], tensors[1].roll(-1, 1)], extras)


@pytest.mark.gpu
@pytest.mark.parametrize("case", INTERLEAVED)
@pytest.mark.parametrize("rows", [70, 300])
def test_groups_of_any_width_agree(case: str, rows: int, hopper: None) -> None:
    """One of them is as wide as the weight."""
    x, tensors, extras = product(case, rows, "added", torch.bfloat16, "cuda", n=4096, k=768)
    assert_agrees_with_rounded_values(case, run(case, x, tensors, extras), x, tensors, extras)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [slice(256, 512), slice(3, 259)], ids=["aligned", "not aligned"])
def test_inputs_may_be_slices(columns: slice, hopper: None) -> None:
    x, tensors, extras = product(CASE, 300, "plain", device="cuda", n=4096, k=256)
    wide = torch.zeros(300, 512, dtype=x.dtype, device="cuda")
    wide[:, columns] = x
    assert_agrees_with_rounded_values(CASE, run(CASE, wide[:, columns], tensors, extras), x, tensors, extras)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_codes_have_their_values(dtype: torch.dtype, hopper: None) -> None:
    """Each row of the input is 1 in one column, so that the product is the weight, exactly."""
    weight = torch.arange(64, dtype=torch.uint8) * 37 + torch.arange(256, dtype=torch.uint8)[:, None]
    tensors = [weight.cuda(), torch.full((256, 1), 0.5, dtype=torch.bfloat16, device="cuda")]
    y = run("int4 in groups of 128", torch.eye(128, dtype=dtype, device="cuda"), tensors, {"gated": False})
    assert torch.equal(y, SCHEMES["int4_bfloat16_interleaved"].dequantise(tensors, dtype).T)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", HOPPER_GEMM_TILES, ids=lambda tile: tile.name)
def test_runs_of_a_product_are_equal(tile: HopperGemmTile, hopper: None) -> None:
    for n, k in ((28672, 4096), (4096, 14336)):
        x, tensors, extras = product(CASE, 300, "plain", device="cuda", n=n, k=k)
        first = run(CASE, x, tensors, extras, tile=tile)
        differs = [(run(CASE, x, tensors, extras, tile=tile) != first).any() for _ in range(60)]
        assert not torch.stack(differs).any()


def test_gluon_is_supported() -> None:
    assert supported()
