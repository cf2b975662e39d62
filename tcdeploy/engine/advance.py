"""The end of a greedy step, on the device: the token of each row, and where the next step finds it.

The host must not wait for a token in order to launch the next step, so the step itself writes its tokens into the
static state that the next one reads: id, position and length of each decode row. The last row is a dummy, where
padding lands. A row whose length is 0 (padding, or a chunk that does not finish its prompt) writes nothing.

Two backends mean the same. `reference` is plain torch. `triton` is two launches: programs that read a part of one row
each leave its best token as one integer (the float's order above, the id counted down below: so the larger integer is
the larger logit, then the lower id); then one program a row compares these and writes the state. Nothing outlives a
call, so graphs and streams share nothing.

A NaN counts as larger than all, as in `torch.argmax`, so no logits make an id that is out of range.

Rejected: one launch whose last program finishes the row. It needs a counter that is never left uncleared, and saved
0.3 us of 3.4 (H100, one row of 128,256 bfloat16 logits, in a graph, where `torch.argmax` takes 27 us).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tcdeploy.torch_compat.triton_source import ignore_comments

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU machine may lack it, and has the reference
    triton = None  # type: ignore[assignment,unused-ignore]

TILE = 2048  # logits that a program reads at once
WARPS = 4
TARGET_PROGRAMS = 1024  # that a launch aims at: in a large batch each reads several tiles
MAX_TILES = 16
MAX_TOKEN_ID = 2**31 - 1  # ids count down from it


def advance(
    logits: Tensor, rows: Tensor, lengths: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor,
    backend: Literal["reference", "triton"],
) -> Tensor:  # fmt: skip
    """The greedy token of each row of logits [n, vocab], as [n] int64: the lowest id of equals.

    Where lengths [n] int32 is not 0, entry rows[i] of the state (token_ids and positions [R] int64, seq_lens [R] int32)
    becomes the token, lengths[i] and lengths[i] + 1: the token will stand at position lengths[i], behind as many cached
    keys. Live rows are distinct; the others write nothing, wherever they point. `lengths` may be a view of `seq_lens`
    when row i follows entry i. No host synchronisation; legal inside CUDA graph capture once it has run.
    """
    if backend == "triton":
        return _advance_triton(logits, rows, lengths, token_ids, positions, seq_lens)
    tokens = logits.argmax(dim=-1)
    is_live = lengths > 0
    targets = torch.where(is_live, rows, token_ids.shape[0] - 1)
    written = [(token_ids, tokens), (positions, lengths.long()), (seq_lens, lengths + 1)]
    for state, values in written:  # all values are made by now: lengths may lie in seq_lens
        state[targets] = torch.where(is_live, values, state[-1])  # the dummy gets what it has
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
    """How many tiles a program reads, a power of two: one for a small batch, so that all multiprocessors read."""
    wanted = size * -(-vocab_size // TILE) / TARGET_PROGRAMS
    return min(1 << max(0, round(wanted) - 1).bit_length(), MAX_TILES)


if triton is not None:
    # What varies between calls is not specialised: else a batch of one, or a view at an odd address, compiles again.
    DO_NOT_SPECIALIZE = ["tokens", "token_ids", "positions", "seq_lens", "bests", "rows", "lengths"]

    @ignore_comments
    @triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
    def _argmax_kernel(  # type: ignore[no-untyped-def]
        bests, logits,
        VOCAB: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, MAX_TOKEN_ID: tl.constexpr,
    ):  # fmt: skip
        """One part of one row: TILES tiles of TILE logits, each lane keeping its first largest."""
        part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
        logits += row * VOCAB
        ids = part * (TILES * TILE) + tl.arange(0, TILE)
        best = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        best_ids = ids  # past the vocabulary: -inf, with an id that loses to any
        for _ in range(1, TILES):
            ids += TILE
            logit = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
            is_better = ~(logit <= best) & (best == best)  # larger, or the first NaN
            best = tl.where(is_better, logit, best)
            best_ids = tl.where(is_better, ids, best_ids)
        bits = (best + 0.0).to(tl.int32, bitcast=True)  # 0.0 + -0.0 is 0.0: equals have the same bits
        order = tl.where(best != best, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        winner = tl.max((order.to(tl.int64) << 32) | (MAX_TOKEN_ID - best_ids).to(tl.int64), 0)
        tl.store(bests + row * PARTS + part, winner)

    @ignore_comments
    @triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
    def _advance_kernel(  # type: ignore[no-untyped-def]
        tokens, token_ids, positions, seq_lens, bests, rows, lengths,
        PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, MAX_TOKEN_ID: tl.constexpr,
    ):  # fmt: skip
        """One row: the best of its parts, and the state. Reads its length before it writes one."""
        row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS_PADDED)
        bests = tl.load(bests + row * PARTS + parts, mask=parts < PARTS, other=-0x8000000000000000)
        length, target = tl.load(lengths + row), tl.load(rows + row)
        token = MAX_TOKEN_ID - (tl.max(bests, 0) & MAX_TOKEN_ID)
        tl.store(tokens + row, token)
        if length > 0:
            tl.store(token_ids + target, token)
            tl.store(positions + target, length)
            tl.store(seq_lens + target, length + 1)
