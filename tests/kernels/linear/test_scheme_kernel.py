"""The kernels of quantised weights, compiled for Hopper without a GPU: how they load weights, and that none spills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tcdeploy.kernels.linear import scheme_gemm, scheme_matmul
from tcdeploy.kernels.linear.scheme_tiles import SCHEME_GEMM_TILES, SchemeGemmTile, Tile, skinny_gemm_tile
from tests.kernels.linear.matmul_cases import pointers_used_before_wait
from tests.kernels.linear.scheme_cases import CASES, each_main_case, product, run, weight_tensors
from tests.triton_tools import HOPPER_SHARED_BYTES, compile_for_hopper, record_launches, spilled_bytes


def launch(case: str, rows: int, form: str) -> None:
    x, tensors, extras = product(case, rows, form, n=256, k=4096)
    run(case, x, tensors, extras)


@each_main_case
@pytest.mark.parametrize("form", ["normed and gated", "added"])
def test_the_gemv_loads_weights_16_bytes_at_once_and_before_the_wait(
    case: str, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(scheme_matmul, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    launch(case, 1, form)
    compiled = compile_for_hopper(launches[0], runs_ptxas=False)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.launch_pdl and compiled.metadata.shared <= HOPPER_SHARED_BYTES
    weight_loads = re.findall(r"ld\.global\S*evict_first\S*", ptx)
    assert weight_loads and all(load.endswith(".v4.b32") for load in weight_loads)
    assert pointers_used_before_wait(compiled.asm["ttir"]) <= {"weight", "row_scale"}
    before, after = ptx.split("griddepcontrol.wait")
    assert "evict_first" in before and "st.global" not in before
    assert "griddepcontrol.launch_dependents" in after
    assert spilled_bytes(ptx, tmp_path) == 0


@each_main_case
@pytest.mark.parametrize("rows", [8, 16, 64])
def test_the_skinny_gemm_copies_weights_asynchronously_into_tensor_cores(
    case: str, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tile = skinny_gemm_tile(rows, 256, 2 if "4" in case else 1)
    ptx = assert_copies_asynchronously(case, rows, tile, monkeypatch, tmp_path)
    assert rows > 16 or "cp.async.ca" not in ptx  # cg copies 16 bytes, ca copies less
    assert re.search(r"\b(mma\.sync|wgmma)", ptx)


@each_main_case
@pytest.mark.parametrize("tile", SCHEME_GEMM_TILES, ids=lambda tile: tile.name)
def test_the_gemm_copies_weights_asynchronously_into_tensor_cores(
    case: str, tile: SchemeGemmTile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ptx = assert_copies_asynchronously(case, tile.block_m, tile, monkeypatch, tmp_path)
    assert "cp.async.ca" not in ptx and "wgmma" in ptx


def assert_copies_asynchronously(
    case: str, rows: int, tile: Tile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """Compile a product, check its memory accesses and return its PTX."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module in (scheme_matmul, scheme_gemm):
        monkeypatch.setattr(module, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    x, tensors, extras = product(case, rows, "gated" if rows == 16 else "added", n=256, k=4096)
    run(case, x, tensors, extras, tile=tile)
    compiled = compile_for_hopper(launches[0], runs_ptxas=False)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.launch_pdl and compiled.metadata.shared <= HOPPER_SHARED_BYTES
    assert "cp.async.cg.shared.global" in ptx
    accesses = [ptx.index(opcode) for opcode in ("cp.async", "ld.global", "st.global") if opcode in ptx]
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents") < min(accesses)
    assert spilled_bytes(ptx, tmp_path) == 0
    return ptx


@each_main_case
def test_the_dense_weight_is_written_in_wide_stores_without_spills(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    name, _ = CASES[case]
    scheme_matmul.dequantised(name, weight_tensors(case, 256, 4096), torch.bfloat16)
    ptx = compile_for_hopper(launches[0], runs_ptxas=False).asm["ptx"]
    stores = re.findall(r"st\.global\S*", ptx)
    assert stores and all(store.endswith((".v4.b32", ".v2.b32")) for store in stores), set(stores)
    assert spilled_bytes(ptx, tmp_path) == 0
