"""Ends a step on the device: takes the argmax of each row and writes the next step's inputs.

The next step is launched before the host has read any token, so the step itself writes token id, position and length
of each decode row into static tensors. The last row is the padding row. A row of length 0 (padding, or a chunk that
does not end its prompt) changes no decode row.

There are two equivalent backends. `reference` is plain torch. `triton` takes two launches. Each Triton program instance
of the first reads part of one row and stores its best token as one integer: the logit in sortable form in the upper
half, and MAX_TOKEN_ID - id in the lower, so that the larger integer is the larger logit and then the lower id. The
second runs one instance per row, which takes the maximum and writes the decode rows. No scratch memory outlives a call,
so graphs and streams share nothing.

NaN counts as larger than every number, as in `torch.argmax`, so ids stay in range for any logits.

Rejected: one launch whose last program finishes the row. It saved 0.3 us of 3.4 us (H100, one row), and needs a counter
that every program must leave at zero. Timings: docs/performance.md.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tcdeploy.torch_compat.triton_source import ignore_comments

try:
    import triton
    import triton.language as tl
except ImportError:  # optional on a CPU machine, which uses the reference
    triton = None  # type: ignore[assignment,unused-ignore]

TILE = 2048  # logits per load of a program
WARPS = 4
TARGET_PROGRAMS = 1024  # per launch: in a large batch each program reads several tiles
MAX_TILES = 16
MAX_TOKEN_ID = 2**31 - 1


def advance(
    logits: Tensor, rows: Tensor, lengths: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor,
    backend: Literal["reference", "triton"],
) -> Tensor:  # fmt: skip
    """The greedy token of each row of logits [n, vocab], as [n] int64: the lowest id among equal logits.

    The decode rows are token_ids and positions [max batch + 1] int64 and seq_lens [max batch + 1] int32. If lengths[i]
    ([n] int32) is not 0, then for r = rows[i]: token_ids[r] = token, positions[r] = lengths[i], seq_lens[r] =
    lengths[i] + 1. Such rows must be distinct. Rows of length 0 change nothing, whatever rows[i] is. `lengths` may be a
    view of `seq_lens` if rows[i] is i. No host synchronisation; can be captured once it has run.
    """
    if backend == "triton":
        return _advance_triton(logits, rows, lengths, token_ids, positions, seq_lens)
    tokens = logits.argmax(dim=-1)
    is_live = lengths > 0
    targets = torch.where(is_live, rows, token_ids.shape[0] - 1)
    updates = [(token_ids, tokens), (positions, lengths.long()), (seq_lens, lengths + 1)]
    for column, values in updates:  # all values are computed by now, because lengths may be a view of seq_lens
        column[targets] = torch.where(is_live, values, column[-1])  # the padding row keeps its value
    return tokens


def _advance_triton(
    logits: Tensor, rows: Tensor, lengths: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor
) -> Tensor:
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


if triton is not None:
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
