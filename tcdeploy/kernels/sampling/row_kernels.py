"""What the sampling kernels share: the arithmetic of weights.py, ranks of tokens, and the state of a row.

A rank is an integer that orders the tokens of a row: the larger logit, and then the lower id, has the larger rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.sampling import weights
from tcdeploy.torch_compat.triton.source import ignore_comments

LOG2_E = tl.constexpr(weights.LOG2_E)
SMALLEST_EXPONENT = tl.constexpr(weights.SMALLEST_EXPONENT)
ROUNDING = tl.constexpr(weights.ROUNDING)
C0, C1, C2, C3, C4, C5, C6, C7, C8 = (tl.constexpr(value) for value in weights.EXP2_COEFFICIENTS)
MAX_TOKEN_ID = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-(2**63))  # below every rank
INFINITE_BITS = tl.constexpr(0x7F800000)  # of float32


@ignore_comments
@triton.jit
def _relative_weights(scores, top, scale):  # type: ignore[no-untyped-def]
    """As weights.relative_weights; `scale` is `_scale(temperature)`."""
    exponent = tl.maximum((scores.to(tl.float64) - top.to(tl.float64)) * scale, SMALLEST_EXPONENT)
    shifted = exponent + ROUNDING
    fraction = exponent - (shifted - ROUNDING)
    power = fraction * C8 + C7
    power = power * fraction + C6
    power = power * fraction + C5
    power = power * fraction + C4
    power = power * fraction + C3
    power = power * fraction + C2
    power = power * fraction + C1
    power = power * fraction + C0
    power = power * fraction + 1.0
    bits = power.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    return bits.to(tl.float64, bitcast=True)


@ignore_comments
@triton.jit
def _scale(temperature):  # type: ignore[no-untyped-def]
    return tl.full((), LOG2_E, tl.float64) / temperature.to(tl.float64)


@ignore_comments
@triton.jit
def _order(scores):  # type: ignore[no-untyped-def]
    """Integers that order scores; NaN is above all, and 0.0 and -0.0 are equal."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(scores != scores, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@ignore_comments
@triton.jit
def _ranks(scores, ids):  # type: ignore[no-untyped-def]
    """Integers that order tokens: the larger score, and then the lower id, has the larger rank."""
    return (_order(scores) << 32) | (ids ^ MAX_TOKEN_ID).to(tl.int64)


@ignore_comments
@triton.jit
def _score_of(rank):  # type: ignore[no-untyped-def]
    """The float32 score in the upper half of a rank."""
    order = (rank >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@ignore_comments
@triton.jit
def _load_scores(logits, changed, is_changed, row, ids, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]
    if is_changed:
        scores = tl.load(changed + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    else:
        scores = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return scores


@ignore_comments
@triton.jit
def _row_state(  # type: ignore[no-untyped-def]
    logits, bests, greedy, rows, changes, temperature, has_changes, row,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr,
):  # fmt: skip
    """Returns (decode row, whether its logits were changed, greedy token, its score, temperature, whether to draw)."""
    decode_row = tl.load(rows + row)
    is_changed = (has_changes != 0) & (tl.load(changes + decode_row) != 0)
    if is_changed:
        parts = tl.arange(0, PARTS_PADDED)
        best = tl.max(tl.load(bests + row * PARTS + parts, mask=parts < PARTS, other=LOWEST), 0)
        token = (best & MAX_TOKEN_ID) ^ MAX_TOKEN_ID
        top = _score_of(best)
    else:
        token = tl.load(greedy + row)
        top = tl.load(logits + row * VOCAB + token).to(tl.float32)
    is_finite = (top.to(tl.int32, bitcast=True) & INFINITE_BITS) != INFINITE_BITS
    row_temperature = tl.load(temperature + decode_row)
    return decode_row, is_changed, token, top, row_temperature, is_finite & (row_temperature > 0)
