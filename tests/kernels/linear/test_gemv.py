"""The GEMV kernel agrees with a product in float64 in every form, and reads only weights before the PDL wait."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.kernels.linear import gemv, ops
from tcdeploy.kernels.linear.tile_configs import GEMV_TILES, GemvTile, fit_gemv_block_k, gemv_configs
from tests.kernels.linear.matmul_cases import (
    EPS,
    REAL_SHAPES,
    assert_agrees,
    assert_reads_only,
    assert_replays_repeat,
    expected,
    pointers_used_before_wait,
    rand,
    relative_error,
)
from tests.triton_tools import HOPPER_SHARED_BYTES, compile_for_hopper, record_launches, triton_interpreter

FORMS = {  # addend, gated, norm
    "plain": (False, False, False),
    "added": (True, False, False),
    "gated": (False, True, False),
    "normed": (False, False, True),
    "normed and added": (True, False, True),
    "normed and gated": (False, True, True),
}
each_tile = pytest.mark.parametrize("tile", GEMV_TILES, ids=[tile.name for tile in GEMV_TILES])
each_form = pytest.mark.parametrize("form", FORMS)


def arguments(
    form: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """x, w and the keyword arguments of `form`. x is small enough for EPS to matter."""
    added, gated, normed = FORMS[form]
    x, w = rand(1, k, dtype=dtype, device=device), rand(n, k, dtype=dtype, device=device) / 4
    extras: dict[str, Any] = {"gated": gated}
    if added:
        extras["addend"] = rand(n, dtype=dtype, device=device) * 10
    if normed:
        extras["norm"] = rand(k, dtype=dtype, device=device)
    return (x / 2 if normed else x / 4), w, extras


def matmul(x: Tensor, w: Tensor, tile: GemvTile, extras: dict[str, Any]) -> Tensor:
    return gemv.matmul(x, w, tile, **extras, **({"eps": EPS} if "norm" in extras else {}))


@each_tile
@each_form
@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [(16, 64, torch.bfloat16), (48, 192, torch.bfloat16), (16, 4096, torch.float16), (16, 704, torch.bfloat16)],
    ids=["one step", "not a power of two", "whole tiles of float16", "a row that ends within a step"],
)
def test_every_form_agrees_and_writes_only_its_row(
    n: int, k: int, dtype: torch.dtype, form: str, tile: GemvTile, device: str, poisoned_outputs: list[Tensor]
) -> None:
    n += 16 if form.endswith("gated") and n % 32 else 0
    x, w, extras = arguments(form, n, k, dtype, device)
    assert_agrees(matmul(x, w, tile, extras), expected(x, w, **extras))
    assert poisoned_outputs[0].shape[1] == (n // 2 if extras["gated"] else n)
    assert poisoned_outputs[0][1:].isnan().all(), "rows past the first were written"


@each_tile
def test_the_row_and_the_residual_may_be_slices(tile: GemvTile, device: str) -> None:
    packed, w, residual = rand(3, 768, device=device), rand(48, 256, device=device), rand(2, 96, device=device)
    for x in (packed[1:2, 256:512], packed[:1, 3:259]):
        extras = {"addend": residual[1:, 16:64]}
        assert_agrees(matmul(x, w, tile, extras), expected(x, w, **extras))


def test_the_norm_weight_may_be_float32(device: str) -> None:
    x, w, _ = arguments("plain", 64, 256, device=device)
    norm = rand(256, dtype=torch.float32, device=device)
    assert_agrees(matmul(x, w, GEMV_TILES[0], {"norm": norm}), expected(x, w, norm=norm))


def test_sums_accumulate_in_float32(device: str) -> None:
    for tile in GEMV_TILES:
        x, w = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.ones(16, 4096, dtype=torch.bfloat16)
        x[:, [0, 65, 4095]] = torch.tensor([4096, 0.25, -4096], dtype=torch.bfloat16)
        assert (gemv.matmul(x.to(device), w.to(device), tile) == 0.25).all()


@each_tile
@each_form
@pytest.mark.parametrize("k", [192, 704])
def test_the_kernel_reads_only_its_inputs(k: int, form: str, tile: GemvTile, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, extras = arguments(form, 32, k)
    inputs = [x, w, *(extra for extra in extras.values() if isinstance(extra, Tensor))]
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, *inputs) as loads:
        assert_agrees(matmul(x, w, tile, extras), expected(x, w, **extras))
    assert sum(loads) >= sum(tensor.numel() for tensor in inputs)


# The op.


@each_form
def test_on_a_cpu_the_op_agrees(form: str) -> None:
    x, w, extras = arguments(form, 64, 128)
    assert_agrees(call_op(x, w, 0, extras), expected(x, w, **extras))


def call_op(x: Tensor, w: Tensor, config: int, extras: dict[str, Any]) -> Tensor:
    if "norm" in extras:
        return ops.rms_norm_linear(x, extras["norm"], EPS, w, extras.get("addend"), extras["gated"], config)
    return ops.linear_silu_mul(x, w, config) if extras["gated"] else ops.linear(x, w, extras.get("addend"), config)


@each_form
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck_passes(form: str, device: str) -> None:
    x, w, extras = arguments(form, 1024, 1024, device=device)
    if "norm" in extras:
        torch.library.opcheck(
            ops.rms_norm_linear.overload, (x, extras["norm"], EPS, w, extras.get("addend"), extras["gated"], 0)
        )
    elif extras["gated"]:
        torch.library.opcheck(ops.linear_silu_mul.overload, (x, w, 0))
    else:
        torch.library.opcheck(ops.linear.overload, (x, w, extras.get("addend"), 0))


# Heuristics.


@pytest.mark.parametrize(
    ("n", "k", "guess"),
    [
        (6144, 4096, "n2_k2048"), (4096, 4096, "n4_k2048"), (28672, 4096, "n1_k2048"), (4096, 14336, "n1_k1024"),
        (128256, 4096, "n1_k2048"), (4608, 3584, "n4_k512"), (3584, 3584, "n2_k2048"), (37888, 3584, "n4_k512_s3"),
        (3584, 18944, "n1_k1024"), (3072, 2048, "n8_k1024"), (2048, 2048, "n1_k1024"), (16384, 2048, "n2_k1024"),
        (2048, 8192, "n1_k1024"), (128256, 2048, "n2_k1024"), (151936, 2048, "n2_k1024"),
    ],
)  # fmt: skip
def test_the_best_guess_comes_first(n: int, k: int, guess: str) -> None:
    configs = gemv_configs(n, k)
    assert GEMV_TILES[configs[0]].name == guess
    assert sorted(configs) == list(range(len(GEMV_TILES)))


@pytest.mark.parametrize(
    ("n", "k", "name"),
    [(128, 2048, "n1_k2048"), (16, 1024, "n1_k1024"), (512, 4608, "n1_k1024"), (32, 2880, "n1_k1024")],
)
def test_routers_have_a_program_for_each_row(n: int, k: int, name: str) -> None:
    (config,) = gemv_configs(n, k)
    assert GEMV_TILES[config].name == name


@pytest.mark.parametrize(("n", "k"), [(512, 2896), (8, 4096), (4096, 512), (4104, 4096), (4096, 4112)])
def test_unsupported_or_unmeasured_shapes_have_no_config(n: int, k: int) -> None:
    assert gemv_configs(n, k) == ()


@pytest.mark.parametrize(
    ("block_k", "k", "fitted"),
    [
        (2048, 4096, 2048), (2048, 18944, 512), (2048, 2880, 1024), (512, 2880, 512), (1024, 2688, 1024),
        (2048, 704, 512), (2048, 192, 64),
    ],
)  # fmt: skip
def test_steps_exceed_a_row_by_little(block_k: int, k: int, fitted: int) -> None:
    assert fit_gemv_block_k(block_k, k) == fitted


@each_form
def test_masked_steps_load_16_bytes_at_a_time(form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    x, w, extras = arguments(form, 32, 2880)
    matmul(x, w, GEMV_TILES[0], extras)
    loads = re.findall(r"ld\.global\S*", compile_for_hopper(launches[0]).asm["ptx"])
    assert [load for load in loads if load.endswith("v4.b32")], loads
    assert len([load for load in loads if not load.endswith("v4.b32")]) <= 1, loads  # that of the addend


# Tiles with a pipeline (num_stages > 1) use shared memory and are compiled in all six forms, the remaining ones in two.
COMPILED = [
    pytest.param(form, tile, id=f"{form}-{tile.name}")
    for i, tile in enumerate(GEMV_TILES)
    for j, form in enumerate(FORMS)
    if tile.num_stages > 1 or (i - j) % 3 == 0
]


@pytest.mark.parametrize(("form", "tile"), COMPILED)
def test_the_kernel_fits_hopper_and_reads_only_weights_before_the_wait(
    form: str, tile: GemvTile, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gemv, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    x, w, extras = arguments(form, 32, 4096)
    matmul(x, w, tile, extras)
    compiled = compile_for_hopper(launches[0])
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    assert compiled.metadata.launch_pdl
    early_pointers = pointers_used_before_wait(compiled.asm["ttir"])
    assert early_pointers == ({"w", "norm"} if "norm" in extras else {"w"})
    before, after = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert "ld.global" in before and "st.global" not in before and "cp.async" not in before
    assert after.index("griddepcontrol.launch_dependents") < after.index("ld.global")
    assert ("cp.async" in after) == (tile.num_stages > 1)


def test_pointers_used_before_the_wait_are_found() -> None:
    ttir = """tt.func @k(%out: !tt.ptr<f32>, %x: !tt.ptr<f32>, %n: i32) {
      %0 = tt.splat %x : x
      %1 = tt.addptr %0, %n : x
      %2 = tt.load %1 : x
      tt.store %out, %2 : x
      griddepcontrol.wait"""
    assert pointers_used_before_wait(ttir) == {"x", "out"}


def test_without_pdl_support_the_kernel_is_launched_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    gemv.matmul(*arguments("plain", 1024, 1024)[:2], GEMV_TILES[0])
    assert "launch_pdl" not in launches[0].options
    assert launches[0].args[-1] is False


# On a GPU, at real shapes.


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [*REAL_SHAPES, (5120, 2880)])
def test_real_shapes_agree_for_every_config(n: int, k: int) -> None:
    for form in FORMS:
        x, w, extras = arguments(form, n, k, device="cuda")
        torch.cuda.synchronize()  # the kernel may read the weights before earlier kernels end
        expected_y = expected(x, w, **extras)
        for config in gemv_configs(n, k):
            y = call_op(x, w, config, extras)
            assert relative_error(y, expected_y) < 3e-3
            assert torch.equal(call_op(x, w, config, extras), y)


@pytest.mark.gpu
@pytest.mark.parametrize("torch_between", [False, True], ids=["only our kernels", "torch kernels between"])
def test_graph_replays_of_a_chain_equal_eager_launches(torch_between: bool) -> None:
    """A layer's four products with their fused operations, each reading its predecessor's output."""
    shapes = ((4096, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for n, k in shapes]
    norm = torch.rand(4096, device="cuda", dtype=torch.bfloat16)
    configs = [gemv_configs(*shape)[0] for shape in shapes]
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)

    def chain() -> Tensor:
        h = ops.rms_norm_linear(x, norm, EPS, weights[0], None, False, configs[0])
        h = ops.linear(h * 2 if torch_between else h, weights[1], x, configs[1])
        inner = ops.rms_norm_linear(h, norm, EPS, weights[2], None, True, configs[2])
        return ops.linear(inner * 2 if torch_between else inner, weights[3], h, configs[3])

    assert_replays_repeat(chain, x)
