"""The kernels of experts, compiled for Hopper without a GPU: how they load weights, and that none spills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from triton.compiler import CompiledKernel

from tcdeploy.kernels.experts import grouping, matmul
from tcdeploy.kernels.experts.tiles import DECODE_GEMM_TILES, PREFILL_GEMM_TILES, Tile, block_rows
from tests.kernels.experts.expert_cases import DENSE, EXPERT_CASES, expert_tensors, scheme_of
from tests.kernels.linear.scheme_cases import MAIN_CASES
from tests.triton_tools import HOPPER_SHARED_BYTES, compile_for_hopper, record_launches, spilled_bytes

EXPERTS, TOP_K, N = 8, 2, 128
TOKENS = {8: 10, 16: 20, 32: 80, 64: 100, 128: 800}  # that make blocks of this many rows
K = (2048, 2880)  # the second is no multiple of a step
# Weights whose kernels are compiled by default, and for how many rows of a block; --long compiles all pairs.
QUICK = dict.fromkeys((*DENSE, *MAIN_CASES), (8, 64)) | {
    "dense": tuple(TOKENS),
    "fp8_channel": (8, 32, 64, 128),
    "nvfp4": (8, 32, 64),
}


@pytest.fixture(autouse=True)
def triton_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module in (matmul, grouping):
        monkeypatch.setattr(module, "supports_pdl", lambda _: True)


def compiled(
    case: str, tokens: int, k: int, monkeypatch: pytest.MonkeyPatch, tile: Tile | None = None
) -> CompiledKernel:
    launches = record_launches(monkeypatch)
    x = torch.zeros(tokens, k, dtype=torch.bfloat16)
    expert_ids = torch.zeros(tokens, TOP_K, dtype=torch.int64)
    groups = grouping.sort_pairs(expert_ids, EXPERTS, 8)
    bias = torch.zeros(EXPERTS, N, dtype=torch.bfloat16)
    matmul.matmul(x, expert_ids, groups, expert_tensors(case, EXPERTS, N, k), bias, scheme_of(case), tile)
    kernel = compile_for_hopper(launches[-1], runs_ptxas=False)
    assert kernel.metadata.launch_pdl and kernel.metadata.shared <= HOPPER_SHARED_BYTES
    ptx = kernel.asm["ptx"]
    accesses = [ptx.index(opcode) for opcode in ("cp.async.c", "ld.global", "st.global") if opcode in ptx]
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents") < min(accesses)
    return kernel


@pytest.mark.parametrize(
    ("case", "k"),
    [
        pytest.param(case, k, marks=() if case in QUICK and (k == K[1] or case == "dense") else pytest.mark.long)
        for case in EXPERT_CASES
        for k in K
    ],
)
def test_the_gemv_loads_weights_16_bytes_at_once(
    case: str, k: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if case == "int4 permuted with zeros":  # groups of 96 columns
        k = 1920
    ptx = compiled(case, 1, k, monkeypatch).asm["ptx"]
    if case == "dense transposed":  # through the pipeline
        assert re.search(r"cp\.async\.cg\.shared\.global[^;]*0x10", ptx)
    else:
        weight_loads = re.findall(r"ld\.global\S*evict_first\S*", ptx)
        assert weight_loads and all(load.endswith(".v4.b32") for load in weight_loads)
    assert spilled_bytes(ptx, tmp_path) == 0


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        pytest.param(case, rows, marks=() if rows in QUICK.get(case, ()) else pytest.mark.long)
        for case in EXPERT_CASES
        for rows in TOKENS
    ],
)
def test_the_gemm_copies_weights_asynchronously_into_tensor_cores(
    case: str, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert block_rows(TOKENS[rows] * TOP_K, EXPERTS) == rows
    k = 1920 if case == "int4 permuted with zeros" else K[rows > 16]
    ptx = compiled(case, TOKENS[rows], k, monkeypatch).asm["ptx"]
    sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?(0x\w+)", ptx))
    # Large blocks of 4-bit values are not bound by memory, and scales of nvfp4 are copied like weights.
    smallest = {"0x8"} if rows < 64 and case != "nvfp4" else {"0x8", "0x4"}
    assert "0x10" in sizes and sizes - smallest == {"0x10"}
    assert re.search(r"\b(mma\.sync|wgmma)", ptx)
    assert rows < 64 or "wgmma" in ptx
    assert spilled_bytes(ptx, tmp_path) == 0


@pytest.mark.long
@pytest.mark.parametrize("case", ["dense", "dense transposed", "fp8_block", "fp8_channel", "mxfp4"])
@pytest.mark.parametrize(
    ("rows", "tile"),
    [(rows, tile) for rows in (8, 32) for tile in DECODE_GEMM_TILES]
    + [(rows, tile) for rows in (64, 128) for tile in PREFILL_GEMM_TILES],
)
def test_every_tile_fits_shared_memory(case: str, rows: int, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(case, TOKENS[rows], 2880, monkeypatch, tile)


@pytest.mark.parametrize(("tokens", "experts"), [(3, 8), (32, 128), (128, 512), (2048, 128)])
def test_the_grouping_kernels_compile_without_spills(
    tokens: int, experts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches = record_launches(monkeypatch)
    grouping.launch_grouping(torch.zeros(tokens, 8, dtype=torch.int64), experts, 8)
    ptx = compile_for_hopper(launches[0], runs_ptxas=False).asm["ptx"]
    assert ptx.index("griddepcontrol.wait") < min(ptx.index("ld.global"), ptx.index("st.global"))
    assert spilled_bytes(ptx, tmp_path) == 0
