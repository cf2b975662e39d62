"""The Triton kernel that finds the limit of top-k or top-p in its bracket, which sample_triton.py describes."""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.sampling.filter_kernels import (
    ABOVE,
    AT_LEAST,
    LISTED,
    MEASURES,
    TOTAL,
    _top_k_and_p,
    _top_p_target,
)
from tcdeploy.kernels.sampling.row_kernels import (
    LOWEST,
    MAX_TOKEN_ID,
    _load_scores,
    _order,
    _ranks,
    _relative_weights,
    _row_state,
    _scale,
    _score_of,
)
from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def _sum_at_least(  # type: ignore[no-untyped-def]
    rank, candidates, logits, changed, is_changed, row, length, is_listed, is_count, top, scale,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The number (`is_count`) or the units of the tokens of at least this rank, in the list or in the whole row."""
    total = row * 0
    for start in range(0, length, BLOCK):
        index = start + tl.arange(0, BLOCK)
        if is_listed:
            ranks = tl.load(candidates + row * CAPACITY + index, mask=index < length, other=LOWEST)
            scores = _score_of(ranks)
        else:
            scores = _load_scores(logits, changed, is_changed, row, index, VOCAB)
            ranks = tl.where(index < VOCAB, _ranks(scores, index), LOWEST)
        is_summed = (ranks >= rank) & (index < length)
        units = is_summed.to(tl.int64)
        if is_count == 0:
            weights = _relative_weights(scores, top, scale)
            units = tl.where(is_summed, (weights * (2.0**BITS)).to(tl.int64), 0)
        total += tl.sum(units, 0)
    return total


@ignore_comments
@triton.jit
def _limit_of_few(  # type: ignore[no-untyped-def]
    target, above, candidates, row, length, is_count, top, scale,
    BITS: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `_limit`, for a list of at most FEW ranks, each of which is compared with all."""
    index = tl.arange(0, FEW)
    ranks = tl.load(candidates + row * CAPACITY + index, mask=index < length, other=LOWEST)
    sums = tl.zeros((FEW,), tl.int64) + above
    for start in range(0, length, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        others = tl.load(candidates + row * CAPACITY + columns, mask=columns < length, other=LOWEST)
        values = tl.full((COLUMNS,), 1, tl.int64)
        if is_count == 0:
            values = (_relative_weights(_score_of(others), top, scale) * (2.0**BITS)).to(tl.int64)
        sums += tl.sum(
            tl.where((others[None, :] >= ranks[:, None]) & (columns[None, :] < length), values[None, :], 0), 1
        )
    return tl.max(tl.where((sums > target) & (index < length), ranks, LOWEST), 0)


@ignore_comments
@triton.jit
def _limit(  # type: ignore[no-untyped-def]
    target, above, low, high, candidates, logits, changed, is_changed, row, length, is_listed, is_count, top, scale,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, CAPACITY: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """The highest rank for which `above` plus the sum over the tokens of at least this rank exceeds `target`.

    It is found bit by bit. Its score is from `low` to `high`, so their common leading bits are not tried.
    """
    limit = _order(low) << 32
    span = limit ^ (_order(high) << 32)
    for shift in tl.static_range(6):
        span = span | (span >> (1 << shift))  # from the first bit that differs on; all 64 if the signs differ
    limit = tl.where(span < 0, LOWEST, limit & ~span)
    for step in range(32 + ID_BITS):
        bit = row * 0 + (63 - step)
        if step >= 32:  # the bits of MAX_TOKEN_ID - id above ID_BITS are set for every id
            limit = limit | (MAX_TOKEN_ID >> ID_BITS << ID_BITS)
            bit -= 32 - ID_BITS
        if (step >= 32) | ((span >> bit) != 0):
            tried = limit ^ ((row * 0 + 1) << bit)
            measured = _sum_at_least(
                tried, candidates, logits, changed, is_changed, row, length, is_listed, is_count, top, scale,
                VOCAB, BLOCK, BITS, CAPACITY,
            )  # fmt: skip
            limit = tl.where(above + measured > target, tried, limit)
    return limit


@ignore_comments
@triton.jit(
    do_not_specialize=["has_changes", "is_count"],
    do_not_specialize_on_alignment=["measures", "changed", "bests", "greedy", "limits"],
)
def _sample_select_kernel(  # type: ignore[no-untyped-def]
    limits, candidates, measures, bounds, logits, changed, bests, greedy, rows, changes, temperature, top_k,
    top_p, has_changes, is_count,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, BITS: tl.constexpr,
    LEVELS: tl.constexpr, LISTED_K: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr, COLUMNS: tl.constexpr,
    ID_BITS: tl.constexpr,
):  # fmt: skip
    """One row: the rank of the last token that the filter keeps. With a small k, top-p is applied too."""
    row = tl.program_id(0).to(tl.int64)
    decode_row, is_changed, _, top, row_temperature, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    k, p, has_k, is_wide = _top_k_and_p(top_k, top_p, decode_row, VOCAB, LISTED_K)
    if (is_drawn & tl.where(is_count != 0, has_k, is_wide)) == 0:
        return
    row_measures = measures + row * MEASURES
    low = tl.load(bounds + 2 * (row * (LEVELS + 1) + LEVELS))
    high = tl.load(bounds + 2 * (row * (LEVELS + 1) + LEVELS) + 1)
    number = tl.load(row_measures + LISTED)
    scale, target, above = _scale(row_temperature), k - 1, tl.load(row_measures + ABOVE)
    if is_count == 0:
        target = _top_p_target(p, tl.load(row_measures + TOTAL))
        if (above > target) | (tl.load(row_measures + AT_LEAST) <= target):  # the approximate sums were too far off
            low, high = top * 0.0 + float("-inf"), top
            number = row * 0 + (CAPACITY + 1)  # as if the list had overflowed
    high = tl.minimum(high, top)
    is_listed = number <= CAPACITY
    length = tl.where(is_listed, number, VOCAB).to(tl.int32)
    above = tl.where(is_listed, above, 0)
    if number <= FEW:
        limit = _limit_of_few(
            target, above, candidates, row, length, is_count, top, scale, BITS, CAPACITY, FEW, COLUMNS
        )
    else:
        limit = _limit(
            target, above, low, high, candidates, logits, changed, is_changed, row, length, is_listed,
            is_count, top, scale, VOCAB, BLOCK, BITS, CAPACITY, ID_BITS,
        )  # fmt: skip
    if (is_count != 0) & (p < 1.0) & (is_wide == 0):
        total = _sum_at_least(
            limit, candidates, logits, changed, is_changed, row, length, is_listed, False, top, scale,
            VOCAB, BLOCK, BITS, CAPACITY,
        )  # fmt: skip
        target = _top_p_target(p, total)
        if number <= FEW:
            limit = _limit_of_few(
                target, row * 0, candidates, row, length, False, top, scale, BITS, CAPACITY, FEW, COLUMNS
            )
        else:
            limit = _limit(
                target, row * 0, low, top, candidates, logits, changed, is_changed, row, length,
                is_listed, False, top, scale, VOCAB, BLOCK, BITS, CAPACITY, ID_BITS,
            )  # fmt: skip
    tl.store(limits + row, limit)
