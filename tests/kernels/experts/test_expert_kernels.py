"""The kernels of experts agree with a loop over pairs in float64, for each scheme, routing and tile.

The values of a weight are exact in the kernels, and sums are float32, so the tolerance is that of the output's
rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tcdeploy.kernels.experts.grouping import launch_grouping, sort_pairs, tables
from tcdeploy.kernels.experts.matmul import Tile, matmul
from tcdeploy.kernels.experts.tiles import (
    DECODE_GEMM_TILES,
    GEMV_TILES,
    PREFILL_GEMM_TILES,
    TRANSPOSED_GEMV_TILES,
    block_rows,
)
from tests.kernels.experts.expert_cases import EXPERT_CASES, ROUTINGS, Product, expected, product
from tests.kernels.linear.matmul_cases import assert_agrees

KERNELS = {"gemv": GEMV_TILES[0], "gemm": DECODE_GEMM_TILES[0], "sliced gemm": DECODE_GEMM_TILES[1]}
each_case = pytest.mark.parametrize("case", EXPERT_CASES)
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def run(case: Product, tile: Tile | None = None) -> Tensor:
    experts = case.tensors[0].shape[0]
    groups = sort_pairs(case.expert_ids, experts, block_rows(case.expert_ids.numel(), experts))
    return matmul(case.x, case.expert_ids, groups, case.tensors, case.bias, case.scheme, tile)


@each_case
@each_kernel
@pytest.mark.parametrize("routing", ["one pair", "some experts idle", "three slots"])
def test_every_scheme_agrees_and_writes_only_its_rows(
    case: str, kernel: str, routing: str, device: str, poisoned_outputs: list[Tensor]
) -> None:
    for row_per_pair, with_bias in ((False, True), (True, False)):
        arguments = product(case, ROUTINGS[routing], with_bias, row_per_pair, device=device)
        assert_agrees(run(arguments, KERNELS[kernel]), expected(arguments))
        assert poisoned_outputs[-1][arguments.expert_ids.numel() :].isnan().all(), "rows past the pairs were written"


# Groups


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("experts", [5, 32, 128])
@pytest.mark.parametrize("tokens", [1, 9, 32, 101])
def test_the_grouping_kernel_equals_sorting(tokens: int, experts: int, rows: int, device: str) -> None:
    torch.manual_seed(tokens)
    routings = [torch.randint(experts, (tokens, 3)), torch.full((tokens, 3), experts - 1), torch.zeros(tokens, 3)]
    for routing in routings:
        expert_ids = routing.long().to(device)
        actual = tables(launch_grouping(expert_ids, experts, rows), tokens * 3, experts)
        sorted_pairs = tables(sort_pairs(expert_ids, experts, rows), tokens * 3, experts)
        is_used = sorted_pairs.first < sorted_pairs.stop
        assert torch.equal(actual.order, sorted_pairs.order)
        for table, reference in zip(actual[1:], sorted_pairs[1:], strict=True):
            assert torch.equal(table[is_used], reference[is_used])
        assert not (actual.first < actual.stop)[~is_used].any(), "unused blocks are empty"
