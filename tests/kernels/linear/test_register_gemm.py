"""The GEMM of int4 weights in registers: its results, and that the compiled kernel keeps the values in registers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.linear.register_gemm import fragment_order
from tcdeploy.kernels.linear.scheme_codes import _fragment_values, _plain_fragment, _plain_pair, _word_values
from tcdeploy.kernels.linear.scheme_matmul import matmul
from tcdeploy.kernels.linear.scheme_operands import operands
from tcdeploy.kernels.linear.scheme_tiles import FRAGMENT_GEMM_TILES, R128, REGISTER_GEMM_TILES, RegisterGemmTile
from tcdeploy.planning.schemes import SCHEMES
from tests.kernels.linear.matmul_cases import assert_agrees, assert_reads_only, expected
from tests.kernels.linear.scheme_cases import (
    CASES,
    FORMS,
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
    spilled_bytes,
    triton_interpreter,
)

__all__ = ["device"]

SERVED = {  # schemes, and the columns of a group of 768
    "groups of 128": ("int4_bfloat16", 128),
    "groups of 256": ("int4_float16", 256),
    "by row": ("int4_bfloat16", 768),
    "permuted": ("int4_float32_permuted", 128),
}
each_tile = pytest.mark.parametrize("tile", REGISTER_GEMM_TILES, ids=lambda tile: tile.name)
FRAGMENT_TILES = {tile.name: tile for tile in FRAGMENT_GEMM_TILES}
QUICK_FRAGMENT_TILES = ("f64u2_s4", "f128w4", "f128_v_s4", "f256_v")
each_fragment_tile = pytest.mark.parametrize(
    "tile",
    [
        pytest.param(tile, marks=() if name in QUICK_FRAGMENT_TILES else pytest.mark.long)
        for name, tile in FRAGMENT_TILES.items()
    ],
    ids=lambda tile: tile.name,
)


@pytest.fixture(autouse=True)
def served_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for case, scheme in SERVED.items():
        monkeypatch.setitem(CASES, case, scheme)


@each_tile
@pytest.mark.parametrize("case", SERVED)
@pytest.mark.parametrize("form", [form for form in FORMS if "normed" not in form])
@pytest.mark.parametrize("rows", [9, 32])
def test_each_form_agrees_and_writes_only_its_rows(
    case: str, tile: RegisterGemmTile, form: str, rows: int, device: str, poisoned_outputs: list[Tensor]
) -> None:
    """The last tile has rows past the weight, and 768 columns have two equal parts of whole steps."""
    x, tensors, extras = product(case, rows, form, device=device, n=160, k=768)
    y = run(case, x, tensors, extras, tile=tile)
    assert_agrees(y, reference(case, x, tensors, extras))
    assert poisoned_outputs[0][rows:].isnan().all(), "rows past the batch were written"


@each_fragment_tile
@pytest.mark.parametrize("form", ["plain", "added", "gated"])
@pytest.mark.parametrize("rows", [9, 32])
def test_weights_in_the_order_of_fragments_agree(
    tile: RegisterGemmTile, form: str, rows: int, device: str, poisoned_outputs: list[Tensor]
) -> None:
    """1,024 columns are split into up to four parts, each with an even number of steps."""
    x, tensors, extras = product("groups of 128", rows, form, device=device, n=160, k=1024)
    y = run("groups of 128", x, [fragment_order(tensors[0]), *tensors[1:]], extras, tile=tile)
    assert_product_agrees("groups of 128", y, x, tensors, extras, tile)
    assert poisoned_outputs[0][rows:].isnan().all(), "rows past the batch were written"


@pytest.mark.parametrize("case", SERVED)
@pytest.mark.parametrize("name", ["f64", "f128_v"])
def test_groups_of_any_width_agree_in_the_order_of_fragments(case: str, name: str, device: str) -> None:
    x, tensors, extras = product(case, 19, "added", torch.float16, device, n=64, k=768)
    tile = FRAGMENT_TILES[name]
    if case != "by row" and tile.scales_values and tensors[1].dtype != x.dtype:
        tensors[1] = tensors[1].to(x.dtype).to(tensors[1].dtype)  # the kernel rounds these scales to x's dtype
    y = run(case, x, [fragment_order(tensors[0]), *tensors[1:]], extras, tile=tile)
    assert_product_agrees(case, y, x, tensors, extras, tile)


def test_all_codes_have_their_values_in_the_order_of_fragments(device: str) -> None:
    x = torch.zeros(32, 128, dtype=torch.bfloat16)
    x[torch.arange(32), torch.arange(32) + 7] = 1
    weight = torch.arange(64, dtype=torch.uint8) * 37 + torch.arange(256, dtype=torch.uint8)[:, None]
    tensors = [weight.to(device), torch.full((256, 1), 0.5, dtype=torch.bfloat16, device=device)]
    y = matmul("int4_bfloat16", x.to(device), [fragment_order(tensors[0]), tensors[1]], tile=FRAGMENT_TILES["f64"])
    expected_values = SCHEMES["int4_bfloat16"].dequantise(tensors, x.dtype)[:, 7:39].T
    assert_close(y, expected_values, rtol=0, atol=0)


def test_inputs_may_be_float16_and_slices(device: str) -> None:
    x, tensors, extras = product("groups of 128", 19, "plain", torch.float16, device, n=64, k=256)
    columns = torch.cat([x[:, :3], x * 2, x, x], 1)[:, 256 + 3 : 2 * 256 + 3]
    y = run("groups of 128", columns, tensors, extras, tile=REGISTER_GEMM_TILES[0])
    assert_agrees(y, reference("groups of 128", x, tensors, extras))


@each_tile
def test_the_kernel_reads_only_its_inputs(tile: RegisterGemmTile, monkeypatch: pytest.MonkeyPatch) -> None:
    x, tensors, extras = product("groups of 128", 19, "gated", n=160, k=128)  # one part
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, x, *tensors) as loads:
        y = run("groups of 128", x, tensors, extras, tile=tile)
    assert_agrees(y, reference("groups of 128", x, tensors, extras))
    assert sum(loads) >= x.numel() + tensors[0].numel() // 4, "words of four bytes"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_codes_have_their_values(dtype: torch.dtype, device: str) -> None:
    """Each row of the input is 1 in one column, so that the product is some columns of the weight, exactly."""
    x = torch.zeros(32, 128, dtype=dtype)
    x[torch.arange(32), torch.arange(32) + 7] = 1
    weight = torch.arange(64, dtype=torch.uint8) * 37 + torch.arange(256, dtype=torch.uint8)[:, None]
    tensors = [weight.to(device), torch.full((256, 1), 0.5, dtype=torch.bfloat16, device=device)]
    y = matmul("int4_bfloat16", x.to(device), tensors, tile=REGISTER_GEMM_TILES[0])
    assert_close(y, SCHEMES["int4_bfloat16"].dequantise(tensors, dtype)[:, 7:39].T, rtol=0, atol=0)


def test_a_scale_of_the_next_group_exceeds_the_tolerance(device: str) -> None:
    x, tensors, extras = product("groups of 128", 19, "plain", device=device, n=64, k=768)
    y = run("groups of 128", x, tensors, extras, tile=REGISTER_GEMM_TILES[0])
    rolled = SCHEMES["int4_bfloat16"].dequantise([tensors[0], tensors[1].roll(-1, 1)], torch.float64)
    with pytest.raises(AssertionError):
        assert_agrees(y, expected(x, rolled, **extras))


@pytest.mark.parametrize(
    ("case", "is_served"),
    [*((case, True) for case in SERVED), *((case, False) for case in ("int4", "int4 with zeros", "mxfp4", "nvfp4"))],
)
def test_weights_that_the_kernel_serves(case: str, is_served: bool) -> None:
    assert operands(CASES[case][0], weight_tensors(case, k=768)).is_plain_int4 == is_served


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("form", ["added", "gated"])
@each_tile
def test_values_go_from_codes_to_the_tensor_cores_in_registers(
    tile: RegisterGemmTile, form: str, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of the tensor cores' instructions takes the weight from registers, and codes are copied 16 bytes at once."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    x, tensors, extras = product("groups of 128", rows, form, n=512, k=4096)
    run("groups of 128", x, tensors, extras, tile=tile)
    compiled = compile_for_hopper(launches[0], runs_ptxas=False)
    ptx = compiled.asm["ptx"]
    instructions = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)
    assert instructions and set(instructions) == {"{"}
    assert "cp.async.cg" in ptx and "cp.async.ca" not in ptx
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    assert spilled_bytes(ptx, tmp_path) == 0


@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("form", ["added", "gated"])
@pytest.mark.parametrize("name", ["f64_s4", "f128w4", "f128", "f64u2", "f128u2", "f128_v", "f256_v"])
def test_values_in_the_order_of_fragments_stay_in_registers(
    name: str, form: str, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """x is copied to the shared memory from which the tensor cores read it."""
    if rows > 64 and "v" not in name or rows > 16 and name == "f128w4":
        pytest.skip("with so many rows, the tile exceeds the registers")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    x, tensors, extras = product("groups of 128", rows, form, n=512, k=4096)
    run("groups of 128", x, tensors, extras, tile=FRAGMENT_TILES[name])
    compiled = compile_for_hopper(launches[0], runs_ptxas=False)
    ptx = compiled.asm["ptx"]
    instructions = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)
    assert instructions and set(instructions) == {"{"}
    assert "cp.async.cg" in ptx and "cp.async.ca" not in ptx
    assert "stmatrix" not in ptx[: ptx.rindex("wgmma.mma_async")], "no operand is written back to shared memory"
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    assert spilled_bytes(ptx, tmp_path) == 0


@triton.jit
def both_forms_kernel(out, words):
    """Writes the values of 256 words by PTX and in the plain form: [form, word, code, byte % 2, byte // 2]."""
    codes, offsets = tl.load(words + tl.arange(0, 256)[:, None]), tl.arange(0, 2048)
    DTYPE: tl.constexpr = out.dtype.element_ty
    tl.store(out + offsets, tl.reshape(_word_values(codes, DTYPE), (2048,)))
    first, second = _plain_pair(codes, DTYPE), _plain_pair(codes >> 8, DTYPE)
    third, last = _plain_pair(codes >> 16, DTYPE), _plain_pair(codes >> 24, DTYPE)
    plain = tl.join(tl.join(first, second), tl.join(third, last))
    tl.store(out + 2048 + offsets, tl.reshape(plain, (2048,)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ptx_and_the_plain_form_make_the_same_values(dtype: torch.dtype) -> None:
    words = torch.randint(-(2**31), 2**31, (256,), dtype=torch.int32, device="cuda")
    out = torch.full((2, 2048), float("nan"), dtype=dtype, device="cuda")
    both_forms_kernel[(1,)](out, words)
    assert torch.equal(out[0], out[1])


@triton.jit
def both_fragment_forms_kernel(out, words, scales):
    """As `both_forms_kernel`, in the order of fragments: both forms without scales, and then with a scale per word."""
    codes, factors = tl.load(words + tl.arange(0, 256)[:, None]), tl.load(scales + tl.arange(0, 256))
    offsets, DTYPE = tl.arange(0, 2048), out.dtype.element_ty
    first, second = _plain_fragment(codes, 0, DTYPE), _plain_fragment(codes, 1, DTYPE)
    third, last = _plain_fragment(codes, 2, DTYPE), _plain_fragment(codes, 3, DTYPE)
    plain = tl.join(tl.join(first, third), tl.join(second, last))
    tl.store(out + offsets, tl.reshape(_fragment_values(codes, None, DTYPE), (2048,)))
    tl.store(out + 2048 + offsets, tl.reshape(plain, (2048,)))
    tl.store(out + 4096 + offsets, tl.reshape(_fragment_values(codes, factors, DTYPE), (2048,)))
    tl.store(out + 6144 + offsets, tl.reshape(plain * factors[:, None, None, None, None], (2048,)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ptx_and_the_plain_form_make_the_same_values_of_fragments(dtype: torch.dtype) -> None:
    words = torch.randint(-(2**31), 2**31, (256,), dtype=torch.int32, device="cuda")
    out = torch.full((4, 2048), float("nan"), dtype=dtype, device="cuda")
    both_fragment_forms_kernel[(1,)](out, words, torch.randn(256, device="cuda").to(dtype))
    assert torch.equal(out[0], out[1]) and torch.equal(out[2], out[3])


@pytest.mark.gpu
@each_fragment_tile
@pytest.mark.parametrize("form", ["plain", "added", "gated"])
@pytest.mark.parametrize("rows", [16, 64, 128])
def test_real_shapes_agree_in_the_order_of_fragments_on_a_gpu(tile: RegisterGemmTile, form: str, rows: int) -> None:
    for n, k in ((4096, 4096), (4096, 14336)):
        x, tensors, extras = product("groups of 128", rows, form, device="cuda", n=n, k=k)
        y = run("groups of 128", x, [fragment_order(tensors[0]), *tensors[1:]], extras, tile=tile)
        assert_product_agrees("groups of 128", y, x, tensors, extras, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 32])
def test_gated_products_of_real_shapes_agree_on_a_gpu(rows: int) -> None:
    """With a tile that the heuristics choose only for products without SwiGLU."""
    x, tensors, extras = product("groups of 128", rows, "gated", device="cuda", n=28672, k=4096)
    y = run("groups of 128", x, tensors, extras, tile=REGISTER_GEMM_TILES[R128])
    assert_agrees(y, reference("groups of 128", x, tensors, extras))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["plain", "added", "gated"])
@pytest.mark.parametrize("rows", [9, 16, 32])
def test_real_shapes_agree_on_a_gpu(form: str, rows: int) -> None:
    """With the tiles of the heuristics."""
    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336)):
        x, tensors, extras = product("groups of 128", rows, form, device="cuda", n=n, k=k)
        y = run("groups of 128", x, tensors, extras)
        assert_agrees(y, reference("groups of 128", x, tensors, extras))
