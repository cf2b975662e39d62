"""The Triton kernels of advance.py, in two launches.

Each program instance of the first reads part of one row and stores its best token as one integer: the logit in sortable
form in the upper half, and MAX_TOKEN_ID - id in the lower, so that the larger integer is the larger logit and then the
lower id. The second runs one instance per row, which takes the maximum and writes the decode rows. NaN counts as larger
than every number, as in `torch.argmax`, so ids stay in range for any logits.

Rejected: one launch whose last program finishes the row. It saved 0.3 us of 3.4 us (H100, one row), and needs a counter
that every program must leave at zero. Timings: docs/performance-log.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

ARGMAX = Kernel("tcdeploy.kernels.sampling.advance_kernels", "_argmax_kernel")
ADVANCE = Kernel("tcdeploy.kernels.sampling.advance_kernels", "_advance_kernel")
TILE = 2048  # logits per load of a program
WARPS = 4
TARGET_PROGRAMS = 1024  # per launch: in a large batch each program reads several tiles
MAX_TILES = 16
MAX_TOKEN_ID = 2**31 - 1


def advance(
    logits: Tensor, rows: Tensor, lengths: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor
) -> Tensor:
    """As `advance.advance`; logits are contiguous."""
    size, vocab_size = logits.shape
    assert logits.is_contiguous() and vocab_size <= MAX_TOKEN_ID
    tiles = tiles_per_program(size, vocab_size)
    parts = -(-vocab_size // (tiles * TILE))
    bests = torch.empty(size, parts, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(size, dtype=torch.int64, device=logits.device)
    ARGMAX.launch((parts, size), bests, logits, vocab_size, tiles, parts, TILE, MAX_TOKEN_ID, num_warps=WARPS)
    ADVANCE.launch(
        (size,),
        tokens, token_ids, positions, seq_lens, bests, rows, lengths,
        parts, next_power_of_2(parts), MAX_TOKEN_ID, num_warps=1,
    )  # fmt: skip
    return tokens


def tiles_per_program(size: int, vocab_size: int) -> int:
    """Tiles that one program reads, a power of two. One in a small batch, to use all multiprocessors."""
    tiles = size * -(-vocab_size // TILE) / TARGET_PROGRAMS
    return min(1 << max(0, round(tiles) - 1).bit_length(), MAX_TILES)
