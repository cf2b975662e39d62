"""The GEMM of interleaved int4 weights on Hopper: its results on a GPU, and the machine code of compiled kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.kernels.linear import hopper_gemm
from tcdeploy.kernels.linear.scheme_matmul import is_fusable
from tcdeploy.kernels.linear.scheme_tiles import (
    HOPPER_GEMM_TILE,
    MAX_HOPPER_ROWS,
    MAX_INTERLEAVED_ROWS,
    RegisterGemmTile,
    choose_tile,
    fit_hopper_splits,
)
from tcdeploy.planning.schemes import SCHEMES
from tcdeploy.torch_compat.triton.gluon import supported, supports_wgmma
from tcdeploy.torch_compat.triton.stored_kernels import SCRATCH_ARGUMENTS, KernelRecorder
from tests.kernels.linear.scheme_cases import INTERLEAVED, product, reference, run, sum_of_rounded_parts, weight_tensors
from tests.triton_tools import (
    HOPPER_SHARED_BYTES,
    Instruction,
    Launch,
    compile_for_hopper,
    machine_code,
    overwritten_registers,
    record_launches,
    specialization_key,
    spilled_bytes,
)

CASE = "int4 in groups of 128"
H200 = 132  # multiprocessors
FORMS = ("plain", "added", "gated")
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ERROR_LIMIT = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
ROUNDED_PARTS_LIMIT = {torch.bfloat16: 2e-3, torch.float16: 5e-4}  # of a reference that rounds the same parts
TILE = HOPPER_GEMM_TILE


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Records the launches that products of CPU tensors would make on Hopper."""
    monkeypatch.setattr(hopper_gemm, "supports_wgmma", lambda device: True)
    monkeypatch.setattr(hopper_gemm, "supports_pdl", lambda device: True)
    return record_launches(monkeypatch)


def launch_of(
    launches: list[Launch], form: str, is_split: bool, dtype: torch.dtype = torch.bfloat16
) -> Launch:  # fmt: skip
    """The launch of a product. Its columns are split if the weight has few rows."""
    n = 512 if is_split else TILE.block_n * H200
    x, tensors, extras = product(CASE, TILE.block_m, form, dtype, n=n, k=1024)
    run(CASE, x, tensors, extras, tile=TILE)
    assert len(launches) == 1 + is_split
    return launches[0]


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("form", FORMS)
def test_values_are_made_in_registers_while_the_tensor_cores_multiply(
    form: str, is_split: bool, on_hopper: list[Launch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dtype = torch.float16 if form == "added" else torch.bfloat16
    compiled = compile_for_hopper(launch_of(on_hopper, form, is_split, dtype))
    ptx = compiled.asm["ptx"]
    loop = ptx[ptx.index("wgmma.mma_async") : ptx.rindex("cp.async.wait_group")]
    instructions = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)
    assert instructions and set(instructions) == {"{"}, "the weight is read from registers"
    assert set(re.findall(r"wgmma\.wait_group\S* (\d)", loop)) == {"1"}, "a product runs while values are made"
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)) == {"0x10"}
    assert not re.findall(r"st\.shared|stmatrix", ptx), "nothing is written back to shared memory"
    assert loop.count("bar.sync") == 0, "a step has one barrier, after it has waited"
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    assert spilled_bytes(ptx, tmp_path) == 0
    assert_values_are_made_between_products(machine_code(compiled))


def assert_values_are_made_between_products(code: list[Instruction]) -> None:
    """An iteration of the loop has two steps."""
    products = [i for i, item in enumerate(code) if item.name.startswith("HGMMA")]
    end = next(i for i, item in enumerate(code) if item.name == "BRA" and i > products[-1])
    loop = [item.name for item in code[products[0] : end]]
    values = sum(name.startswith(("HFMA2", "HMUL2", "HADD2")) for name in loop)
    assert values == 2 * 2 * 16, "two instructions for each pair of values"
    assert sum(name.startswith("WARPGROUP.DEPBAR") for name in loop) == 2


def test_registers_that_are_overwritten_are_found(
    on_hopper: list[Launch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fault overwrites an operand of an iteration's last product, which still runs in the next iteration."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = machine_code(compile_for_hopper(launch_of(on_hopper, "plain", True)))
    assert not overwritten_registers(code)
    last = max(i for i, item in enumerate(code) if item.name.startswith("HGMMA"))
    first = min(i for i, item in enumerate(code) if item.name.startswith("HGMMA"))
    for position in (last + 1, first):
        fault = Instruction(0, "IMAD.WIDE", [code[last].operands[1]])
        assert overwritten_registers([*code[:position], fault, *code[position:]])


def test_all_numbers_of_many_rows_share_two_kernels(on_hopper: list[Launch]) -> None:
    for rows in (129, 250, 400, 1000, 2048):
        for n in (512, 16384):
            x, tensors, extras = product(CASE, rows, "plain", n=n, k=256)
            run(CASE, x, tensors, extras)
    launches = [launch for launch in on_hopper if launch.kernel.fn.__name__ == "_hopper_gemm_kernel"]
    assert len(launches) == 10
    assert len({specialization_key(launch) for launch in launches}) <= 2


def test_inputs_that_cannot_be_copied_in_16_bytes_are_copied_first(
    on_hopper: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, tensors, extras = product(CASE, 300, "plain", n=256, k=256)
    for columns in (torch.cat([x[:, :8], x], 1)[:, 8:], torch.cat([x, x], 1)[:, 3 : 3 + 256]):
        run(CASE, columns, tensors, extras)
    assert all(launch.args[1].is_contiguous() for launch in on_hopper if len(launch.args) > 18)
    on_hopper.clear()
    run(CASE, torch.cat([x, x], 1)[:, 256:], tensors, extras)
    assert on_hopper[0].args[1].stride() == (512, 1)


# Tiles


@pytest.mark.parametrize(("rows", "n", "k", "splits"), [
    (160, 6144, 4096, 2), (256, 6144, 4096, 2), (256, 4096, 4096, 4), (256, 28672, 4096, 1), (256, 4096, 14336, 4),
    (512, 4096, 4096, 2), (512, 4096, 14336, 2), (1024, 6144, 4096, 2), (1024, 4096, 14336, 1), (2048, 6144, 4096, 1),
    (256, 4096, 128, 1),
])  # fmt: skip
def test_the_columns_of_few_tiles_are_split(rows: int, n: int, k: int, splits: int) -> None:
    assert fit_hopper_splits(TILE, rows, n, k, H200) == splits


def test_which_rows_use_the_kernel() -> None:
    """On other GPUs none do. Wide weights are left to the register GEMM where half a tile would be empty."""
    for n, k in SHAPES:
        rows = [rows for rows in range(2, MAX_HOPPER_ROWS + 1) if choose_tile(rows, n, k, 2, True, True) == TILE]
        assert rows == [*range(129, 257), *range(385 if n == 28672 else 257, 2049)]
        for few in range(2, MAX_INTERLEAVED_ROWS + 1, 7):
            assert isinstance(choose_tile(few, n, k, 2, True), RegisterGemmTile)


@pytest.mark.parametrize("form", FORMS)
def test_starts_from_packages_launch_the_kernel_without_triton(
    form: str, on_hopper: list[Launch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With as many arguments as its code has: those that are not compiled in, and two for scratch memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch, recorder = launch_of(on_hopper, form, is_split=False), KernelRecorder()
    compiled = compile_for_hopper(launch)
    recorder.add("kernel", launch.kernel, launch.args, launch.options, compiled)
    [binary] = json.loads(recorder.to_json())["kernels"]["kernel"]["binaries"].values()
    passed = [kind for kind in binary["types"] if kind != "constexpr"]
    parameters = re.search(r"\.entry.*?\)", compiled.asm["ptx"], re.DOTALL)
    assert parameters is not None and parameters[0].count(".param") == len(passed) + SCRATCH_ARGUMENTS
    assert binary["uses_pdl"] and binary["shared_bytes"] == compiled.metadata.shared <= HOPPER_SHARED_BYTES


def test_how_many_rows_are_fused_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = weight_tensors(CASE, 64, 256)
    assert not is_fusable(INTERLEAVED[CASE][0], MAX_INTERLEAVED_ROWS + 1, torch.bfloat16, tensors)
    monkeypatch.setattr(hopper_gemm, "supports_wgmma", lambda device: True)
    assert is_fusable(INTERLEAVED[CASE][0], MAX_HOPPER_ROWS, torch.bfloat16, tensors)
    assert not is_fusable(INTERLEAVED[CASE][0], MAX_HOPPER_ROWS + 1, torch.bfloat16, tensors)


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
@pytest.mark.parametrize("rows", [129, 160, 255, 256, 257, 384, 385, 511, 513, 1024, 1100, 2048])
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
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_parts_agrees(form: str, splits: int, hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are nine groups, so parts differ by one group. Rounding two parts costs up to 0.6% of the product."""
    monkeypatch.setattr(hopper_gemm, "fit_hopper_splits", lambda *_: splits)
    bounds = [9 * part // splits * 128 for part in range(splits + 1)]
    for rows, dtype in ((3, torch.bfloat16), (300, torch.float16)):
        x, tensors, extras = product(CASE, rows, form, dtype, "cuda", n=1056, k=1152)
        y = run(CASE, x, tensors, extras, tile=TILE)
        for scales, agrees in ((tensors[1], True), (tensors[1].roll(-1, 1), False)):
            values = SCHEMES[INTERLEAVED[CASE][0]].dequantise([tensors[0], scales], torch.float32)
            rounded = sum_of_rounded_parts(x, values, bounds, **extras)
            distance = (y - rounded).float().norm() / rounded.float().norm()
            assert (distance < ROUNDED_PARTS_LIMIT[dtype]) == agrees


@pytest.mark.gpu
@pytest.mark.parametrize("case", INTERLEAVED)
@pytest.mark.parametrize("rows", [150, 300])
def test_groups_of_any_width_agree(case: str, rows: int, hopper: None) -> None:
    """One group is as wide as the weight."""
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
    y = run(CASE, torch.eye(128, dtype=dtype, device="cuda"), tensors, {"gated": False}, tile=TILE)
    assert torch.equal(y, SCHEMES["int4_bfloat16_interleaved"].dequantise(tensors, dtype).T)


@pytest.mark.gpu
def test_runs_of_a_product_are_equal(hopper: None) -> None:
    for n, k in ((28672, 4096), (4096, 14336)):
        x, tensors, extras = product(CASE, 300, "plain", device="cuda", n=n, k=k)
        first = run(CASE, x, tensors, extras, tile=TILE)
        differs = [(run(CASE, x, tensors, extras, tile=TILE) != first).any() for _ in range(60)]
        assert not torch.stack(differs).any()


def test_gluon_is_supported() -> None:
    assert supported()
