"""The kernel for one row says what a product in float64 says, in every form, and reads early only what it may."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.linear import gemv, ops
from tcdeploy.linear.gemv import TILE_CONFIGS, TileConfig, ranked_configs
from tests.attention.paged import record_launches, triton_interpreter
from tests.linear.matmul_cases import (
    EPS,
    HOPPER_SHARED_BYTES,
    REAL_SHAPES,
    assert_agrees,
    assert_reads_only,
    assert_replays_repeat,
    compile_for_hopper,
    expected,
    rand,
    relative_error,
)

FORMS = {  # addend, gated, norm
    "plain": (False, False, False),
    "added": (True, False, False),
    "gated": (False, True, False),
    "normed": (False, False, True),
    "normed and added": (True, False, True),
    "normed and gated": (False, True, True),
}
each_tile = pytest.mark.parametrize("tile", TILE_CONFIGS, ids=[tile.name for tile in TILE_CONFIGS])
each_form = pytest.mark.parametrize("form", FORMS)


def arguments(
    form: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """x, w, and what else `form` takes. The row is small, so that EPS counts, and its norm's weights are not."""
    added, gated, normed = FORMS[form]
    x, w = rand(1, k, dtype=dtype, device=device), rand(n, k, dtype=dtype, device=device) / 4
    more: dict[str, Any] = {"gated": gated}
    if added:
        more["addend"] = rand(n, dtype=dtype, device=device) * 10
    if normed:
        more["norm"] = rand(k, dtype=dtype, device=device)
    return (x / 2 if normed else x / 4), w, more


def matmul(x: Tensor, w: Tensor, tile: TileConfig, more: dict[str, Any]) -> Tensor:
    return gemv.matmul(x, w, tile, **more, **({"eps": EPS} if "norm" in more else {}))


@each_tile
@each_form
@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [(32, 64, torch.bfloat16), (176, 1344, torch.bfloat16), (96, 4096, torch.float16)],
    ids=["small", "no power of two", "float16"],
)
def test_every_form_means_its_formula_and_writes_its_row_only(
    n: int, k: int, dtype: torch.dtype, form: str, tile: TileConfig, device: str, poisoned_outputs: list[Tensor]
) -> None:
    n += 16 if form.endswith("gated") and n % 32 else 0
    x, w, more = arguments(form, n, k, dtype, device)
    assert_agrees(matmul(x, w, tile, more), expected(x, w, **more))
    assert poisoned_outputs[0].shape[1] == (n // 2 if more["gated"] else n)
    assert poisoned_outputs[0][1:].isnan().all(), "rows past the first were written"


@each_tile
def test_the_row_and_the_residual_may_be_cut_out_of_others(tile: TileConfig, device: str) -> None:
    packed, w, residual = rand(3, 768, device=device), rand(48, 256, device=device), rand(2, 96, device=device)
    for x in (packed[1:2, 256:512], packed[:1, 3:259]):
        more = {"addend": residual[1:, 16:64]}
        assert_agrees(matmul(x, w, tile, more), expected(x, w, **more))


def test_a_norm_in_float32_is_taken_as_it_is(device: str) -> None:
    x, w, _ = arguments("plain", 64, 256, device=device)
    norm = rand(256, dtype=torch.float32, device=device)
    assert_agrees(matmul(x, w, TILE_CONFIGS[0], {"norm": norm}), expected(x, w, norm=norm))


def test_a_small_part_beside_a_large_one_survives_the_sum(device: str) -> None:
    for tile in TILE_CONFIGS:
        x, w = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.ones(16, 4096, dtype=torch.bfloat16)
        x[:, [0, 65, 4095]] = torch.tensor([4096, 0.25, -4096], dtype=torch.bfloat16)
        assert (gemv.matmul(x.to(device), w.to(device), tile) == 0.25).all()


@each_tile
@each_form
def test_nothing_outside_the_inputs_is_read(form: str, tile: TileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, more = arguments(form, 96, 192)
    inputs = [x, w, *(one for one in more.values() if isinstance(one, Tensor))]
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, *inputs) as loads:
        assert_agrees(matmul(x, w, tile, more), expected(x, w, **more))
    assert sum(loads) >= sum(one.numel() for one in inputs)


# The op.


@each_form
def test_on_a_cpu_the_op_is_the_formula(form: str) -> None:
    x, w, more = arguments(form, 64, 128)
    assert_agrees(call_op(x, w, 0, more), expected(x, w, **more))


def call_op(x: Tensor, w: Tensor, config: int, more: dict[str, Any]) -> Tensor:
    if "norm" in more:
        return ops.rms_norm_linear(x, more["norm"], EPS, w, more.get("addend"), more["gated"], config)
    return ops.linear_silu_mul(x, w, config) if more["gated"] else ops.linear(x, w, more.get("addend"), config)


@each_form
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck_passes(form: str, device: str) -> None:
    x, w, more = arguments(form, 1024, 1024, device=device)
    if "norm" in more:
        torch.library.opcheck(ops.rms_norm_linear, (x, more["norm"], EPS, w, more.get("addend"), more["gated"], 0))
    elif more["gated"]:
        torch.library.opcheck(ops.linear_silu_mul, (x, w, 0))
    else:
        torch.library.opcheck(ops.linear, (x, w, more.get("addend"), 0))


# What to launch, for which shape.


@pytest.mark.parametrize(
    ("n", "k", "guess"),
    [
        (6144, 4096, "n2_k2048"), (4096, 4096, "n4_k2048"), (28672, 4096, "n1_k2048"), (4096, 14336, "n1_k1024"),
        (128256, 4096, "n1_k2048"), (4608, 3584, "n4_k512"), (3584, 3584, "n2_k2048"), (37888, 3584, "n4_k512_s3"),
        (3584, 18944, "n1_k1024"), (3072, 2048, "n8_k1024"), (2048, 2048, "n1_k1024"), (16384, 2048, "n2_k1024"),
        (2048, 8192, "n1_k1024"), (128256, 2048, "n1_k2048"),
    ],
)  # fmt: skip
def test_the_best_guess_comes_first(n: int, k: int, guess: str) -> None:
    found = ranked_configs(n, k)
    assert TILE_CONFIGS[found[0]].name == guess
    assert sorted(found) == list(range(len(TILE_CONFIGS)))


@pytest.mark.parametrize(("n", "k"), [(512, 4096), (4096, 512), (4104, 4096), (4096, 4112)])
def test_what_was_not_measured_or_the_kernel_cannot_is_refused(n: int, k: int) -> None:
    assert ranked_configs(n, k) == ()


@each_tile
@each_form
def test_it_fits_hopper_and_reads_nothing_but_weights_before_it_waits(
    form: str, tile: TileConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gemv, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    x, w, more = arguments(form, 2048, 4096)
    matmul(x, w, tile, more)
    compiled = compile_for_hopper(launches[0])
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    assert compiled.metadata.launch_pdl
    early = pointers_used_before_wait(compiled.asm["ttir"])
    assert early == ({"w", "norm"} if "norm" in more else {"w"})
    assembly = compiled.asm["ptx"]
    before, after = assembly.split("griddepcontrol.wait")
    assert "ld.global" in before and "st.global" not in before and "cp.async" not in before
    assert after.index("griddepcontrol.launch_dependents") < after.index("ld.global")
    assert ("cp.async" in after) == (tile.num_stages > 1)


def pointers_used_before_wait(listing: str) -> set[str]:
    """The kernel's arguments that addresses of earlier loads and stores are made of, in Triton's own listing."""
    made = dict(re.findall(r"(%\w+) = (.*)", listing))

    def behind(name: str) -> set[str]:
        if name not in made:  # an argument
            return {name[1:]}
        return set().union(*(behind(one) for one in re.findall(r"%\w+", made[name])))

    before = listing.split("griddepcontrol.wait")[0]
    addresses = re.findall(r"tt\.(?:load|store|atomic\w*) (%\w+)", before)
    assert addresses
    found = set().union(*(behind(address) for address in addresses))
    return {name for name in found if re.search(rf"%{name}: !tt.ptr", listing)}


def test_what_is_touched_before_the_wait_can_be_more() -> None:
    listing = """tt.func @k(%out: !tt.ptr<f32>, %x: !tt.ptr<f32>, %n: i32) {
      %0 = tt.splat %x : x
      %1 = tt.addptr %0, %n : x
      %2 = tt.load %1 : x
      tt.store %out, %2 : x
      griddepcontrol.wait"""
    assert pointers_used_before_wait(listing) == {"x", "out"}


def test_a_gpu_without_dependent_launch_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    gemv.matmul(*arguments("plain", 1024, 1024)[:2], TILE_CONFIGS[0])
    assert "launch_pdl" not in launches[0].options
    assert launches[0].args[-1] is False


# On a GPU, at the sizes it is for.


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), REAL_SHAPES)
def test_real_shapes_agree_with_float64_for_every_candidate(n: int, k: int) -> None:
    for form in FORMS:
        x, w, more = arguments(form, n, k, device="cuda")
        torch.cuda.synchronize()  # the weights may be read early
        wanted = expected(x, w, **more)
        for config in ranked_configs(n, k):
            y = call_op(x, w, config, more)
            assert relative_error(y, wanted) < 3e-3
            assert torch.equal(call_op(x, w, config, more), y)


@pytest.mark.gpu
@pytest.mark.parametrize("between", [False, True], ids=["ours alone", "a kernel of torch's between"])
def test_thousands_of_replays_of_a_chain_give_the_bits_of_the_first(between: bool) -> None:
    """A layer's four products as they serve, each on what the one before it wrote."""
    shapes = ((4096, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for n, k in shapes]
    norm = torch.rand(4096, device="cuda", dtype=torch.bfloat16)
    configs = [ranked_configs(*shape)[0] for shape in shapes]
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)

    def chain() -> Tensor:
        h = ops.rms_norm_linear(x, norm, EPS, weights[0], None, False, configs[0])
        h = ops.linear(h * 2 if between else h, weights[1], x, configs[1])
        inner = ops.rms_norm_linear(h, norm, EPS, weights[2], None, True, configs[2])
        return ops.linear(inner * 2 if between else inner, weights[3], h, configs[3])

    assert_replays_repeat(chain, x)
