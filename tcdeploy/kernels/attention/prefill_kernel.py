"""The Triton kernels of prefill: attention, and the write of K and V to the cache. prefill.py launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.attention.online_softmax import (
    DO_NOT_SPECIALIZE,
    attend_tile,
    block_ids,
    fold_k_scale,
    key_slots,
    load_rows,
    output_scale,
    scale_values,
    store_rows,
    to_stored,
)
from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def _sequence_of_tile(cu_seqlens_q, tile, sequences, QUERIES: tl.constexpr):
    """The sequence that a tile belongs to. Tiles from cu_seqlens_q[s] // QUERIES + s on belong to sequence s.

    That range is long enough for the sequence's queries wherever they start.
    """
    sequence = -1
    for start in range(0, sequences + 1, 64):
        rows = start + tl.arange(0, 64)
        first_tile = tl.load(cu_seqlens_q + rows, mask=rows <= sequences, other=0) // QUERIES + rows
        sequence += tl.sum(((first_tile <= tile) & (rows <= sequences)).to(tl.int32), 0)
    return sequence


@ignore_comments
@triton.jit
def _prefill_splits(tiles, max_splits, concurrent_programs):
    """The number of splits per tile, at most 16, with the least estimated time; `tiles` counts all heads.

    If a tile without splits takes time T, s splits take ceil(tiles * s / concurrent_programs) waves of T / s, plus an
    assumed overhead of 0.01 T per split.
    """
    splits = tl.arange(0, 16) + 1
    time = tl.cdiv(tiles * splits, concurrent_programs) / splits + 0.01 * splits
    time = tl.where(splits <= max_splits, time, float("inf"))
    return tl.min(tl.where(time == tl.min(time, 0), splits, 16), 0)


@ignore_comments
@triton.jit
def _split_of_program(
    cu_seqlens_q, seq_lens, tokens, sequences, concurrent_programs, program, programs,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, MIN_KEYS_TO_SPLIT: tl.constexpr,
):  # fmt: skip
    """(sequence, its first query, tile of the sequence, split, number of splits) of a program.

    The program exits if the sequence index exceeds `sequences`, or if the sequence has no tile of that index. Tiles of
    sequences without keys (padding, decode rows) are not split. The remaining programs are divided equally among the
    other tiles.
    """
    numbers = tl.arange(0, 64)  # one entry per sequence, and one for the padding
    lengths = tl.load(seq_lens + numbers, mask=numbers < sequences, other=0)
    if tl.max(lengths, 0) < MIN_KEYS_TO_SPLIT:  # no sequence is long enough: skip the search, which takes 2.6 us
        sequence = _sequence_of_tile(cu_seqlens_q, program, sequences, QUERIES)
        q_start = tl.load(cu_seqlens_q + sequence)
        tile = program - sequence - q_start // QUERIES
        split_idx, splits = program * 0, program * 0 + 1
    else:
        starts = tl.load(cu_seqlens_q + numbers, mask=numbers <= sequences, other=0)
        ends = tl.load(cu_seqlens_q + numbers + 1, mask=numbers < sequences, other=tokens)
        tiles = tl.where(numbers <= sequences, tl.cdiv(ends - starts, QUERIES), 0)
        tiles_with_keys = tl.maximum(tl.sum(tl.where(lengths > 0, tiles, 0), 0), 1)
        max_splits = 1 + (programs - tl.sum(tiles, 0)) // tiles_with_keys
        splits_of = _prefill_splits(HEADS * tiles_with_keys, max_splits, concurrent_programs)
        splits_of = tl.where(lengths > 0, splits_of, 1)
        sequence = tl.sum((tl.cumsum(tiles * splits_of, 0) <= program).to(tl.int32), 0)
        program -= tl.sum(tl.where(numbers < sequence, tiles * splits_of, 0), 0)
        q_start = tl.sum(tl.where(numbers == sequence, starts, 0), 0)
        splits = tl.maximum(tl.sum(tl.where(numbers == sequence, splits_of, 0), 0), 1)
        tile, split_idx = program // splits, program % splits
    return sequence, q_start, tile, split_idx, splits


@ignore_comments
@triton.jit
def _attend_causal_tile(
    acc, row_max, row_sum, q, positions, start, oldest, end, window,  # the row at position p sees keys (p - window, p]
    k_cache, v_cache, blocks, kv_head, scale_log2, tanh_scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`attend_tile` for the KEYS keys from `start`; only keys in [oldest, end) may be read."""
    keys = start + tl.arange(0, KEYS)
    key_mask = (keys >= oldest) & (keys < end) if MASKED else tl.full([KEYS], 1, tl.int1)
    distance = positions[:, None] - keys[None, :]  # [QUERIES, KEYS]
    score_mask = (distance >= 0) & (distance < window) & key_mask[None, :]
    return attend_tile(
        acc, row_max, row_sum, q, key_slots(blocks, keys, kv_head, KV_HEADS, BLOCK_SIZE), key_mask, score_mask,
        k_cache, v_cache, scale_log2, tanh_scale, HEAD_DIM, V_HEAD_DIM, DIM, V_DIM, SOFTCAP, MASKED,
    )  # fmt: skip


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _prefill_kernel(
    out, partial_out, partial_lse, split_counters,
    q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, row_seq_lens, sinks, kv_scales,
    q_stride_token, q_stride_head, table_stride, tokens, sequences, concurrent_programs, window,
    scale_log2, tanh_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAP: tl.constexpr,
    MIN_TILES_PER_SPLIT: tl.constexpr,
):  # fmt: skip
    """One program computes QUERIES queries of one head of one sequence, over all of the keys or over one split of them.

    The last tiles run first because they have the most keys. Padding rows after the last sequence form an additional
    sequence of length 0, so they see no key and their output is zero.
    """
    head, programs = tl.program_id(0), tl.num_programs(1)
    program = programs - 1 - tl.program_id(1)
    if partial_out is None:
        sequence = _sequence_of_tile(cu_seqlens_q, program, sequences, QUERIES)
        q_start = tl.load(cu_seqlens_q + sequence)
        tile, split_idx, splits = program - sequence - q_start // QUERIES, 0, 1
    else:
        sequence, q_start, tile, split_idx, splits = _split_of_program(
            cu_seqlens_q, seq_lens, tokens, sequences, concurrent_programs, program, programs,
            HEADS, QUERIES, 2 * MIN_TILES_PER_SPLIT * KEYS,
        )  # fmt: skip
        if sequence > sequences:
            return
    q_end = tl.load(cu_seqlens_q + sequence + 1, mask=sequence < sequences, other=tokens)
    first_row = q_start + tile * QUERIES
    if first_row >= q_end:
        return
    length = tl.load(seq_lens + sequence, mask=sequence < sequences, other=0)
    first_position = length - q_end + first_row
    last_position = tl.minimum(first_position + QUERIES, length) - 1

    # Keys in whole tiles: [left, inner_left) crosses the window's edge, [inner_left, inner_right) is visible to every
    # row, [inner_right, end) crosses the diagonal. The online softmax does not depend on their order.
    oldest, end = tl.maximum(first_position - window + 1, 0), last_position + 1
    left = oldest // KEYS * KEYS
    inner_right = tl.maximum((first_position + 1) // KEYS * KEYS, left)
    inner_left = tl.minimum(tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS, inner_right)
    active_splits = 1
    if partial_out is not None:
        tiles = tl.cdiv(tl.maximum(end - left, 0), KEYS)
        active_splits = tl.maximum(tl.minimum(splits, tiles // MIN_TILES_PER_SPLIT), 1)
        if split_idx >= active_splits:
            return
        # Restrict the three ranges to this split.
        split_end = tl.minimum(left + (split_idx + 1) * tiles // active_splits * KEYS, end)
        left += split_idx * tiles // active_splits * KEYS
        end = tl.where(split_idx + 1 == active_splits, end, split_end)
        inner_left = tl.minimum(tl.maximum(inner_left, left), tl.maximum(end, left))
        inner_right = tl.minimum(tl.maximum(inner_right, inner_left), tl.maximum(end, inner_left))

    rows = first_row + tl.arange(0, QUERIES)
    offsets = rows.to(tl.int64) * q_stride_token
    q = load_rows(q + head.to(tl.int64) * q_stride_head, offsets, rows < q_end, HEAD_DIM, DIM)
    positions = first_position + tl.arange(0, QUERIES)
    scale_log2, tanh_scale = fold_k_scale(scale_log2, tanh_scale, kv_scales, SOFTCAP)
    acc = tl.zeros([QUERIES, V_DIM], tl.float32)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    table = block_table + sequence.to(tl.int64) * table_stride
    kv_head = head // (HEADS // KV_HEADS)
    table_width = tl.cdiv(length, BLOCK_SIZE)
    ids = block_ids(table, inner_left, table_width, BLOCK_SIZE, KEYS)
    for start in range(inner_left, inner_right, KEYS):
        blocks = ids.to(tl.int64)
        ids = block_ids(
            table, start + KEYS, table_width, BLOCK_SIZE, KEYS
        )  # one tile ahead: K and V loads need not wait
        acc, row_max, row_sum = _attend_causal_tile(
            acc, row_max, row_sum, q, positions, start, oldest, length, window,
            k_cache, v_cache, blocks, kv_head, scale_log2, tanh_scale,
            KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_SIZE, KEYS, DIM, V_DIM, SOFTCAP, False,
        )  # fmt: skip
    left_tiles = (inner_left - left) // KEYS
    for i in range(left_tiles + tl.cdiv(end - inner_right, KEYS)):
        start = tl.where(i < left_tiles, left + i * KEYS, inner_right + (i - left_tiles) * KEYS)
        blocks = block_ids(table, start, table_width, BLOCK_SIZE, KEYS).to(tl.int64)
        acc, row_max, row_sum = _attend_causal_tile(
            acc, row_max, row_sum, q, positions, start, oldest, length, window,
            k_cache, v_cache, blocks, kv_head, scale_log2, tanh_scale,
            KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_SIZE, KEYS, DIM, V_DIM, SOFTCAP, True,
        )  # fmt: skip

    acc = scale_values(acc, kv_scales)
    row_mask = rows < q_end
    if partial_out is not None:  # noqa: SIM102 - Triton evaluates the outer condition at compile time
        if active_splits > 1:
            first_slot = head * programs + program - split_idx
            slots = (first_slot + split_idx).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
            # In rows without a visible key, row_max is -inf, so the weight of the split is 0.
            row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
            tl.store(partial_lse + slots, row_max + tl.log2(row_sum))
            store_rows(partial_out, slots, acc / row_sum[:, None], row_mask, V_HEAD_DIM, V_DIM)
            tl.debug_barrier()
            finished_before = tl.atomic_add(split_counters + first_slot, 1, sem="acq_rel")
            if finished_before < active_splits - 1:
                return
            tl.store(split_counters + first_slot, 0)
            acc, row_max, row_sum = _merge_splits(
                partial_out, partial_lse, first_slot, active_splits, row_mask, QUERIES, V_HEAD_DIM, V_DIM
            )
    if row_seq_lens is not None:  # noqa: SIM102
        if sequence == 0:
            row_mask = row_mask & (tl.load(row_seq_lens + rows, mask=row_mask, other=0) == 0)
    acc = acc * output_scale(row_max, row_sum, sinks, head, True)[:, None]
    store_rows(out, rows.to(tl.int64) * HEADS + head, acc, row_mask, V_HEAD_DIM, V_DIM)


@ignore_comments
@triton.jit
def _merge_splits(
    partial_out, partial_lse, first_slot, active_splits, row_mask,
    QUERIES: tl.constexpr, V_HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    """Merges all splits of a tile in index order. Returns the state of the online softmax, as `attend_tile` does."""
    acc = tl.zeros([QUERIES, V_DIM], tl.float32)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    for split_idx in tl.range(0, active_splits, num_stages=1):
        slots = (first_slot + split_idx).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
        lse = tl.load(partial_lse + slots)
        values = load_rows(partial_out, slots * V_HEAD_DIM, row_mask, V_HEAD_DIM, V_DIM)
        new_row_max = tl.maximum(row_max, lse)
        shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        weights, rescale = tl.exp2(lse - shift), tl.exp2(row_max - shift)
        acc = acc * rescale[:, None] + values * weights[:, None]
        row_max, row_sum = new_row_max, row_sum * rescale + weights
    return acc, row_max, row_sum


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _write_kernel(
    k, v, k_cache, v_cache, slot_mapping, kv_scales,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """One program writes HEADS_TILE kv heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE))[:, None]
    dims = tl.arange(0, DIM)[None, :]
    first = tl.load(slot_mapping + token) * KV_HEADS  # the slot's first head; int64, a cache can exceed 2**31 elements
    k_mask, v_mask = (heads < KV_HEADS) & (dims < HEAD_DIM), (heads < KV_HEADS) & (dims < V_HEAD_DIM)
    k_token = tl.load(k + token * k_stride_token + heads * k_stride_head + dims, mask=k_mask)
    v_token = tl.load(v + token * v_stride_token + heads * v_stride_head + dims, mask=v_mask)
    if kv_scales is not None:
        k_token = to_stored(k_token, tl.load(kv_scales), k_cache)
        v_token = to_stored(v_token, tl.load(kv_scales + 1), v_cache)
    tl.store(k_cache + (first + heads) * HEAD_DIM + dims, k_token, mask=k_mask)
    tl.store(v_cache + (first + heads) * V_HEAD_DIM + dims, v_token, mask=v_mask)
