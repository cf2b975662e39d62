"""The Triton kernel of decode attention, which decode.py launches and describes."""

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
    scaled_tanh,
    store_rows,
    to_stored,
)
from tcdeploy.kernels.l2_prefetch import prefetch_rows
from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _decode_kernel(
    out, partial_out, partial_lse, split_counters, q, k, v, cos, sin, k_cache, v_cache, block_table, seq_lens, sinks,
    kv_scales, q_norm, k_norm, norm_eps, q_stride_sequence, q_stride_head, k_stride_sequence, k_stride_head,
    v_stride_sequence, v_stride_head, rotary_stride, table_stride, table_width, splits, window, scale_log2, tanh_scale,
    TURN: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, SPLITS_PER_STEP: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, PREFETCH: tl.constexpr, USE_PDL: tl.constexpr,
    KEEPS_PADDING: tl.constexpr,
):  # fmt: skip
    """One program: the GROUP query heads of one kv head, padded to ROWS for tl.dot, over its turns of TURN tiles."""
    # Split 0 of every sequence is scheduled first. Programs without tiles exit while these compute.
    kv_head, sequence, split_idx = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    table = block_table + sequence * table_stride

    # Before the PDL wait: only loads of data that no earlier kernel of this step writes. `advance` writes seq_lens at
    # the end of a step, after this kernel.
    length = tl.load(seq_lens + sequence)
    if KEEPS_PADDING:  # noqa: SIM102 - Triton evaluates this condition when it compiles
        if length == 0:
            return
    oldest, first = 0, 0
    if WINDOWED:
        oldest = tl.maximum(length - window, 0)
        first = oldest // KEYS * KEYS
    ids = block_ids(table, first + split_idx * TURN * KEYS, table_width, BLOCK_SIZE, KEYS)
    cached = length - 1
    tiles = tl.cdiv(tl.maximum(cached - first, 0), KEYS)
    active_splits = tl.maximum(tl.minimum(tl.cdiv(tiles, TURN), splits), 1)
    if split_idx >= active_splits:
        return
    if PREFETCH:
        _prefetch_tile(
            k_cache, v_cache, ids, first + split_idx * TURN * KEYS, cached, kv_head,
            KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_SIZE, KEYS,
        )  # fmt: skip
        if cos is not None:
            row = sequence * rotary_stride + tl.arange(0, 1)
            prefetch_rows(cos + row, HEAD_DIM)
            prefetch_rows(sin + row, HEAD_DIM)
        if q_norm is not None:
            prefetch_rows(q_norm + tl.arange(0, 1), HEAD_DIM)
            prefetch_rows(k_norm + tl.arange(0, 1), HEAD_DIM)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # After the wait, first every load that does not depend on another load.
    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows
    q += sequence * q_stride_sequence
    k += sequence * k_stride_sequence + kv_head * k_stride_head
    q_tile = load_rows(q, heads * q_stride_head, rows < GROUP, HEAD_DIM, DIM)
    dims, v_dims = tl.arange(0, DIM), tl.arange(0, V_DIM)
    k_mask, v_mask = (dims < HEAD_DIM) & (split_idx == 0), (v_dims < V_HEAD_DIM) & (split_idx == 0)
    k_new = tl.load(k + dims, mask=k_mask, other=0.0)
    v_new = tl.load(v + sequence * v_stride_sequence + kv_head * v_stride_head + v_dims, mask=v_mask, other=0.0)

    if cos is not None:
        is_first_half, rotary_offsets = dims < HEAD_DIM // 2, sequence * rotary_stride + dims
        partner = tl.where(is_first_half, dims + HEAD_DIM // 2, dims - HEAD_DIM // 2)
        cos_row = tl.load(cos + rotary_offsets, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        sin_row = tl.load(sin + rotary_offsets, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        sin_row = tl.where(is_first_half, -sin_row, sin_row)
        q_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        q_partner = tl.load(q + (heads * q_stride_head)[:, None] + partner[None, :], mask=q_mask, other=0.0)
        k_partner = tl.load(k + partner, mask=k_mask, other=0.0)
        if q_norm is not None:
            q_tile, q_partner = _normalise(q_tile, q_partner, q_norm, dims, partner, norm_eps, HEAD_DIM)
            k_new, k_partner = _normalise(k_new, k_partner, k_norm, dims, partner, norm_eps, HEAD_DIM)
        q_tile = _apply_rotary(q_tile, q_partner, cos_row[None, :], sin_row[None, :]).to(q.dtype.element_ty)
        k_new = _apply_rotary(k_new, k_partner, cos_row, sin_row).to(k.dtype.element_ty)

    if kv_scales is not None:
        k_new = to_stored(k_new, tl.load(kv_scales), k_cache)
        v_new = to_stored(v_new, tl.load(kv_scales + 1), v_cache)
    scale_log2, tanh_scale = fold_k_scale(scale_log2, tanh_scale, kv_scales, SOFTCAP)
    stores_new_token = (split_idx == 0) & (length > 0)
    new_block = tl.load(table + cached // BLOCK_SIZE, mask=stores_new_token, other=0).to(tl.int64)

    acc = tl.zeros([ROWS, V_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    full_turns = tiles // (splits * TURN)
    last_turn = tl.minimum(tl.maximum(tiles - (full_turns * splits + split_idx) * TURN, 0), TURN)
    for number in range(full_turns * TURN + last_turn):
        start = first + _tile(number, split_idx, splits, TURN) * KEYS
        blocks = ids.to(tl.int64)
        next_start = first + _tile(number + 1, split_idx, splits, TURN) * KEYS
        ids = block_ids(table, next_start, table_width, BLOCK_SIZE, KEYS)
        keys = start + tl.arange(0, KEYS)
        key_mask = (keys >= oldest) & (keys < cached)
        acc, row_max, row_sum = attend_tile(
            acc, row_max, row_sum,
            q_tile, key_slots(blocks, keys, kv_head, KV_HEADS, BLOCK_SIZE), key_mask, key_mask[None, :],
            k_cache, v_cache, scale_log2, tanh_scale, HEAD_DIM, V_HEAD_DIM, DIM, V_DIM, SOFTCAP, True,
        )  # fmt: skip

    if stores_new_token:
        slot = key_slots(new_block, cached, kv_head, KV_HEADS, BLOCK_SIZE)
        tl.store(k_cache + slot * HEAD_DIM + dims, k_new, mask=k_mask)
        tl.store(v_cache + slot * V_HEAD_DIM + v_dims, v_new, mask=v_mask)
        score = tl.sum(q_tile.to(tl.float32) * k_new.to(tl.float32)[None, :], 1)
        if SOFTCAP:
            score = scaled_tanh(score, tanh_scale)
        new_row_max = tl.maximum(row_max, score * scale_log2)
        weight, rescale = tl.exp2(score * scale_log2 - new_row_max), tl.exp2(row_max - new_row_max)
        acc = acc * rescale[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
        row_max, row_sum = new_row_max, row_sum * rescale + weight

    acc = scale_values(acc, kv_scales)
    pair = sequence * KV_HEADS + kv_head
    if partial_out is None or active_splits == 1:
        acc = acc * output_scale(row_max, row_sum, sinks, heads, rows < GROUP)[:, None]
        store_rows(out, pair * GROUP + rows, acc, rows < GROUP, V_HEAD_DIM, V_DIM)
    else:
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # length 0: row_max is -inf, so this split has weight 0
        split_rows = (pair * splits + split_idx) * GROUP + rows
        tl.store(partial_lse + split_rows, row_max + tl.log2(row_sum), mask=rows < GROUP)
        store_rows(partial_out, split_rows, acc / row_sum[:, None], rows < GROUP, V_HEAD_DIM, V_DIM)
        tl.debug_barrier()
        finished_before = tl.atomic_add(split_counters + pair, 1, sem="acq_rel")
        if finished_before == active_splits - 1:
            tl.store(split_counters + pair, 0)
            _merge_splits(
                out, partial_out, partial_lse, sinks, pair, kv_head, splits, active_splits,
                GROUP, PADDED_GROUP, V_HEAD_DIM, V_DIM, SPLITS_PER_STEP,
            )  # fmt: skip


@ignore_comments
@triton.jit
def _tile(number, split_idx, splits, TURN: tl.constexpr):
    """Index of a split's `number`th tile. The splits alternate after TURN consecutive tiles."""
    return (number // TURN * splits + split_idx) * TURN + number % TURN


@ignore_comments
@triton.jit
def _apply_rotary(x, partner, cos_row, sin_row):
    """RoPE over pairs (i, i + head_dim / 2): `partner` is x's other coordinate, and `sin_row` carries its sign."""
    return x.to(tl.float32) * cos_row + partner.to(tl.float32) * sin_row


@ignore_comments
@triton.jit
def _normalise(x, partner, norm, dims, partner_dims, eps, HEAD_DIM: tl.constexpr):
    """RMSNorm of x over its last dimension, in float32; also of `partner`, which has x's elements in another order."""
    x, partner = x.to(tl.float32), partner.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) / HEAD_DIM + eps)
    weights = tl.load(norm + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    partner_weights = tl.load(norm + partner_dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    if len(x.shape) == 2:
        weights, partner_weights = weights[None, :], partner_weights[None, :]
    return x * factor * weights, partner * factor * partner_weights


@ignore_comments
@triton.jit
def _prefetch_tile(
    k_cache, v_cache, ids, start, cached, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Prefetch a split's first tile of K and V, which earlier steps wrote. Past the sequence it prefetches slot 0.

    Otherwise its loads would wait for those of the weights that the next kernel reads while this one computes.
    """
    keys = start + tl.arange(0, KEYS)
    slots = tl.where(keys < cached, key_slots(ids.to(tl.int64), keys, kv_head, KV_HEADS, BLOCK_SIZE), 0)
    prefetch_rows(k_cache + slots * HEAD_DIM, HEAD_DIM)
    prefetch_rows(v_cache + slots * V_HEAD_DIM, V_HEAD_DIM)


@ignore_comments
@triton.jit
def _merge_splits(
    out, partial_out, partial_lse, sinks, pair, kv_head, splits, active_splits,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, V_HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    SPLITS_PER_STEP: tl.constexpr,
):  # fmt: skip
    """Sum the splits' outputs, weighted by their softmax sums, SPLITS_PER_STEP splits at a time.

    A cell is four values of one head, and one thread holds it for all splits: threads exchange nothing, and each
    computes the weight of four values once.
    """
    cells = tl.arange(0, PADDED_GROUP * V_DIM // 4)
    head_in_group, dim = cells // (V_DIM // 4), cells % (V_DIM // 4) * 4
    row_mask = (head_in_group < GROUP) & (dim < V_HEAD_DIM)
    dims = dim[:, None] + tl.arange(0, 4)[None, :]
    store_mask = (head_in_group < GROUP)[:, None] & (dims < V_HEAD_DIM)
    acc = tl.zeros([PADDED_GROUP * V_DIM // 4, 4], tl.float32)
    row_max = tl.full([PADDED_GROUP * V_DIM // 4], float("-inf"), tl.float32)
    row_sum = tl.zeros([PADDED_GROUP * V_DIM // 4], tl.float32)
    for start in tl.range(0, active_splits, SPLITS_PER_STEP, num_stages=1):
        split_idx = start + tl.arange(0, SPLITS_PER_STEP)
        rows = (pair * splits + split_idx)[:, None] * GROUP + head_in_group[None, :]
        lse_mask = (split_idx < active_splits)[:, None] & row_mask[None, :]
        lse = tl.load(partial_lse + rows, mask=lse_mask, other=float("-inf"))
        load_mask = (split_idx < active_splits)[:, None, None] & store_mask[None, :, :]
        values = tl.load(partial_out + rows[:, :, None] * V_HEAD_DIM + dims[None, :, :], mask=load_mask, other=0.0)
        new_row_max = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        weights = tl.exp2(lse - shift[None, :])
        rescale = tl.exp2(row_max - shift)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_row_max
    acc *= output_scale(row_max, row_sum, sinks, kv_head * GROUP + head_in_group, row_mask)[:, None]
    rows = (pair * GROUP + head_in_group)[:, None] * V_HEAD_DIM
    tl.store(out + rows + dims, acc.to(out.dtype.element_ty), mask=store_mask)
