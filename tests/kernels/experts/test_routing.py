"""`tcdeploy::top_k` chooses the columns that torch.topk chooses, with the weights of transformers' routers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.experts import routing, routing_kernel
from tcdeploy.kernels.experts.ops import top_k
from tcdeploy.kernels.experts.routing import SOFTMAX_KINDS, is_supported, launch_top_k, plain_top_k
from tests.kernels.linear.matmul_cases import assert_reads_only
from tests.triton_tools import compile_for_hopper, record_launches, record_prefetches, spilled_bytes, triton_interpreter

SHAPES = {
    "qwen3": (128, 8),
    "gpt-oss": (32, 4),
    "mixtral": (8, 2),
    "qwen3-next": (512, 10),
    "odd": (60, 4),
    "all": (5, 5),
}
NAN, INF = float("nan"), float("inf")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
each_softmax = pytest.mark.parametrize("softmax", SOFTMAX_KINDS)


def distinct_scores(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """No two scores of a row are equal, so that every implementation has the same order."""
    torch.manual_seed(columns)
    steps = torch.arange(columns) - columns // 2
    return torch.stack([steps[torch.randperm(columns)] / 32 for _ in range(rows)]).to(dtype)


def by_transformers(logits: Tensor, k: int, softmax: str) -> tuple[Tensor, Tensor]:
    """The formula of the routers, in float64."""
    wide = logits.double()
    values, indices = (wide.softmax(-1) if softmax != "none" else wide).topk(k, dim=-1)
    return values / values.sum(-1, keepdim=True) if softmax == "selected" else values, indices


@each_softmax
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_has_the_experts_and_weights_of_the_routers(shape: str, softmax: str, device: str) -> None:
    columns, k = SHAPES[shape]
    logits = distinct_scores(3, columns).to(device)
    expected_values, expected_indices = by_transformers(logits, k, softmax)
    for dtype in (torch.float32, torch.bfloat16):
        for function in (launch_top_k, plain_top_k):
            values, indices = function(logits, k, softmax, dtype)
            assert torch.equal(indices, expected_indices) and values.dtype == dtype
            assert values.is_contiguous() and indices.is_contiguous()
            if dtype == torch.float32:
                assert_close(values, expected_values.float(), rtol=2e-6, atol=0)
            else:  # of the two neighbouring values, either is within one rounding
                assert_close(values, expected_values.bfloat16(), rtol=2**-7, atol=0)


@each_dtype
def test_scores_may_be_strided_and_of_any_dtype(dtype: torch.dtype, device: str) -> None:
    scores = distinct_scores(4, 64, dtype).to(device)
    sliced = torch.cat([scores * 3, scores, scores], 1)[:, 64:128]
    values, indices = launch_top_k(sliced, 3, "none", dtype)
    expected_values, expected_indices = scores.topk(3)
    assert torch.equal(values, expected_values) and torch.equal(indices, expected_indices)


@each_dtype
def test_neighbouring_numbers_are_not_equal(dtype: torch.dtype, device: str) -> None:
    ones = torch.ones(64, dtype=dtype).view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    scores = (ones + torch.randperm(64)).to(ones.dtype).view(dtype)
    scores = torch.stack([scores, -scores]).to(device)
    values, indices = launch_top_k(scores, 8, "none", dtype)
    expected_values, expected_indices = scores.topk(8)
    assert torch.equal(values, expected_values) and torch.equal(indices, expected_indices)


def test_a_single_column_may_have_any_stride(device: str) -> None:
    """As the sums of one group of experts have. torch takes such rows as contiguous."""
    scores = distinct_scores(1, 64, torch.float32).to(device).as_strided((64, 1), (1, 64))
    values, indices = launch_top_k(routing.adjacent_columns(scores), 1, "none", torch.float32)
    assert torch.equal(values, scores) and not indices.any()


@each_dtype
def test_equal_scores_are_in_the_order_of_their_columns(dtype: torch.dtype, device: str) -> None:
    rows = [[1.0, 2, 1, 2, 0, 1], [0.0, -0.0, 0, -0.0, 0, -1], [-INF] * 6, [-1, -2, -1, -2, -3, -1]]
    for function in (launch_top_k, plain_top_k):
        values, indices = function(torch.tensor(rows, dtype=dtype, device=device), 4, "none", torch.float32)
        assert indices.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 5, 1]]
        assert values[3].tolist() == [-1, -1, -1, -2]


@each_softmax
@each_dtype
def test_nan_is_largest_and_columns_stay_distinct(dtype: torch.dtype, softmax: str, device: str) -> None:
    """All probabilities of rows with NaN or infinity are NaN, as in torch. Ids are still distinct and in range."""
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32).item()
    scores = torch.tensor(
        [[1, NAN, 3, -INF], [negative_nan, NAN, NAN, NAN], [INF, 0, INF, 1], [-INF] * 4], dtype=dtype, device=device
    )
    for function in (launch_top_k, plain_top_k):
        values, indices = function(scores, 3, softmax, torch.float32)
        assert indices.tolist() == [[1, 2, 0], [0, 1, 2], [0, 2, 3], [0, 1, 2]]
        if softmax == "none":
            assert_close(values, scores.gather(1, indices).float(), equal_nan=True, rtol=0, atol=0)
        else:
            assert values.isnan().all()


def test_the_order_of_very_small_and_very_large_scores_is_exact(device: str) -> None:
    """Softmax in float32 rounds these to equal probabilities."""
    scores = torch.tensor([[1e-9, 2e-9, -1e-9, 0.0], [-300.0, -200.0, 0.0, -250.0]], device=device)
    _, indices = launch_top_k(scores, 4, "all", torch.float32)
    assert indices.tolist() == [[1, 0, 3, 2], [2, 1, 3, 0]]


def test_the_kernel_reads_only_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = distinct_scores(2, 60)
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, scores) as loads:
        launch_top_k(scores, 4, "all", torch.float32)
    assert sum(loads) == 120


def test_the_beginnings_of_both_halves_of_the_chosen_experts_are_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, weights = distinct_scores(2, 16), torch.zeros(16, 64, 256, dtype=torch.bfloat16)
    monkeypatch.setattr(routing, "PREFETCH_PROGRAMS", 3)
    with triton_interpreter(monkeypatch):
        prefetched = record_prefetches(monkeypatch, routing.TOP_K, routing_kernel, routing)
        values, indices = launch_top_k(scores, 4, "all", torch.float32, weights)
    for actual, expected in zip((values, indices), plain_top_k(scores, 4, "all", torch.float32), strict=True):
        assert_close(actual, expected)
    addresses = set(np.concatenate([batch.ravel() for batch in prefetched]).tolist())
    halves = [weights.data_ptr() + weights[0].nbytes * int(i) + j for i in indices.ravel() for j in (0, 64 * 256)]
    assert addresses == {byte for half in halves for byte in range(half, half + 3 * 4096)}


def test_small_experts_are_prefetched_to_their_ends_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    for n in (16, 40, 5000):
        launch_top_k(distinct_scores(1, 16), 4, "all", torch.float32, torch.zeros(16, n, 256, dtype=torch.bfloat16))
    assert [launch.args[3] is not None for launch in launches] == [True, True, True]
    launches.clear()
    launch_top_k(distinct_scores(1, 16), 4, "all", torch.float32, torch.zeros(16, 15, 256, dtype=torch.bfloat16))
    assert launches[0].args[3] is None


@each_softmax
def test_opcheck_passes(softmax: str) -> None:
    torch.library.opcheck(top_k.overload, (distinct_scores(3, 16), 4, softmax, "bfloat16"))
    torch.library.opcheck(top_k.overload, (distinct_scores(3, 16), 4, softmax, "bfloat16", torch.zeros(16, 8, 8)))


def test_rows_that_the_kernel_takes() -> None:
    assert is_supported(1024, 32, torch.float32) and is_supported(2, 2, torch.bfloat16)
    assert not is_supported(1025, 8, torch.float32) and not is_supported(128, 33, torch.float32)
    assert not is_supported(4, 5, torch.float32) and not is_supported(128, 8, torch.float64)
    assert not is_supported(128, 0, torch.float32)


# The largest k takes 13 s: its steps are unrolled.
@pytest.mark.parametrize(
    ("columns", "k"), [(128, 8), (512, 10), (1024, 8), pytest.param(1024, 32, marks=pytest.mark.long)]
)
def test_the_kernel_is_one_warp_that_waits_before_it_loads(
    columns: int, k: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(routing, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    launch_top_k(torch.zeros(2, columns, dtype=torch.bfloat16), k, "selected", torch.bfloat16)
    kernel = compile_for_hopper(launches[0], runs_ptxas=False)
    ptx = kernel.asm["ptx"]
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents") < ptx.index("ld.global")
    assert kernel.metadata.num_warps == 1 and kernel.metadata.shared == 0 and "bar.sync" not in ptx
    assert len(re.findall(r"redux\.sync\.max\.s32", ptx)) == k, "each step is one instruction across the warp"
    assert spilled_bytes(ptx, tmp_path) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 2048])
@pytest.mark.parametrize("prefetches", [False, True])
def test_graph_replays_of_random_logits_equal_torch(prefetches: bool, rows: int) -> None:
    logits = torch.randn(rows, 128, device="cuda")
    weights = torch.zeros(128, 64, 2048, dtype=torch.bfloat16, device="cuda") if prefetches else None
    graph = torch.cuda.CUDAGraph()
    top_k(logits, 8, "selected", "float32", weights)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        values, indices = top_k(logits, 8, "selected", "float32", weights)
    for seed in range(3):
        torch.manual_seed(seed)
        logits.copy_(torch.randn(rows, 128))
        graph.replay()
        expected_values, expected_indices = by_transformers(logits, 8, "selected")
        assert torch.equal(indices, expected_indices)
        assert_close(values, expected_values.float(), rtol=2e-6, atol=0)
