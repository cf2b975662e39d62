"""The Triton kernels that change logits and draw tokens. sample_triton.py launches and describes them.

`row` is a row of the logits, `decode_row` the index of its sampling parameters, `part` a tile of TILE tokens. Every
kernel returns at once for a row that does not need it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.sampling.row_kernels import (
    LOWEST,
    _load_scores,
    _ranks,
    _relative_weights,
    _row_state,
    _scale,
)
from tcdeploy.torch_compat.triton.source import ignore_comments

SEED_STEP, POSITION_STEP = tl.constexpr(-0x2ECBDABC217D106B), tl.constexpr(-0x61C8864680B583EB)
FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(-0x40A7B892E31B1A47), tl.constexpr(-0x6B2FB644ECCEEE15)


@ignore_comments
@triton.jit(
    do_not_specialize=["has_penalties", "has_biases", "has_masks"],
    do_not_specialize_on_alignment=["changed", "bests", "positions", "masks"],
)
def _sample_change_kernel(  # type: ignore[no-untyped-def]
    changed, bests, logits, rows, positions, changes,
    repetition, presence, frequency, output_counts, in_prompt, bias_ids, bias_values, bias_ends, masks,
    has_penalties, has_biases, has_masks,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, BIASES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One part of one row: add biases, subtract penalties, apply the mask; store the logits and the largest rank."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    decode_row = tl.load(rows + row)
    if tl.load(changes + decode_row) == 0:
        return
    ids = part * TILE + tl.arange(0, TILE)
    is_token = ids < VOCAB
    scores = tl.load(logits + row * VOCAB + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    if has_biases:
        entries = decode_row * BIASES + tl.arange(0, BIASES)
        applies = tl.load(bias_ends + entries) > tl.load(positions + row)
        biased = tl.load(bias_ids + entries)
        applies = applies & (biased >= part * TILE) & (biased < part * TILE + TILE)
        count = tl.max(tl.where(applies, tl.arange(0, BIASES) + 1, 0), 0)
        for index in range(count):
            entry = decode_row * BIASES + index
            if tl.load(bias_ends + entry) > tl.load(positions + row):
                value = tl.load(bias_values + entry)
                scores = tl.where(ids == tl.load(bias_ids + entry), scores + value, scores)
    if has_penalties:
        factor, decrement = tl.load(repetition + decode_row), tl.load(presence + decode_row)
        per_count = tl.load(frequency + decode_row)
        if (factor != 1.0) | (decrement != 0.0) | (per_count != 0.0):
            counts = tl.load(output_counts + decode_row * VOCAB + ids, mask=is_token, other=0)
            is_in_prompt = tl.load(in_prompt + decode_row * VOCAB + ids, mask=is_token, other=0) != 0
            is_generated = counts > 0
            scale = tl.where(is_generated | is_in_prompt, factor, 1.0)
            scores = tl.where(scores > 0, tl.div_rn(scores, scale), scores * scale)
            scores = scores - per_count * counts.to(tl.float32)
            scores = scores - decrement * is_generated.to(tl.float32)
    if has_masks:
        words = tl.load(masks + row * WORDS + (ids >> 5), mask=is_token, other=0)
        scores = tl.where(((words >> (ids & 31)) & 1) != 0, scores, float("-inf"))
    tl.store(changed + row * VOCAB + ids, scores, mask=is_token)
    tl.store(bests + row * PARTS + part, tl.max(tl.where(is_token, _ranks(scores, ids), LOWEST), 0))


@ignore_comments
@triton.jit
def _kept_units(  # type: ignore[no-untyped-def]
    scores, ids, top, row_temperature, limit, min_p, VOCAB: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """The units of tokens that the filters keep; 0 for the others."""
    weights = _relative_weights(scores, top, _scale(row_temperature))
    is_kept = (ids < VOCAB) & (_ranks(scores, ids) >= limit) & (weights >= min_p.to(tl.float64))
    return tl.where(is_kept, (weights * (2.0**BITS)).to(tl.int64), 0)


@ignore_comments
@triton.jit
def _filters(  # type: ignore[no-untyped-def]
    limits, top_k, top_p, min_p, has_filters, decode_row, row, VOCAB: tl.constexpr
):  # fmt: skip
    """Returns (rank of the last token that top-k and top-p keep, min-p)."""
    limit, least = row * 0 + LOWEST, tl.load(min_p + decode_row)
    if has_filters:
        k = tl.load(top_k + decode_row)
        if ((k > 0) & (k < VOCAB)) | (tl.load(top_p + decode_row) < 1.0):
            limit = tl.load(limits + row)
    else:
        least = least * 0.0
    return limit, least


@ignore_comments
@triton.jit(
    do_not_specialize=["has_changes", "has_filters"],
    do_not_specialize_on_alignment=["changed", "bests", "greedy", "limits"],
)
def _sample_weigh_kernel(  # type: ignore[no-untyped-def]
    part_units, logits, changed, bests, limits, greedy, rows, changes, temperature, top_k, top_p, min_p,
    has_changes, has_filters,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The units of one part of one row."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    decode_row, is_changed, _, top, row_temperature, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    if is_drawn == 0:
        return
    limit, least = _filters(limits, top_k, top_p, min_p, has_filters, decode_row, row, VOCAB)
    ids = part * TILE + tl.arange(0, TILE)
    scores = _load_scores(logits, changed, is_changed, row, ids, VOCAB)
    units = _kept_units(scores, ids, top, row_temperature, limit, least, VOCAB, BITS)
    tl.store(part_units + row * PARTS + part, tl.sum(units, 0))


@ignore_comments
@triton.jit
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    """As weights.uniforms."""
    bits = seed * SEED_STEP + position * POSITION_STEP
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * FIRST_FACTOR
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * SECOND_FACTOR
    bits = bits ^ ((bits >> 31) & 0x1FFFFFFFF)
    return ((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * (2.0**-53)


@ignore_comments
@triton.jit(
    do_not_specialize=["has_changes", "has_filters"],
    do_not_specialize_on_alignment=["tokens", "changed", "bests", "greedy", "limits", "positions"],
)
def _sample_draw_kernel(  # type: ignore[no-untyped-def]
    tokens, part_units, logits, changed, bests, limits, greedy, rows, positions, changes, temperature, top_k, top_p,
    min_p, seeds, has_changes, has_filters,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One row: the part that holds the quantile, and then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    decode_row, is_changed, token, top, row_temperature, is_drawn = _row_state(
        logits, bests, greedy, rows, changes, temperature, has_changes, row, VOCAB, PARTS, PARTS_PADDED
    )
    if is_drawn:
        parts = tl.arange(0, PARTS_PADDED)
        ends = tl.cumsum(tl.load(part_units + row * PARTS + parts, mask=parts < PARTS, other=0), 0)
        total = tl.max(ends, 0)
        uniform = _uniform(tl.load(seeds + decode_row), tl.load(positions + row))
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        part = tl.sum((ends <= target).to(tl.int32), 0)
        target -= tl.max(tl.where(ends <= target, ends, 0), 0)
        limit, least = _filters(limits, top_k, top_p, min_p, has_filters, decode_row, row, VOCAB)
        ids = part * TILE + tl.arange(0, TILE)
        scores = _load_scores(logits, changed, is_changed, row, ids, VOCAB)
        units = _kept_units(scores, ids, top, row_temperature, limit, least, VOCAB, BITS)
        token = part.to(tl.int64) * TILE + tl.sum((tl.cumsum(units, 0) <= target).to(tl.int64), 0)
    tl.store(tokens + row, token)
