# mypy: disable-error-code="no-untyped-def"
"""Decode over the paged KV cache in one launch: write the new token, attend, merge the parts; and, where it is left to
us, first turn query and key by their position (passes/rotary.py).

Reading the cache is all the work there is; what else a launch costs is latency, one wait after another. Three ideas
keep the chain of waits short:

- The rows of a program are the query heads that share a kv head, so each key is read once. To fill the GPU a
  sequence's tiles of keys are dealt to `splits` programs like cards: which tiles are a program's own does not depend
  on the length, so its first block ids are loaded together with the length, and each later tile's a tile ahead.
- The new token never makes the way through memory: part 0 takes its key and value from registers, after its tiles,
  and stores them in the cache. The loops end before it, so no program reads what another writes.
- The last part to arrive merges all parts, in their order: the answer does not depend on who was last. It knows by a
  counter in `split_counters`, which it leaves at zero for the next launch; the counter's acquire and release make the other
  parts' stores visible, and a barrier before it those of the own program's threads.

Nothing reads a length on the host, and `splits` is an argument: what a CUDA graph froze holds for any lengths. Parts
without tiles leave at once, so many splits cost little where a sequence is short.

Microseconds on one H100 (torch 2.11, November 2026) at 32 heads over 8 of 128, bfloat16, 512 tokens each, block ids
shuffled over 512 MB of cache, all in one CUDA graph; three kernels before -> this one (a plain read of as many bytes):
batch 1: 8.8 -> 7.4 (2.2), 4: 11.4 -> 9.4 (4.7), 16: 18.6 -> 17.1 (13.2), 32: 30.6 -> 28.9 (24.5), 64: 58.6 -> 51.1,
128: 102 -> 96.5 (88.5), 256: 191 -> 185, which is 97% of a copy's rate. Falls short at batch 1: with the merge left out
an earlier form took 4.9 for 7.7, so counter and merge cost nearly what the second launch did.

Rejected, same units, from earlier forms of this kernel: [blocks, kv_heads, block_size, dim] as layout (batch 16: 16.7
for 16.5, batch 128: 97.8 for 97.4); blocks of 64 slots (0.2 faster at batch 1, nothing from 16 on); evict_first
(nothing); four stages (17.4 for 16.7 at batch 16); two warps (a merge that spills: 12 for 7 at batch 1); two parts from
batch 12 on (19.6 for 17.1 at batch 16: the merge outlasts what balance gains) but for long contexts; block ids carried
two tiles ahead (Triton then pipelines no loads).

Where the GPU can, the kernel is launched early (dependent_launch.py), which a `triton_op` cannot be: Inductor passes no
`launch_pdl` on, so the op is opaque (ops.py). It took a step of the 8B shape from 5.47 to 5.46 ms at batch 1 and from
5.73 to 5.67 at batch 4. Rejected with it: the first tile of keys in registers before the wait (5.46 and 5.70).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcdeploy.attention.kernels import (
    DO_NOT_SPECIALIZE,
    NO_WINDOW,
    attend_tile,
    block_ids,
    key_slots,
    load_rows,
    log2_score_scales,
    output_scale,
    padded_head_dim,
    scaled_tanh,
    store_rows,
)
from tcdeploy.torch_compat.pdl import supports_pdl
from tcdeploy.torch_compat.triton_source import ignore_comments

# What to tune on a GPU, all of it.
TILE_BYTES = 16 * 1024  # of keys, per step; as many of values, and `stages - 1` of both in flight
WARPS, STAGES = 4, 3
HIGH_OCCUPANCY_PROGRAMS, HIGH_OCCUPANCY_STAGES = (
    384,
    2,
)  # where programs share a multiprocessor, the neighbours cover a program's waits
MERGE_ELEMENTS = 4096  # of the parts' float32 values, at a time


def paged_decode(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    split_counters: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None, splits: int,
    cos: Tensor | None = None, sin: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.decode_attention`; arrivals [sequences, kv_heads] int32 is zero before and after.

    A power of two >= 16 as block size; q, k, v, cos and sin may be strided but for the last dimension.
    """
    (batch, heads, head_dim), (_, block_size, kv_heads, v_head_dim) = q.shape, v_cache.shape
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    if cos is not None and sin is not None:
        assert cos.shape == sin.shape == (batch, head_dim) and cos.stride() == sin.stride() and cos.stride(-1) == 1
    group, dim, v_dim = heads // kv_heads, padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    padded_group = triton.next_power_of_2(group)
    keys = min(max(TILE_BYTES // (max(dim, v_dim) * q.element_size()), 16), 128)
    scale_log2, tanh_scale = log2_score_scales(scale, softcap)
    use_pdl = supports_pdl(q.device)
    out = q.new_empty(batch, heads, v_head_dim)
    partial_out = weights = None  # the parts' outputs and the log2 of their softmax sums
    if splits > 1:
        partial_out = q.new_empty(batch, kv_heads, splits, group, v_head_dim, dtype=torch.float32)
        weights = q.new_empty(batch, kv_heads, splits, group, dtype=torch.float32)
    _decode_kernel[kv_heads, splits, batch](
        out, partial_out, weights, split_counters, q, k, v, cos, sin, k_cache, v_cache, block_table, seq_lens, sinks,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cos.stride(0) if cos is not None else 0,
        block_table.stride(0), block_table.shape[1], splits, window or NO_WINDOW, scale_log2, tanh_scale,
        kv_heads, group, max(16, padded_group), padded_group, head_dim, v_head_dim, block_size, keys, dim, v_dim,
        max(MERGE_ELEMENTS // (padded_group * v_dim), 1), window > 0, softcap > 0, use_pdl,
        num_warps=WARPS, num_stages=HIGH_OCCUPANCY_STAGES if kv_heads * splits * batch >= HIGH_OCCUPANCY_PROGRAMS else STAGES,
        **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _decode_kernel(
    out, partial_out, partial_lse, split_counters, q, k, v, cos, sin, k_cache, v_cache, block_table, seq_lens, sinks,
    q_stride_sequence, q_stride_head, k_stride_sequence, k_stride_head, v_stride_sequence, v_stride_head,
    rotary_stride, table_stride, table_width, splits, window, scale_log2, tanh_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, SPLITS_PER_STEP: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Rows: the GROUP query heads of one kv head, padded to what tl.dot takes. Keys: every `splits`-th tile."""
    kv_head, split_idx, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    table = block_table + sequence * table_stride

    # What no launch of this step wrote, then all else that does not wait for another load.
    length = tl.load(seq_lens + sequence)
    oldest, first = 0, 0
    if WINDOWED:
        oldest = tl.maximum(length - window, 0)
        first = oldest // KEYS * KEYS
    ids = block_ids(table, first + split_idx * KEYS, table_width, BLOCK_SIZE, KEYS)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows
    q += sequence * q_stride_sequence
    k += sequence * k_stride_sequence + kv_head * k_stride_head
    q_tile = load_rows(q, heads * q_stride_head, rows < GROUP, HEAD_DIM, DIM)
    dims, v_dims = tl.arange(0, DIM), tl.arange(0, V_DIM)
    k_inside, v_inside = (dims < HEAD_DIM) & (split_idx == 0), (v_dims < V_HEAD_DIM) & (split_idx == 0)
    k_new = tl.load(k + dims, mask=k_inside, other=0.0)
    v_new = tl.load(v + sequence * v_stride_sequence + kv_head * v_stride_head + v_dims, mask=v_inside, other=0.0)

    if cos is not None:
        is_first, at = dims < HEAD_DIM // 2, sequence * rotary_stride + dims
        partner = tl.where(is_first, dims + HEAD_DIM // 2, dims - HEAD_DIM // 2)
        cosines = tl.load(cos + at, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        sines = tl.load(sin + at, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        sines = tl.where(is_first, -sines, sines)
        inside = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        q_partner = tl.load(q + (heads * q_stride_head)[:, None] + partner[None, :], mask=inside, other=0.0)
        q_tile = _apply_rotary(q_tile, q_partner, cosines[None, :], sines[None, :])
        k_new = _apply_rotary(k_new, tl.load(k + partner, mask=k_inside, other=0.0), cosines, sines)

    cached = length - 1
    tiles = tl.cdiv(tl.maximum(cached - first, 0), KEYS)
    active_splits = tl.maximum(tl.minimum(tiles, splits), 1)
    if split_idx >= active_splits:
        return
    is_new_here = (split_idx == 0) & (length > 0)
    new_block = tl.load(table + cached // BLOCK_SIZE, mask=is_new_here, other=0).to(tl.int64)

    acc = tl.zeros([ROWS, V_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for tile in range(split_idx, tiles, splits):
        start = first + tile * KEYS
        blocks = ids.to(tl.int64)
        ids = block_ids(table, start + splits * KEYS, table_width, BLOCK_SIZE, KEYS)
        keys = start + tl.arange(0, KEYS)
        row_mask = (keys >= oldest) & (keys < cached)
        acc, row_max, row_sum = attend_tile(
            acc, row_max, row_sum, q_tile, key_slots(blocks, keys, kv_head, KV_HEADS, BLOCK_SIZE), row_mask, row_mask[None, :],
            k_cache, v_cache, scale_log2, tanh_scale, HEAD_DIM, V_HEAD_DIM, DIM, V_DIM, SOFTCAP, True,
        )  # fmt: skip

    if is_new_here:
        slot = key_slots(new_block, cached, kv_head, KV_HEADS, BLOCK_SIZE)
        tl.store(k_cache + slot * HEAD_DIM + dims, k_new, mask=k_inside)
        tl.store(v_cache + slot * V_HEAD_DIM + v_dims, v_new, mask=v_inside)
        score = tl.sum(q_tile.to(tl.float32) * k_new.to(tl.float32)[None, :], 1)
        if SOFTCAP:
            score = scaled_tanh(score, tanh_scale)
        new_row_max = tl.maximum(row_max, score * scale_log2)
        weight, rescale = tl.exp2(score * scale_log2 - new_row_max), tl.exp2(row_max - new_row_max)
        acc = acc * rescale[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
        row_max, row_sum = new_row_max, row_sum * rescale + weight

    pair = sequence * KV_HEADS + kv_head
    if partial_out is None:
        acc = acc * output_scale(row_max, row_sum, sinks, heads, rows < GROUP)[:, None]
        store_rows(out, pair * GROUP + rows, acc, rows < GROUP, V_HEAD_DIM, V_DIM)
    else:
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # length 0: top is -inf, and the part weighs nothing
        part_rows = (pair * splits + split_idx) * GROUP + rows
        tl.store(partial_lse + part_rows, row_max + tl.log2(row_sum), mask=rows < GROUP)
        store_rows(partial_out, part_rows, acc / row_sum[:, None], rows < GROUP, V_HEAD_DIM, V_DIM)
        tl.debug_barrier()
        arrived = tl.atomic_add(split_counters + pair, 1, sem="acq_rel")
        if arrived == active_splits - 1:
            tl.store(split_counters + pair, 0)
            _merge_splits(
                out, partial_out, partial_lse, sinks, pair, kv_head, splits, active_splits,
                GROUP, PADDED_GROUP, V_HEAD_DIM, V_DIM, SPLITS_PER_STEP,
            )  # fmt: skip


@ignore_comments
@triton.jit
def _apply_rotary(x, partner, cosines, sines):
    """A rotation by halves of the head: `partner` is the other coordinate of each pair, `sines` have its sign."""
    return (x.to(tl.float32) * cosines + partner.to(tl.float32) * sines).to(x.dtype)


@ignore_comments
@triton.jit
def _merge_splits(
    out, partial_out, partial_lse, sinks, pair, kv_head, splits, active_splits,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, V_HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, SPLITS_PER_STEP: tl.constexpr,
):  # fmt: skip
    """The parts' outputs, weighted by their softmax sums, PARTS parts at a time.

    A cell is four values of one head, and stays with one thread through all parts: nothing is exchanged between
    threads, and a thread works out four values' weight once.
    """
    cells = tl.arange(0, PADDED_GROUP * V_DIM // 4)
    member, dim = cells // (V_DIM // 4), cells % (V_DIM // 4) * 4
    inside = (member < GROUP) & (dim < V_HEAD_DIM)
    dims = dim[:, None] + tl.arange(0, 4)[None, :]
    inside_dims = (member < GROUP)[:, None] & (dims < V_HEAD_DIM)
    acc = tl.zeros([PADDED_GROUP * V_DIM // 4, 4], tl.float32)
    row_max = tl.full([PADDED_GROUP * V_DIM // 4], float("-inf"), tl.float32)
    row_sum = tl.zeros([PADDED_GROUP * V_DIM // 4], tl.float32)
    for start in tl.range(0, active_splits, SPLITS_PER_STEP, num_stages=1):
        split_idx = start + tl.arange(0, SPLITS_PER_STEP)
        rows = (pair * splits + split_idx)[:, None] * GROUP + member[None, :]
        there = (split_idx < active_splits)[:, None] & inside[None, :]
        scores = tl.load(partial_lse + rows, mask=there, other=float("-inf"))
        inside_values = (split_idx < active_splits)[:, None, None] & inside_dims[None, :, :]
        values = tl.load(partial_out + rows[:, :, None] * V_HEAD_DIM + dims[None, :, :], mask=inside_values, other=0.0)
        new_row_max = tl.maximum(row_max, tl.max(scores, 0))
        shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        weights = tl.exp2(scores - shift[None, :])
        rescale = tl.exp2(row_max - shift)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_row_max
    acc *= output_scale(row_max, row_sum, sinks, kv_head * GROUP + member, inside)[:, None]
    rows = (pair * GROUP + member)[:, None] * V_HEAD_DIM
    tl.store(out + rows + dims, acc.to(out.dtype.element_ty), mask=inside_dims)
