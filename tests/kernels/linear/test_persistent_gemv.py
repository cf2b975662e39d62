"""The GEMV of int4 weights with persistent programs: its results, and how the compiled kernel loads the weight."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tcdeploy.kernels.linear import persistent_gemv
from tcdeploy.kernels.linear.persistent_gemv import is_supported, programs
from tcdeploy.kernels.linear.scheme_operands import operands
from tcdeploy.kernels.linear.scheme_tiles import PERSISTENT_GEMV_TILES, PersistentGemvTile
from tcdeploy.planning.schemes import SCHEMES
from tests.kernels.linear.matmul_cases import (
    assert_agrees,
    assert_reads_only,
    expected,
    pointers_used_before_wait,
)
from tests.kernels.linear.scheme_cases import CASES, FORMS, product, reference, run, weight_tensors
from tests.triton_tools import (
    HOPPER_SHARED_BYTES,
    compile_for_hopper,
    device,
    record_launches,
    spilled_bytes,
    triton_interpreter,
)

__all__ = ["device"]

SERVED = {  # schemes, and the columns of a group
    "groups of 128": ("int4_bfloat16", 128),
    "groups of 256": ("int4_float16", 256),
    "permuted": ("int4_float32_permuted", 128),
}
each_tile = pytest.mark.parametrize("tile", PERSISTENT_GEMV_TILES, ids=lambda tile: tile.name)


@pytest.fixture(autouse=True)
def served_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for case, scheme in SERVED.items():
        monkeypatch.setitem(CASES, case, scheme)


@each_tile
@pytest.mark.parametrize("k", [1024, 1536])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_agrees_and_writes_only_its_row(
    tile: PersistentGemvTile, form: str, k: int, device: str, poisoned_outputs: list[Tensor]
) -> None:
    """On a GPU, the last programs have fewer tiles than the others. A row of 1,536 columns is padded to 2,048."""
    x, tensors, extras = product("groups of 128", 1, form, device=device, n=224, k=k)
    y = run("groups of 128", x, tensors, extras, tile=tile)
    assert_agrees(y, reference("groups of 128", x, tensors, extras))
    assert poisoned_outputs[0][1:].isnan().all(), "rows past the result were written"


@pytest.mark.parametrize("k", [1024, 1536])
def test_the_norm_divides_by_the_mean_square_of_the_row(k: int, device: str) -> None:
    """Unlike in other tests, the mean square is not small compared with eps."""
    x, tensors, extras = product("groups of 128", 1, "normed and gated", device=device, n=64, k=k)
    x = x * 4 / x.std()
    extras["norm"] = extras["norm"] / k**0.5
    y = run("groups of 128", x, tensors, extras, tile=PERSISTENT_GEMV_TILES[0])
    assert_agrees(y, reference("groups of 128", x, tensors, extras))


@pytest.mark.parametrize("case", SERVED)
def test_each_scheme_and_float16_inputs_agree(case: str, device: str) -> None:
    x, tensors, extras = product(case, 1, "normed and added", torch.float16, device, n=64, k=2048)
    assert_agrees(run(case, x, tensors, extras, tile=PERSISTENT_GEMV_TILES[0]), reference(case, x, tensors, extras))


def test_a_scale_of_the_next_group_or_tile_exceeds_the_tolerance(device: str) -> None:
    x, tensors, extras = product("groups of 128", 1, "plain", device=device, n=64, k=1024)
    y = run("groups of 128", x, tensors, extras, tile=PERSISTENT_GEMV_TILES[0])
    for shift, dim in ((-1, 1), (-8, 0)):
        rolled = SCHEMES["int4_bfloat16"].dequantise([tensors[0], tensors[1].roll(shift, dim)], torch.float64)
        with pytest.raises(AssertionError):
            assert_agrees(y, expected(x, rolled, **extras))


@pytest.mark.parametrize("k", [1024, 1536])
def test_the_kernel_reads_only_its_inputs(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, tensors, extras = product("groups of 128", 1, "normed and gated", n=96, k=k)
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, x, *tensors, extras["norm"]) as loads:
        y = run("groups of 128", x, tensors, extras, tile=PERSISTENT_GEMV_TILES[0])
    assert_agrees(y, reference("groups of 128", x, tensors, extras))
    assert sum(loads) >= x.numel() + tensors[0].numel()


@pytest.mark.parametrize(
    ("case", "k", "name", "served"),
    [
        ("groups of 128", 4096, "p8", True),
        ("permuted", 2048, "p4", True),
        ("groups of 128", 14336, "p8", False),
        ("groups of 128", 14336, "p4w8", True),
        ("int4", 4096, "p8", False),
    ],
)
def test_weights_that_the_kernel_serves(case: str, k: int, name: str, served: bool) -> None:
    weight = operands(CASES[case][0], weight_tensors(case, k=k))
    assert is_supported(weight, next(tile for tile in PERSISTENT_GEMV_TILES if tile.name == name)) == served


@pytest.mark.parametrize(("tiles", "max_programs", "count"), [(512, 528, 512), (3584, 528, 512), (768, 528, 384)])
def test_programs_have_equal_shares(tiles: int, max_programs: int, count: int) -> None:
    assert programs(tiles, max_programs) == count


@each_tile
@pytest.mark.parametrize("form", ["normed and gated", "added"])
def test_weights_are_copied_asynchronously_16_bytes_at_once(
    tile: PersistentGemvTile, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(persistent_gemv, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    x, tensors, extras = product("groups of 128", 1, form, n=512, k=14336 if "p4w8" in tile.name else 4096)
    run("groups of 128", x, tensors, extras, tile=tile)
    compiled = compile_for_hopper(launches[0], runs_ptxas=False)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.launch_pdl
    assert tile.programs_per_sm * (compiled.metadata.shared + 1024) <= HOPPER_SHARED_BYTES
    assert "cp.async.cg" in ptx and (form == "added" or "cp.async.ca" not in ptx)  # ca: of fewer bytes
    early_pointers = {"group_scale", "norm", *(["weight"] if tile.is_early else [])}
    assert pointers_used_before_wait(compiled.asm["ttir"]) == early_pointers - (set() if "norm" in extras else {"norm"})
    before, after = ptx.split("griddepcontrol.wait")
    assert "st.global" not in before and "griddepcontrol.launch_dependents" in after
    assert re.search(r"fma\.rn\.f32", ptx)
    assert spilled_bytes(ptx, tmp_path) == 0


@pytest.mark.gpu
@each_tile
@pytest.mark.parametrize("form", FORMS)
def test_real_shapes_agree_on_a_gpu(tile: PersistentGemvTile, form: str) -> None:
    for n in (4096, 6144, 28672):
        x, tensors, extras = product("groups of 128", 1, form, device="cuda", n=n, k=4096)
        assert_agrees(
            run("groups of 128", x, tensors, extras, tile=tile), reference("groups of 128", x, tensors, extras)
        )
