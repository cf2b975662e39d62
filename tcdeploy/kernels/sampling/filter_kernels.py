"""The Triton kernels that find the limit of top-k and top-p. sample_triton.py launches and describes them.

`row` is a row of the logits, `decode_row` its entry of the sampling parameters, `part` one tile of TILE tokens. Every
kernel returns at once for a row that does not need it. `is_count`: the launch searches the limit of top-k, which counts
tokens; otherwise that of top-p, which adds units.
"""

from __future__ import annotations

import triton
import triton.language as tl

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

LARGEST = tl.constexpr(2**63 - 1)
PIVOTS = tl.constexpr(16)
MAX_PIVOT_STEP = tl.constexpr(8.0)


@ignore_comments
@triton.jit
def _pivots(index, level, low, high, top, step):  # type: ignore[no-untyped-def]
    """The pivots `index` [m] int32 of a level, descending from 0 to PIVOTS - 1.

    The first level has equal steps below the top, and its last pivot is below every score. The others divide the
    bracket, or double their distance to its upper end if it has no lower end.
    """
    first = tl.where(index == PIVOTS - 1, float("-inf"), top - index.to(tl.float32) * step)
    divided = low + (high - low) * ((index * -1 + (PIVOTS - 1)).to(tl.float32) * (1.0 / PIVOTS))
    doubled = high - step * (index * 0 + 1 << index).to(tl.float32)
    return tl.where(level == 0, first, tl.where(low == float("-inf"), doubled, divided))


@ignore_comments
@triton.jit
def _top_k_and_p(  # type: ignore[no-untyped-def]
    top_k, top_p, decode_row, VOCAB: tl.constexpr, LISTED_K: tl.constexpr
):  # fmt: skip
    """Returns (k, p, whether top-k applies, whether top-p needs a search of its own: it keeps tokens beyond a list)."""
    k, p = tl.load(top_k + decode_row), tl.load(top_p + decode_row)
    has_k = (k > 0) & (k < VOCAB)
    return k, p, has_k, (p < 1.0) & ((has_k == 0) | (k > LISTED_K))


@ignore_comments
@triton.jit
def _top_p_target(p, total):  # type: ignore[no-untyped-def]
    """The kept tokens are the first whose cumulative units exceed this."""
    return tl.maximum(tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64) - 1, 0)


@ignore_comments
@triton.jit
def _bracket(  # type: ignore[no-untyped-def]
    sums, bounds, measures, row, level, is_count, k, p, top, step, LEVELS: tl.constexpr,
):  # fmt: skip
    """The bracket that the sums of `level` leave: (low, high, measure from high on, tokens from low on, from high on).

    The limit is a rank whose score is at least `low` and below `high`.
    """
    index = tl.arange(0, PIVOTS)
    row_sums = sums + row * (2 * LEVELS * PIVOTS + 1)
    target = k - 1
    if is_count == 0:
        target = _top_p_target(p, tl.load(row_sums + PIVOTS - 1))
    state = row * (LEVELS + 1) + level
    low, high = tl.load(bounds + 2 * state), tl.load(bounds + 2 * state + 1)
    above, from_low = tl.load(measures + 3 * state), tl.load(measures + 3 * state + 1)
    from_high = tl.load(measures + 3 * state + 2)
    pivots = _pivots(index, level, low, high, top, step)
    counted = tl.load(row_sums + (LEVELS + level) * PIVOTS + index)
    measured = counted
    if is_count == 0:
        measured = tl.load(row_sums + level * PIVOTS + index)
    is_reached = measured > target
    is_below = (counted > 0) & (measured <= target)  # a level that was left out has counted nothing
    low = tl.maximum(low, tl.max(tl.where(is_reached, pivots, float("-inf")), 0))
    high = tl.minimum(high, tl.min(tl.where(is_below, pivots, float("inf")), 0))
    above = tl.maximum(above, tl.max(tl.where(is_below, measured, 0), 0))
    from_low = tl.minimum(from_low, tl.min(tl.where(is_reached, counted, LARGEST), 0))
    from_high = tl.maximum(from_high, tl.max(tl.where(is_below, counted, 0), 0))
    return low, high, above, from_low, from_high


@ignore_comments
@triton.jit
def _store_bracket(  # type: ignore[no-untyped-def]
    bounds, measures, row, level, low, high, above, from_low, from_high, LEVELS: tl.constexpr
):  # fmt: skip
    state = row * (LEVELS + 1) + level
    tl.store(bounds + 2 * state, low)
    tl.store(bounds + 2 * state + 1, high)
    tl.store(measures + 3 * state, above)
    tl.store(measures + 3 * state + 1, from_low)
    tl.store(measures + 3 * state + 2, from_high)


@ignore_comments
@triton.jit
def _number_to_list(is_count, k, from_low, from_high, LISTED_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens to list: those in the bracket, and with a small k all from its lower end on, to which top-p applies."""
    return tl.where((is_count != 0) & (k <= LISTED_K), from_low, from_low - from_high)


@ignore_comments
@triton.jit(
    do_not_specialize=["has_changes", "is_count", "level"],
    do_not_specialize_on_alignment=["changed", "bests", "greedy", "limits"],
)
def _sample_search_kernel(  # type: ignore[no-untyped-def]
    sums, bounds, measures, limits, logits, changed, bests, greedy, rows, changes, temperature, top_k, top_p,
    has_changes, is_count, level,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, BITS: tl.constexpr,
    LEVELS: tl.constexpr, LISTED_K: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """One level: add the tokens and units of one part at or above each pivot. The first program stores the bracket.

    A row with few tokens to list is not divided further: the level counts nothing, and the bracket stays.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    decode_row, is_changed, _, top, row_temperature, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    k, p, has_k, is_wide = _top_k_and_p(top_k, top_p, decode_row, VOCAB, LISTED_K)
    if (is_drawn & tl.where(is_count != 0, has_k, is_wide)) == 0:
        return
    step = tl.where(is_count != 0, 1.0, tl.minimum(row_temperature, MAX_PIVOT_STEP))
    if level == 0:
        low, high = top * 0.0 + float("-inf"), top + tl.maximum(tl.abs(top), 1.0) * 0.01
        above, from_low, from_high = row * 0, row * 0 + VOCAB, row * 0
    else:
        low, high, above, from_low, from_high = _bracket(
            sums, bounds, measures, row, level - 1, is_count, k, p, top, step, LEVELS
        )
    if part == 0:
        _store_bracket(bounds, measures, row, level, low, high, above, from_low, from_high, LEVELS)
    if (level > 0) & (_number_to_list(is_count, k, from_low, from_high, LISTED_K) <= FEW):
        return
    ids = part * TILE + tl.arange(0, TILE)
    scores = _load_scores(logits, changed, is_changed, row, ids, VOCAB)
    scores = tl.where(ids < VOCAB, scores, float("nan"))  # reaches no pivot
    row_counts = sums + row * (2 * LEVELS * PIVOTS + 1) + (LEVELS + level) * PIVOTS
    row_units = sums + row * (2 * LEVELS * PIVOTS + 1) + level * PIVOTS
    if is_count:
        for index in tl.static_range(PIVOTS):
            pivot = _pivots(tl.full((1,), index, tl.int32), level, low, high, top, step)
            number = tl.sum((scores >= pivot).to(tl.int32), 0)
            if number != 0:
                tl.atomic_add(row_counts + index, number.to(tl.int64))
    else:
        units = (_relative_weights(scores, top, _scale(row_temperature)) * (2.0**BITS)).to(tl.int64)
        if has_k:  # top-p applies to what top-k left
            is_kept = _ranks(scores, ids) >= tl.load(limits + row)
            scores = tl.where(is_kept, scores, float("nan"))
        for index in tl.static_range(PIVOTS):
            pivot = _pivots(tl.full((1,), index, tl.int32), level, low, high, top, step)
            number = tl.sum((scores >= pivot).to(tl.int32), 0)
            if number != 0:
                tl.atomic_add(row_counts + index, number.to(tl.int64))
                tl.atomic_add(row_units + index, tl.sum(tl.where(scores >= pivot, units, 0), 0))


@ignore_comments
@triton.jit(
    do_not_specialize=["has_changes", "is_count"],
    do_not_specialize_on_alignment=["changed", "bests", "greedy", "limits"],
)
def _sample_collect_kernel(  # type: ignore[no-untyped-def]
    candidates, sums, bounds, measures, limits, logits, changed, bests, greedy, rows, changes, temperature, top_k,
    top_p, has_changes, is_count,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr,
    LEVELS: tl.constexpr, LISTED_K: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """List the ranks of one part's tokens that `_number_to_list` counts, if they fit.

    Their order depends on the order of the programs; the limit does not depend on their order.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    decode_row, is_changed, _, top, row_temperature, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    k, p, has_k, is_wide = _top_k_and_p(top_k, top_p, decode_row, VOCAB, LISTED_K)
    if (is_drawn & tl.where(is_count != 0, has_k, is_wide)) == 0:
        return
    step = tl.where(is_count != 0, 1.0, tl.minimum(row_temperature, MAX_PIVOT_STEP))
    low, high, above, from_low, from_high = _bracket(
        sums, bounds, measures, row, LEVELS - 1, is_count, k, p, top, step, LEVELS
    )
    if part == 0:
        _store_bracket(bounds, measures, row, LEVELS, low, high, above, from_low, from_high, LEVELS)
    if _number_to_list(is_count, k, from_low, from_high, LISTED_K) > CAPACITY:
        return
    ids = part * TILE + tl.arange(0, TILE)
    scores = _load_scores(logits, changed, is_changed, row, ids, VOCAB)
    is_candidate = (ids < VOCAB) & (scores >= low) & (((is_count != 0) & (k <= LISTED_K)) | (scores < high))
    number = tl.sum(is_candidate.to(tl.int32), 0)
    if number > 0:
        ranks = _ranks(scores, ids)
        if (is_count == 0) & has_k:
            is_candidate = is_candidate & (ranks >= tl.load(limits + row))
            number = tl.sum(is_candidate.to(tl.int32), 0)
        first = tl.atomic_add(sums + row * (2 * LEVELS * PIVOTS + 1) + 2 * LEVELS * PIVOTS, number.to(tl.int64))
        slots = first + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        tl.store(candidates + row * CAPACITY + slots, ranks, mask=is_candidate)


@ignore_comments
@triton.jit
def _sum_at_least(  # type: ignore[no-untyped-def]
    rank, candidates, logits, changed, is_changed, row, length, is_listed, is_count, top, scale,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The number, or the units, of the tokens of at least this rank, in the list or in the whole row."""
    total = row * 0
    for start in range(0, length, BLOCK):
        index = start + tl.arange(0, BLOCK)
        if is_listed:
            ranks = tl.load(candidates + row * CAPACITY + index, mask=index < length, other=LOWEST)
            scores = _score_of(ranks)
        else:
            scores = _load_scores(logits, changed, is_changed, row, index, VOCAB)
            ranks = tl.where(index < VOCAB, _ranks(scores, index), LOWEST)
        units = (ranks >= rank).to(tl.int64)
        if is_count == 0:
            weights = _relative_weights(scores, top, scale)
            units = tl.where(ranks >= rank, (weights * (2.0**BITS)).to(tl.int64), 0)
        total += tl.sum(units, 0)
    return total


@ignore_comments
@triton.jit
def _limit_of_few(  # type: ignore[no-untyped-def]
    target, above, lowest, candidates, row, length, is_count, top, scale,
    BITS: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `_limit`, of a list of at most FEW ranks: each is compared with each."""
    index = tl.arange(0, FEW)
    ranks = tl.load(candidates + row * CAPACITY + index, mask=index < length, other=LOWEST)
    sums = tl.zeros((FEW,), tl.int64) + above
    for start in range(0, length, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        others = tl.load(candidates + row * CAPACITY + columns, mask=columns < length, other=LOWEST)
        values = (others >= lowest).to(tl.int64)
        if is_count == 0:
            values = values * (_relative_weights(_score_of(others), top, scale) * (2.0**BITS)).to(tl.int64)
        sums += tl.sum(
            tl.where((others[None, :] >= ranks[:, None]) & (columns[None, :] < length), values[None, :], 0), 1
        )
    return tl.maximum(tl.max(tl.where((sums > target) & (index < length), ranks, LOWEST), 0), lowest)


@ignore_comments
@triton.jit
def _limit(  # type: ignore[no-untyped-def]
    target, above, lowest, low, high, candidates, logits, changed, is_changed, row, length, is_listed, is_count, top,
    scale,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, CAPACITY: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """The highest rank of at least `lowest` from which on the tokens measure more than `target`, bit by bit.

    Its score is from `low` to `high`: the bits that both begin with are not tried.
    """
    limit = _order(low) << 32
    span = limit ^ (_order(high) << 32)
    for shift in tl.static_range(6):
        span = span | (span >> (1 << shift))  # from the first bit that differs on; all 64 if the signs differ
    limit = tl.where(span < 0, LOWEST, limit & ~span)
    for step in range(32 + ID_BITS):
        bit = row * 0 + (63 - step)
        if step >= 32:  # the bits of MAX_TOKEN_ID - id between are set for every id
            limit = limit | (MAX_TOKEN_ID >> ID_BITS << ID_BITS)
            bit -= 32 - ID_BITS
        if (step >= 32) | ((span >> bit) != 0):
            tried = limit ^ ((row * 0 + 1) << bit)
            measured = _sum_at_least(
                tl.maximum(tried, lowest), candidates, logits, changed, is_changed, row, length, is_listed, is_count,
                top, scale, VOCAB, BLOCK, BITS, CAPACITY,
            )  # fmt: skip
            limit = tl.where(above + measured > target, tried, limit)
    return tl.maximum(limit, lowest)


@ignore_comments
@triton.jit(
    do_not_specialize=["has_changes", "is_count"],
    do_not_specialize_on_alignment=["changed", "bests", "greedy", "limits"],
)
def _sample_select_kernel(  # type: ignore[no-untyped-def]
    limits, candidates, sums, bounds, measures, logits, changed, bests, greedy, rows, changes, temperature, top_k,
    top_p, has_changes, is_count,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, BITS: tl.constexpr,
    LEVELS: tl.constexpr, LISTED_K: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr, COLUMNS: tl.constexpr,
    ID_BITS: tl.constexpr,
):  # fmt: skip
    """One row: the rank of the last token that the filter keeps; with a small k, also of top-p among these."""
    row = tl.program_id(0).to(tl.int64)
    decode_row, is_changed, _, top, row_temperature, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    k, p, has_k, is_wide = _top_k_and_p(top_k, top_p, decode_row, VOCAB, LISTED_K)
    if (is_drawn & tl.where(is_count != 0, has_k, is_wide)) == 0:
        return
    row_sums, state = sums + row * (2 * LEVELS * PIVOTS + 1), row * (LEVELS + 1) + LEVELS
    low, high = tl.load(bounds + 2 * state), tl.load(bounds + 2 * state + 1)
    number = _number_to_list(
        is_count, k, tl.load(measures + 3 * state + 1), tl.load(measures + 3 * state + 2), LISTED_K
    )
    is_listed = number <= CAPACITY
    length = tl.where(is_listed, number, VOCAB).to(tl.int32)
    scale, lowest, target = _scale(row_temperature), row * 0 + LOWEST, k - 1
    above = tl.where(is_listed & (number != tl.load(measures + 3 * state + 1)), tl.load(measures + 3 * state), 0)
    if is_count == 0:
        target = _top_p_target(p, tl.load(row_sums + PIVOTS - 1))
        if has_k:
            lowest = tl.load(limits + row)
    if number <= FEW:
        limit = _limit_of_few(
            target, above, lowest, candidates, row, length, is_count, top, scale, BITS, CAPACITY, FEW, COLUMNS
        )
    else:
        limit = _limit(
            target, above, lowest, low, high, candidates, logits, changed, is_changed, row, length, is_listed,
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
                target, row * 0, limit, candidates, row, length, False, top, scale, BITS, CAPACITY, FEW, COLUMNS
            )
        else:
            limit = _limit(
                target, row * 0, limit, _score_of(limit), top, candidates, logits, changed, is_changed, row, length,
                is_listed, False, top, scale, VOCAB, BLOCK, BITS, CAPACITY, ID_BITS,
            )  # fmt: skip
    tl.store(limits + row, limit)
