"""How the products of experts are divided among programs. Does not import Triton."""

from __future__ import annotations

from tcdeploy.kernels.experts.grouping import MIN_BLOCK_ROWS


def block_rows(pairs: int, num_experts: int) -> int:
    """Pairs in a block. The two products of a layer share one grouping, so it depends on nothing else."""
    pairs_per_expert = pairs / num_experts
    if pairs_per_expert <= MIN_BLOCK_ROWS:
        return MIN_BLOCK_ROWS
    return 32 if pairs_per_expert <= 32 else 64 if pairs_per_expert <= 128 else 128
