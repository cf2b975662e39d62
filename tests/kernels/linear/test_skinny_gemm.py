"""The skinny-GEMM kernel agrees with a matrix product in float64 for every tile, compiled or interpreted.

Tests that only compile the kernel or record its launches need no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.linear import ops, skinny_gemm
from tcdeploy.kernels.linear.tile_configs import MAX_ROWS, SKINNY_GEMM_TILES, SkinnyGemmTile, skinny_gemm_configs
from tcdeploy.planning.variants import SKINNY_GEMM_MAX_ROWS
from tests.kernels.linear.matmul_cases import (
    REAL_SHAPES,
    assert_agrees,
    assert_reads_only,
    assert_replays_repeat,
    expected,
    expected_gated,
    rand,
    relative_error,
)
from tests.triton_tools import (
    HOPPER_SHARED_BYTES,
    compile_for_hopper,
    record_launches,
    specialization_key,
    triton_interpreter,
)

each_tile = pytest.mark.parametrize("tile", SKINNY_GEMM_TILES, ids=[tile.name for tile in SKINNY_GEMM_TILES])
THREE_STEPS_K = 192  # fit_block_k reduces the block_k of every tile to 64


def n_of_two_programs(tile: SkinnyGemmTile) -> int:
    """One full tile of columns, and a second program with 16: a partial tile unless block_n is 16."""
    return tile.block_n + 16


@each_tile
@pytest.mark.parametrize("rows", [2, 3, 4, 7, 8, 9, 16, 17, 32, 33, 64])
def test_every_batch_size_agrees_and_writes_only_its_rows(
    rows: int, tile: SkinnyGemmTile, device: str, poisoned_outputs: list[Tensor]
) -> None:
    x, w = rand(rows, THREE_STEPS_K, device=device), rand(n_of_two_programs(tile), THREE_STEPS_K, device=device)
    assert_agrees(skinny_gemm.matmul(x, w, tile), expected(x, w))
    assert poisoned_outputs[0][rows:].isnan().all(), "rows past the batch were written"


@each_tile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (144, 192), (256, 128), (48, 2048)])
def test_any_multiple_of_16_for_n_and_64_for_k(
    n: int, k: int, dtype: torch.dtype, tile: SkinnyGemmTile, device: str, poisoned_outputs: list[Tensor]
) -> None:
    n = min(n, 4 * tile.block_n)  # no more than four programs
    x, w, bias = rand(5, k, dtype=dtype, device=device), rand(n, k, dtype=dtype, device=device), rand(n, dtype=dtype)
    bias = (bias * 10).to(device)
    assert_agrees(skinny_gemm.matmul(x, w, tile, bias), expected(x, w, bias))
    assert_agrees(skinny_gemm.matmul(x, w, tile), expected(x, w))


@each_tile
@pytest.mark.parametrize("rows", [2, 8, 33])
def test_a_residual_is_added_row_by_row(
    rows: int, tile: SkinnyGemmTile, device: str, poisoned_outputs: list[Tensor]
) -> None:
    n = n_of_two_programs(tile)
    x, w = rand(rows, 256, device=device), rand(n, 256, device=device)
    residual = (rand(rows, 3 * n) * 10).to(device)[:, n : 2 * n]
    assert not residual.is_contiguous()
    assert_agrees(skinny_gemm.matmul(x, w, tile, residual), expected(x, w, residual))
    assert poisoned_outputs[0][rows:].isnan().all(), "rows past the batch were written"


@each_tile
@pytest.mark.parametrize("rows", [2, 9, 33])
@pytest.mark.parametrize("half", [16, 64, 80])
def test_gated_is_silu_of_the_first_half_times_the_second(
    half: int, rows: int, tile: SkinnyGemmTile, device: str, poisoned_outputs: list[Tensor]
) -> None:
    x, w = (rand(size, THREE_STEPS_K, device=device) / 4 for size in (rows, 2 * half))
    assert_agrees(skinny_gemm.matmul(x, w, tile, gated=True), expected_gated(x, w))
    assert poisoned_outputs[0].shape[1] == half
    assert poisoned_outputs[0][rows:].isnan().all(), "rows past the batch were written"


@each_tile
def test_rows_of_x_may_be_strided(tile: SkinnyGemmTile, device: str) -> None:
    packed, w = rand(6, 3 * 256, device=device), rand(32, 256, device=device)
    for x in (packed[:, 256:512], packed[:, 8:264], packed[:, 3:259], packed[::2, :256]):
        assert not x.is_contiguous()
        assert_agrees(skinny_gemm.matmul(x, w, tile), expected(x, w))


@each_tile
def test_results_are_deterministic_and_rows_are_independent(tile: SkinnyGemmTile, device: str) -> None:
    x, w = rand(8, 256, device=device), rand(80, 256, device=device)
    first = skinny_gemm.matmul(x, w, tile)
    assert torch.equal(skinny_gemm.matmul(x, w, tile), first)
    x[3:] = float("nan")
    assert torch.equal(skinny_gemm.matmul(x, w, tile)[:3], first[:3])


def test_sums_accumulate_in_float32(device: str) -> None:
    """In bfloat16 4096 + 1/4 would be 4096, and subtracting 4096 would give 0."""
    for tile in SKINNY_GEMM_TILES:
        x, w = torch.zeros(2, 1024, dtype=torch.bfloat16), torch.ones(16, 1024, dtype=torch.bfloat16)
        x[:, [0, 65, 1023]] = torch.tensor([4096, 0.25, -4096], dtype=torch.bfloat16)
        assert (skinny_gemm.matmul(x.to(device), w.to(device), tile) == 0.25).all()


@each_tile
def test_the_kernel_reads_only_its_inputs(tile: SkinnyGemmTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads past the last row of x or w would not change the output, but could fault on an unmapped page."""
    x, w, bias = rand(5, 128), rand(144, 128), rand(5, 144)
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, x, w, bias) as loads:
        assert_agrees(skinny_gemm.matmul(x, w, tile, bias), expected(x, w, bias))
        assert sum(loads) > x.numel() + w.numel()
        assert_agrees(skinny_gemm.matmul(x, w[:96], tile, gated=True), expected_gated(x, w[:96]))


# The op.


def test_opcheck_passes_with_and_without_bias() -> None:
    x, w, bias = rand(4, 128), rand(48, 128), rand(48)
    torch.library.opcheck(ops.linear.overload, (x, w, None, 0))
    torch.library.opcheck(ops.linear.overload, (x[:, :64], w[:, :64].contiguous(), bias, 3))
    torch.library.opcheck(ops.linear.overload, (x, w, rand(4, 48), 3))
    torch.library.opcheck(ops.linear_silu_mul.overload, (x, rand(96, 128), 3))
    assert_agrees(ops.linear_silu_mul(x, w[:32], 0), expected_gated(x, w[:32]))


@pytest.mark.parametrize("with_bias", [False, True])
def test_on_a_cpu_the_op_agrees_and_compiles_without_graph_breaks(with_bias: bool) -> None:
    x, w, bias = rand(4, 128), rand(48, 128), rand(48) if with_bias else None

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    def step(x: Tensor, w: Tensor) -> Tensor:
        return ops.linear(x.relu(), w, bias, 2) + 1

    assert_agrees(ops.linear(x, w, bias, 2), expected(x, w, bias))
    assert_close(step(x, w), ops.linear(x.relu(), w, bias, 2) + 1)


# Heuristics.


@pytest.mark.parametrize(
    ("rows", "n", "k", "guess"),
    [
        (4, 6144, 4096, "n16_k128"), (8, 4096, 4096, "n16_k128"), (2, 28672, 4096, "n16_k1024"),
        (4, 4096, 14336, "n16_k1024"), (8, 128256, 4096, "n16_k512"), (4, 2048, 2048, "n16_k512"),
        (3, 16384, 2048, "n64_k128_s4"), (4, 128256, 2048, "n16_k1024"), (16, 6144, 4096, "n64_k64"),
        (9, 4096, 4096, "n64_k128_s7"), (16, 2048, 8192, "n16_k512"), (16, 28672, 4096, "n128_k128"),
        (32, 4096, 14336, "n64_k128_s7"), (32, 6144, 4096, "n64_k64"), (17, 28672, 4096, "n128_k128"),
        (64, 28672, 4096, "n128_k128"),
    ],
)  # fmt: skip
def test_the_best_guess_comes_first(rows: int, n: int, k: int, guess: str) -> None:
    configs = skinny_gemm_configs(rows, n, k)
    assert SKINNY_GEMM_TILES[configs[0]].name == guess
    assert len(set(configs)) == len(configs)


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(0, 4096, 4096), (1, 4096, 4096), (65, 28672, 4096), (64, 6144, 4096), (32, 2048, 8192), (4, 512, 4096),
     (4, 4096, 512), (4, 4104, 4096), (4, 4096, 4112)],
)  # fmt: skip
def test_shapes_that_are_unsupported_or_no_faster_than_cublas_have_no_config(rows: int, n: int, k: int) -> None:
    assert skinny_gemm_configs(rows, n, k) == ()


def test_the_plan_and_the_kernel_have_the_same_row_limit() -> None:
    assert SKINNY_GEMM_MAX_ROWS == MAX_ROWS


def launch(rows: int, n: int, k: int, config: int, gated: bool = False) -> None:
    x, w = torch.empty(rows, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
    skinny_gemm.matmul(x, w, SKINNY_GEMM_TILES[config], gated=gated)


def test_every_config_fits_hopper_and_waits_before_it_accesses_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(skinny_gemm, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    rows_and_configs = {
        (rows, config) for rows in (8, 16, 32, 64) for n, k in REAL_SHAPES for config in skinny_gemm_configs(rows, n, k)
    }
    most_rows = {config: rows for rows, config in sorted(rows_and_configs)}
    for rows, config in rows_and_configs:
        launch(rows, 2048, 1024, config)
    for config, rows in most_rows.items():  # gated too where the most shared memory is needed
        launch(rows, 2048, 1024, config, gated=True)
    assert len(most_rows) == len(SKINNY_GEMM_TILES) and len(launches) >= 20
    for recorded in launches:
        compiled = compile_for_hopper(recorded)
        assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
        assert compiled.metadata.launch_pdl
        ptx = compiled.asm["ptx"]
        accesses = [ptx.index(opcode) for opcode in ("cp.async", "ld.global", "st.global") if opcode in ptx]
        wait, trigger = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
        assert wait < trigger < min(accesses)
        assert "cp.async.cg.shared.global" in ptx and "mma" in ptx


def test_without_pdl_support_the_kernel_is_launched_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    launch(4, 2048, 1024, 0)
    assert "launch_pdl" not in launches[0].options
    assert launches[0].args[-1] is False


def test_batches_with_equal_padding_share_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    for rows in (2, 7, 8, 9, 13, 16, 64):
        launch(rows, 2048, 1024, 0)
    assert len({specialization_key(recorded) for recorded in launches}) == 3  # 8, 16 and 64 padded rows


# On a GPU, at real shapes.


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), REAL_SHAPES)
def test_real_shapes_agree_for_every_config(n: int, k: int) -> None:
    w, bias = torch.randn(n, k, device="cuda", dtype=torch.bfloat16), torch.randn(n, device="cuda").bfloat16()
    for rows in (2, 4, 8, 11, 16, 32, 64):
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        expected_y, expected_y_gated = expected(x, w, bias), expected_gated(x, w)
        for config in skinny_gemm_configs(rows, n, k):
            y = ops.linear(x, w, bias, config)
            assert relative_error(y, expected_y) < 3e-3
            assert torch.equal(ops.linear(x, w, bias, config), y)
            assert relative_error(ops.linear_silu_mul(x, w, config), expected_y_gated) < 3e-3


@pytest.mark.gpu
def test_opcheck_passes_on_the_gpu() -> None:
    x, w, bias = (rand(*shape, device="cuda") for shape in ((4, 1024), (2048, 1024), (2048,)))
    torch.library.opcheck(ops.linear.overload, (x, w, bias, 0))
    torch.library.opcheck(ops.linear.overload, (x, w, rand(4, 2048, device="cuda"), 0))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 16, 32])
def test_graph_replays_of_a_chain_equal_eager_launches(rows: int) -> None:
    """Four products, each reading its predecessor's output, with and without a torch kernel between them."""
    shapes = ((6144, 4096), (4096, 6144), (28672, 4096), (4096, 28672))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for n, k in shapes]
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)

    def chain() -> Tensor:
        y = x
        for i, w in enumerate(weights):
            y = ops.linear(y, w, None, skinny_gemm_configs(rows, *w.shape)[0])
            y = y * 2 if i % 2 else y
        return y

    assert_replays_repeat(chain, x)


@pytest.mark.gpu
def test_a_compiled_program_with_the_op_does_not_recompile() -> None:
    w = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64

    @torch.compile(fullgraph=True, dynamic=False)
    def step(x: Tensor) -> Tensor:
        return ops.linear(torch.nn.functional.silu(x), w, None, skinny_gemm_configs(4, 4096, 4096)[0]) + x

    x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            expected_y = torch.nn.functional.silu(x.double()).bfloat16().double() @ w.double().T + x.double()
            assert relative_error(step(x), expected_y) < 1e-2
