"""The Triton kernels that bracket the limit of top-k and top-p. sample_triton.py launches and describes them.

`row` is a row of the logits, `decode_row` the index of its sampling parameters, `part` a tile of TILE tokens. Every
kernel returns at once for a row that does not need it. `is_count`: the launch searches the limit of top-k, and counts
tokens; otherwise it searches that of top-p, and adds units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.sampling.row_kernels import (
    SMALLEST_EXPONENT,
    _load_scores,
    _order,
    _ranks,
    _relative_weights,
    _row_state,
    _scale,
    _score_of,
)
from tcdeploy.torch_compat.triton.source import ignore_comments

PIVOTS = tl.constexpr(32)
MAX_PIVOT_STEP = tl.constexpr(4.0)
MAX_SCALE = tl.constexpr(1e38)  # finite in float32: 0 times infinity would be NaN
MARGIN = tl.constexpr(2e-5)  # of sums in float32, whose relative error is below 1e-5
# Indices of a row's measures: the sum over all tokens, the sum at or above the upper end of the bracket, the sum at or
# above its lower end, and the number of candidates, which may exceed CAPACITY.
TOTAL, ABOVE, AT_LEAST, LISTED = (tl.constexpr(index) for index in range(4))
MEASURES = tl.constexpr(4)


@ignore_comments
@triton.jit
def _pivots(index, level, low, high, top, step):  # type: ignore[no-untyped-def]
    """The pivots `index` [m] int32 of a level, from the highest, 0, to the lowest, PIVOTS - 1.

    On the first level they are `step` apart, from the top down, and the last one is -inf. On the next levels they
    divide the bracket evenly, or if its lower end is -inf, each is twice as far from its upper end as the one before.
    """
    first = tl.where(index == PIVOTS - 1, float("-inf"), top - index.to(tl.float32) * step)
    divided = low + (high - low) * ((index * -1 + (PIVOTS - 1)).to(tl.float32) * (1.0 / PIVOTS))
    doubled = high - step * (index.to(tl.int64) * 0 + 1 << index).to(tl.float32)
    return tl.where(level == 0, first, tl.where(low == float("-inf"), doubled, divided))


@ignore_comments
@triton.jit
def _top_k_and_p(  # type: ignore[no-untyped-def]
    top_k, top_p, decode_row, VOCAB: tl.constexpr, LISTED_K: tl.constexpr
):  # fmt: skip
    """Returns (k, p, whether top-k applies, whether top-p needs a search of its own).

    Top-p needs one if top-k leaves more than LISTED_K tokens. A k of at most LISTED_K applies even if the vocabulary is
    smaller, because `Features` depend on k alone.
    """
    k, p = tl.load(top_k + decode_row), tl.load(top_p + decode_row)
    has_k = (k > 0) & ((k < VOCAB) | (k <= LISTED_K))
    k = tl.minimum(k, VOCAB)
    return k, p, has_k, (p < 1.0) & ((has_k == 0) | (k > LISTED_K))


@ignore_comments
@triton.jit
def _first_step(is_count, temperature):  # type: ignore[no-untyped-def]
    """The distance between the pivots of the first level."""
    return tl.where(is_count != 0, 0.5, tl.minimum(temperature * 0.5, MAX_PIVOT_STEP))


@ignore_comments
@triton.jit
def _top_p_target(p, total):  # type: ignore[no-untyped-def]
    """The kept tokens are the first whose cumulative units exceed this."""
    return tl.maximum(tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64) - 1, 0)


@ignore_comments
@triton.jit
def _bracket(  # type: ignore[no-untyped-def]
    sums, bounds, row, level, is_count, k, p, top, step, LEVELS: tl.constexpr
):  # fmt: skip
    """The bracket (low, high) that the sums of `level` leave.

    The limit is a rank whose score is at least `low` and below `high`. Sums of weights are approximate, so a sum close
    to the target excludes nothing.
    """
    index = tl.arange(0, PIVOTS)
    row_sums = sums + row * (LEVELS * PIVOTS)
    target, margin = (k - 1).to(tl.float32), 0.0
    if is_count == 0:
        target, margin = p * tl.load(row_sums + PIVOTS - 1), MARGIN
    low = tl.load(bounds + 2 * (row * (LEVELS + 1) + level))
    high = tl.load(bounds + 2 * (row * (LEVELS + 1) + level) + 1)
    pivots = _pivots(index, level, low, high, top, step)
    measured = tl.load(row_sums + level * PIVOTS + index)
    is_reached = measured > target + target * margin
    is_below = measured <= target - target * margin
    low = tl.maximum(low, tl.max(tl.where(is_reached, pivots, float("-inf")), 0))
    high = tl.minimum(high, tl.min(tl.where(is_below, pivots, float("inf")), 0))
    return low, high


@ignore_comments
@triton.jit
def _store_bracket(bounds, row, level, low, high, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(bounds + 2 * (row * (LEVELS + 1) + level), low)
    tl.store(bounds + 2 * (row * (LEVELS + 1) + level) + 1, high)


@ignore_comments
@triton.jit
def _load_kept(  # type: ignore[no-untyped-def]
    logits, changed, is_changed, row, ids, limits, is_count, has_k, VOCAB: tl.constexpr
):  # fmt: skip
    """Scores of tokens, and NaN, which is in no bracket, for those to leave out.

    These are ids beyond the vocabulary and, if the launch searches the limit of top-p, tokens that top-k excludes.
    """
    scores = tl.where(ids < VOCAB, _load_scores(logits, changed, is_changed, row, ids, VOCAB), float("nan"))
    if (is_count == 0) & has_k:
        scores = tl.where(_ranks(scores, ids) >= tl.load(limits + row), scores, float("nan"))
    return scores


@ignore_comments
@triton.jit(
    do_not_specialize=["has_changes", "is_count", "level", "tiles"],
    do_not_specialize_on_alignment=["changed", "bests", "greedy", "limits"],
)
def _sample_search_kernel(  # type: ignore[no-untyped-def]
    sums, bounds, limits, logits, changed, bests, greedy, rows, changes, temperature, top_k, top_p,
    has_changes, is_count, level, tiles,
    VOCAB: tl.constexpr, SEARCH_TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr,
    LEVELS: tl.constexpr, LISTED_K: tl.constexpr,
):  # fmt: skip
    """One level, `tiles` tiles of one row: count the tokens at or above each pivot, or add their weights in float32."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    decode_row, is_changed, _, top, row_temperature, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    k, p, has_k, is_wide = _top_k_and_p(top_k, top_p, decode_row, VOCAB, LISTED_K)
    if (is_drawn & tl.where(is_count != 0, has_k & (k > LISTED_K), is_wide)) == 0:
        return
    step = _first_step(is_count, row_temperature)
    low, high = top * 0.0 + float("-inf"), top + tl.maximum(tl.abs(top), 1.0) * 0.01
    if level > 0:
        low, high = _bracket(sums, bounds, row, level - 1, is_count, k, p, top, step, LEVELS)
    if part == 0:
        _store_bracket(bounds, row, level, low, high, LEVELS)
    index = tl.arange(0, PIVOTS)
    measured = tl.zeros((PIVOTS,), tl.float32)
    scale = tl.minimum(_scale(row_temperature), MAX_SCALE).to(tl.float32)
    for tile in range(tiles):
        ids = (part * tiles + tile) * SEARCH_TILE + tl.arange(0, SEARCH_TILE)
        scores = _load_kept(logits, changed, is_changed, row, ids, limits, is_count, has_k, VOCAB)
        values = tl.where(is_count != 0, 1.0, tl.exp2(tl.maximum((scores - top) * scale, SMALLEST_EXPONENT)))
        for number in tl.static_range(PIVOTS):
            pivot = _pivots(tl.full((1,), number, tl.int32), level, low, high, top, step)
            measured += tl.where(index == number, tl.sum(tl.where(scores >= pivot, values, 0.0), 0), 0.0)
    tl.atomic_add(sums + (row * LEVELS + level) * PIVOTS + index, measured, mask=measured > 0)


@ignore_comments
@triton.jit(
    do_not_specialize=["has_changes", "is_count", "tiles"],
    do_not_specialize_on_alignment=["measures", "changed", "bests", "greedy", "limits"],
)
def _sample_measure_kernel(  # type: ignore[no-untyped-def]
    measures, sums, bounds, limits, logits, changed, bests, greedy, rows, changes, temperature, top_k, top_p,
    has_changes, is_count, tiles,
    VOCAB: tl.constexpr, SEARCH_TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, LISTED_K: tl.constexpr,
):  # fmt: skip
    """`tiles` tiles of one row: count the tokens at or above each end of the last bracket, or add their units."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    decode_row, is_changed, _, top, row_temperature, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    k, p, has_k, is_wide = _top_k_and_p(top_k, top_p, decode_row, VOCAB, LISTED_K)
    if (is_drawn & tl.where(is_count != 0, has_k & (k > LISTED_K), is_wide)) == 0:
        return
    step = _first_step(is_count, row_temperature)
    low, high = _bracket(sums, bounds, row, LEVELS - 1, is_count, k, p, top, step, LEVELS)
    if part == 0:
        _store_bracket(bounds, row, LEVELS, low, high, LEVELS)
    total, above, at_least, scale = row * 0, row * 0, row * 0, _scale(row_temperature)
    for tile in range(tiles):
        ids = (part * tiles + tile) * SEARCH_TILE + tl.arange(0, SEARCH_TILE)
        scores = _load_kept(logits, changed, is_changed, row, ids, limits, is_count, has_k, VOCAB)
        values = (scores == scores).to(tl.int64)
        if is_count == 0:
            values *= (_relative_weights(scores, top, scale) * (2.0**BITS)).to(tl.int64)
        total += tl.sum(values, 0)
        above += tl.sum(tl.where(scores >= high, values, 0), 0)
        at_least += tl.sum(tl.where(scores >= low, values, 0), 0)
    tl.atomic_add(measures + row * MEASURES + TOTAL, total)
    tl.atomic_add(measures + row * MEASURES + ABOVE, above)
    tl.atomic_add(measures + row * MEASURES + AT_LEAST, at_least)


@ignore_comments
@triton.jit(do_not_specialize=["has_changes"], do_not_specialize_on_alignment=["changed", "bests", "greedy"])
def _sample_group_kernel(  # type: ignore[no-untyped-def]
    group_maxima, logits, changed, bests, greedy, rows, changes, temperature, top_k, top_p, has_changes,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr,
    LISTED_K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The largest score of each group of GROUP tokens, in one part of one row with a small k."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    decode_row, is_changed, _, _, _, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    k, _, has_k, _ = _top_k_and_p(top_k, top_p, decode_row, VOCAB, LISTED_K)
    if (is_drawn & has_k & (k <= LISTED_K)) == 0:
        return
    groups = part * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    maxima = tl.max(_load_scores(logits, changed, is_changed, row, ids, VOCAB), 1)
    tl.store(group_maxima + row * GROUPS + groups, maxima, mask=groups < GROUPS)


@ignore_comments
@triton.jit(do_not_specialize=["has_changes"], do_not_specialize_on_alignment=["changed", "bests", "greedy"])
def _sample_bound_kernel(  # type: ignore[no-untyped-def]
    bounds, group_maxima, logits, changed, bests, greedy, rows, changes, temperature, top_k, top_p, has_changes,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, LEVELS: tl.constexpr,
    LISTED_K: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
):  # fmt: skip
    """One row with a small k: a bracket from the k-th largest of the groups' maxima, rounded down to 16 bits.

    It has no upper end, and holds at least k tokens; with random logits, a few more.
    """
    row, groups = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS_PADDED)
    decode_row, _, _, _, _, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    k, _, has_k, _ = _top_k_and_p(top_k, top_p, decode_row, VOCAB, LISTED_K)
    if (is_drawn & has_k & (k <= LISTED_K)) == 0:
        return
    maxima = tl.load(group_maxima + row * GROUPS + groups, mask=groups < GROUPS, other=float("-inf"))
    orders = _order(maxima)
    bound = row * 0 - (1 << 31)
    for step in range(16):
        tried = bound + ((row * 0 + 1) << (31 - step))
        if tl.sum((orders >= tried).to(tl.int32), 0) >= k:
            bound = tried
    low = _score_of(bound << 32)
    low = tl.where((bound <= _order(low * 0.0 + float("-inf"))) | (low != low), float("-inf"), low)
    _store_bracket(bounds, row, LEVELS, low, float("inf"), LEVELS)


@ignore_comments
@triton.jit(
    do_not_specialize=["has_changes", "is_count"],
    do_not_specialize_on_alignment=["measures", "changed", "bests", "greedy", "limits"],
)
def _sample_collect_kernel(  # type: ignore[no-untyped-def]
    candidates, measures, bounds, limits, logits, changed, bests, greedy, rows, changes, temperature, top_k,
    top_p, has_changes, is_count,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr,
    LEVELS: tl.constexpr, LISTED_K: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """List the candidates of one part: the ranks of its tokens in the bracket, up to CAPACITY in a row.

    The order of the list varies with the order of the programs. The limit does not depend on it.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    decode_row, is_changed, _, top, _, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    k, p, has_k, is_wide = _top_k_and_p(top_k, top_p, decode_row, VOCAB, LISTED_K)
    if (is_drawn & tl.where(is_count != 0, has_k, is_wide)) == 0:
        return
    low = tl.load(bounds + 2 * (row * (LEVELS + 1) + LEVELS))
    high = tl.load(bounds + 2 * (row * (LEVELS + 1) + LEVELS) + 1)
    ids = part * TILE + tl.arange(0, TILE)
    scores = _load_kept(logits, changed, is_changed, row, ids, limits, is_count, has_k, VOCAB)
    is_candidate = (scores >= low) & (scores < high) & (scores > float("-inf"))  # masked tokens are never drawn
    number = tl.sum(is_candidate.to(tl.int32), 0)
    if number > 0:
        first = tl.atomic_add(measures + row * MEASURES + LISTED, number.to(tl.int64))
        slots = first + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        tl.store(candidates + row * CAPACITY + slots, _ranks(scores, ids), mask=is_candidate & (slots < CAPACITY))
