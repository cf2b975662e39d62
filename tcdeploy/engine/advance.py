"""The end of a greedy step, on the device: the token of each row, and where the next step finds it.

The host must not wait for a token in order to launch the next step, so the step itself writes its tokens into the
static state that the next one reads: id, position and length of each decode row. The last row is a dummy, where
padding lands. A row whose length is 0 (padding, or a chunk that does not finish its prompt) writes nothing.

Two backends mean the same. `reference` is plain torch. `triton` is one launch: each program reads a part of one row
and leaves its best token as one integer (the float's order above, the id counted down below: so the larger integer is
the larger logit, then the lower id). The last program of a row to arrive compares these and writes the state; it also
sets the row's counter back to 0, so `Scratch` is cleared once, and a captured step replays as often as it likes.

A NaN counts as larger than all, as in `torch.argmax`, so no logits make an id that is out of range.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU machine may lack it, and has the reference
    triton = None  # type: ignore[assignment,unused-ignore]

TILE = 1024  # logits that a program reads at once
WARPS = 4
PROGRAMS = 2048  # that a launch aims at: in a large batch each reads several tiles
MAX_TILES = 16


class Scratch(NamedTuple):
    """What the programs of a launch tell each other. One stream at a time may use it."""

    bests: Tensor  # [rows, parts] int64: the best token of each program
    arrivals: Tensor  # [rows] int32: how many programs have left theirs; 0 between launches


def make_scratch(rows: int, vocab_size: int, device: torch.device | str) -> Scratch:
    """For logits of up to `rows` rows. Make it before a capture, which would clear it at each replay."""
    parts = -(-vocab_size // TILE)
    bests = torch.empty(rows, parts, dtype=torch.int64, device=device)
    return Scratch(bests, torch.zeros(rows, dtype=torch.int32, device=device))


def advance(
    logits: Tensor, rows: Tensor, lengths: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor,
    backend: Literal["reference", "triton"], scratch: Scratch | None = None,
) -> Tensor:  # fmt: skip
    """The greedy token of each row of logits [n, vocab], as [n] int64: the lowest id of equals.

    Where lengths [n] int32 is not 0, entry rows[i] of the state (token_ids and positions [R] int64, seq_lens [R] int32)
    becomes the token, lengths[i] and lengths[i] + 1: the token will stand at position lengths[i], behind as many cached
    keys. Live rows are distinct; the others write nothing, wherever they point. `lengths` may be a view of `seq_lens`
    when row i follows entry i. No host synchronisation; legal inside CUDA graph capture. `triton` needs a `scratch`.
    """
    if backend == "triton":
        assert scratch is not None
        return _advance_triton(logits, rows, lengths, token_ids, positions, seq_lens, scratch)
    tokens = logits.argmax(dim=-1)
    is_live = lengths > 0
    targets = torch.where(is_live, rows, token_ids.shape[0] - 1)
    written = [(token_ids, tokens), (positions, lengths.long()), (seq_lens, lengths + 1)]
    for state, values in written:  # all values are made by now: lengths may lie in seq_lens
        state[targets] = torch.where(is_live, values, state[-1])  # the dummy gets what it has
    return tokens


def _advance_triton(
    logits: Tensor, rows: Tensor, lengths: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor,
    scratch: Scratch,
) -> Tensor:  # fmt: skip
    size, vocab_size = logits.shape
    assert logits.is_contiguous() and size <= scratch.arrivals.shape[0]
    tiles = tiles_of(size, vocab_size)
    parts = triton.cdiv(vocab_size, tiles * TILE)
    tokens = torch.empty(size, dtype=torch.int64, device=logits.device)
    _advance_kernel[(parts, size)](
        tokens, token_ids, positions, seq_lens, scratch.bests, scratch.arrivals, logits, rows, lengths,
        vocab_size, tiles, parts, triton.next_power_of_2(parts), TILE, num_warps=WARPS,
    )  # fmt: skip
    return tokens


def tiles_of(size: int, vocab_size: int) -> int:
    """How many tiles a program reads, a power of two: one for a small batch, so that all multiprocessors read."""
    wanted = size * -(-vocab_size // TILE) / PROGRAMS
    return min(1 << max(0, round(wanted) - 1).bit_length(), MAX_TILES)


if triton is not None:
    # What varies between calls is not specialised: else a batch of one, or a view at an odd address, compiles again.
    VARYING = ["tokens", "token_ids", "positions", "seq_lens", "bests", "arrivals", "rows", "lengths"]

    @triton.jit
    def _order(logits):  # type: ignore[no-untyped-def]
        """Integers in the order of the floats; 0.0 and -0.0 are equal, and a NaN is larger than all."""
        logits = logits.to(tl.float32)
        bits = (logits + 0.0).to(tl.int32, bitcast=True)
        return tl.where(logits != logits, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))

    @triton.jit(do_not_specialize=VARYING)
    def _advance_kernel(  # type: ignore[no-untyped-def]
        tokens, token_ids, positions, seq_lens, bests, arrivals, logits, rows, lengths,
        VOCAB: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """One part of one row: TILES tiles of TILE logits."""
        part, row = tl.program_id(0), tl.program_id(1)
        logits += row.to(tl.int64) * VOCAB
        ids = part * (TILES * TILE) + tl.arange(0, TILE)
        best = _order(tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf")))
        best_ids = ids  # past the vocabulary: -inf with an id that loses to any
        for _ in range(1, TILES):
            ids += TILE
            order = _order(tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf")))
            best_ids = tl.where(order > best, ids, best_ids)
            best = tl.maximum(best, order)
        winner = tl.max((best.to(tl.int64) << 32) | (0x7FFFFFFF - best_ids).to(tl.int64), 0)

        tl.store(bests + row * PARTS + part, winner)
        if tl.atomic_add(arrivals + row, 1) == PARTS - 1:  # acquires and releases: every part is seen by the last
            tl.store(arrivals + row, 0)
            parts = tl.arange(0, PARTS_PADDED)
            lowest = -0x8000000000000000
            others = tl.load(bests + row * PARTS + parts, mask=parts < PARTS, other=lowest, cache_modifier=".cg")
            token = 0x7FFFFFFF - (tl.max(others, 0) & 0x7FFFFFFF)
            tl.store(tokens + row, token)
            length = tl.load(lengths + row)
            if length > 0:
                target = tl.load(rows + row)
                tl.store(token_ids + target, token)
                tl.store(positions + target, length)
                tl.store(seq_lens + target, length + 1)
