"""The Triton kernels that advance_triton.py launches and describes."""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.torch_compat.triton.source import ignore_comments

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
