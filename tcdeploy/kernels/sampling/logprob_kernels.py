"""The Triton kernels that logprobs_triton.py launches and describes."""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.sampling import weights
from tcdeploy.kernels.sampling.row_kernels import (
    INFINITE_BITS,
    LOG2_E,
    LOWEST,
    MAX_TOKEN_ID,
    _ranks,
    _relative_weights,
    _score_of,
)
from tcdeploy.torch_compat.triton.source import ignore_comments

LN_2 = tl.constexpr(weights.LN_2)
LOG_TERMS = tl.constexpr(weights.LOG_TERMS)
SQRT_2 = tl.constexpr(weights.SQRT_2)
MANTISSA = tl.constexpr(2**52 - 1)
ONE_BITS = tl.constexpr(1023 << 52)  # the exponent bits of 1.0


@ignore_comments
@triton.jit
def _natural_log(value):  # type: ignore[no-untyped-def]
    """As weights.natural_log."""
    bits = value.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & MANTISSA) | ONE_BITS).to(tl.float64, bitcast=True)
    is_large = mantissa > SQRT_2
    mantissa = tl.where(is_large, mantissa * 0.5, mantissa)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = ratio * 0.0
    for index in tl.static_range(LOG_TERMS + 1):
        series = series * square + 1.0 / (2 * (LOG_TERMS - index) + 1)
    return ratio * series * 2.0 + (exponent + is_large.to(tl.int64)).to(tl.float64) * LN_2


@ignore_comments
@triton.jit
def _largest(bests, row, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The score of a row's largest logit."""
    parts = tl.arange(0, PARTS_PADDED)
    return _score_of(tl.max(tl.load(bests + row * PARTS + parts, mask=parts < PARTS, other=LOWEST), 0))


@ignore_comments
@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["logits"])
def _logprob_list_kernel(  # type: ignore[no-untyped-def]
    part_units, listed, logits, bests, k,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One part of one row: its units, and the ranks of its k best tokens in order."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = part * TILE + tl.arange(0, TILE)
    scores = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    relative = _relative_weights(scores, _largest(bests, row, PARTS, PARTS_PADDED), LOG2_E)
    tl.store(
        part_units + row * PARTS + part, tl.sum(tl.where(ids < VOCAB, (relative * (2.0**BITS)).to(tl.int64), 0), 0)
    )
    ranks = tl.where(ids < VOCAB, _ranks(scores, ids), LOWEST)
    for index in range(k):
        best = tl.max(ranks, 0)
        tl.store(listed + (row * PARTS + part) * k + index, best)
        ranks = tl.where(ranks == best, LOWEST, ranks)


@ignore_comments
@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["logits", "tokens", "top_ids", "top_logprobs"])
def _logprob_merge_kernel(  # type: ignore[no-untyped-def]
    chosen, top_ids, top_logprobs, part_units, listed, logits, bests, tokens, k,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, BITS: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """One row: the logarithm of its sum, the chosen token, and the k best of all parts."""
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS_PADDED)
    top = _largest(bests, row, PARTS, PARTS_PADDED)
    units = tl.sum(tl.load(part_units + row * PARTS + parts, mask=parts < PARTS, other=0), 0)
    log_total = _natural_log(units.to(tl.float64) * (2.0**-BITS))
    is_finite = (top.to(tl.int32, bitcast=True) & INFINITE_BITS) != INFINITE_BITS
    log_total = tl.where(is_finite, log_total, float("nan"))
    score = tl.load(logits + row * VOCAB + tl.load(tokens + row)).to(tl.float32)
    tl.store(chosen + row, (score.to(tl.float64) - top.to(tl.float64) - log_total).to(tl.float32))
    columns = tl.arange(0, LISTED)
    is_listed = (parts[:, None] < PARTS) & (columns[None, :] < k)
    ranks = tl.load(listed + (row * PARTS + parts[:, None]) * k + columns[None, :], mask=is_listed, other=LOWEST)
    for index in range(k):
        best = tl.max(tl.max(ranks, 1), 0)
        tl.store(top_ids + row * k + index, (best & MAX_TOKEN_ID) ^ MAX_TOKEN_ID)
        logprob = _score_of(best).to(tl.float64) - top.to(tl.float64) - log_total
        tl.store(top_logprobs + row * k + index, logprob.to(tl.float32))
        ranks = tl.where(ranks == best, LOWEST, ranks)
