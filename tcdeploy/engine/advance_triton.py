"""The Triton kernels of advance.py, in two launches.

Each program instance of the first reads part of one row and stores its best token as one integer: the logit in sortable
form in the upper half, and MAX_TOKEN_ID - id in the lower, so that the larger integer is the larger logit and then the
lower id. The second runs one instance per row, which takes the maximum and writes the decode rows. No scratch memory
outlives a call, so graphs and streams share nothing.

NaN counts as larger than every number, as in `torch.argmax`, so ids stay in range for any logits.

Rejected: one launch whose last program finishes the row. It saved 0.3 us of 3.4 us (H100, one row), and needs a counter
that every program must leave at zero. Timings: docs/performance.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcdeploy.torch_compat.triton_source import ignore_comments

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
    parts = triton.cdiv(vocab_size, tiles * TILE)
    bests = torch.empty(size, parts, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(size, dtype=torch.int64, device=logits.device)
    _argmax_kernel[(parts, size)](bests, logits, vocab_size, tiles, parts, TILE, MAX_TOKEN_ID, num_warps=WARPS)
    _advance_kernel[(size,)](
        tokens, token_ids, positions, seq_lens, bests, rows, lengths,
        parts, triton.next_power_of_2(parts), MAX_TOKEN_ID, num_warps=1,
    )  # fmt: skip
    return tokens


def tiles_per_program(size: int, vocab_size: int) -> int:
    """Tiles that one program reads, a power of two. One in a small batch, to use all multiprocessors."""
    tiles = size * -(-vocab_size // TILE) / TARGET_PROGRAMS
    return min(1 << max(0, round(tiles) - 1).bit_length(), MAX_TILES)


# Arguments that vary are not specialised: a batch of one or an unaligned view would compile again.
DO_NOT_SPECIALIZE = ["tokens", "token_ids", "positions", "seq_lens", "bests", "rows", "lengths"]


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _argmax_kernel(  # type: ignore[no-untyped-def]
    bests, logits,
    VOCAB: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, MAX_TOKEN_ID: tl.constexpr,
):  # fmt: skip
    """One part of one row: TILES tiles of TILE logits. Each lane keeps its first maximum."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits += row * VOCAB
    ids = part * (TILES * TILE) + tl.arange(0, TILE)
    best = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    best_ids = ids  # beyond the vocabulary: -inf, and an id higher than any token
    for _ in range(1, TILES):
        ids += TILE
        logit = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        is_better = ~(logit <= best) & (best == best)  # larger, or the first NaN
        best = tl.where(is_better, logit, best)
        best_ids = tl.where(is_better, ids, best_ids)
    bits = (best + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0: equal values need the same bits
    order = tl.where(best != best, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    winner = tl.max((order.to(tl.int64) << 32) | (MAX_TOKEN_ID - best_ids).to(tl.int64), 0)
    tl.store(bests + row * PARTS + part, winner)


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _advance_kernel(  # type: ignore[no-untyped-def]
    tokens, token_ids, positions, seq_lens, bests, rows, lengths,
    PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, MAX_TOKEN_ID: tl.constexpr,
):  # fmt: skip
    """One row: the maximum over its parts, then the decode row. Reads lengths before it writes seq_lens."""
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS_PADDED)
    bests = tl.load(bests + row * PARTS + parts, mask=parts < PARTS, other=-0x8000000000000000)
    length, target = tl.load(lengths + row), tl.load(rows + row)
    token = MAX_TOKEN_ID - (tl.max(bests, 0) & MAX_TOKEN_ID)
    tl.store(tokens + row, token)
    if length > 0:
        tl.store(token_ids + target, token)
        tl.store(positions + target, length)
        tl.store(seq_lens + target, length + 1)
