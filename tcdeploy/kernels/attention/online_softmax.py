"""Triton building blocks shared by the prefill and decode kernels: paged loads and one step of the online softmax.

A program holds rows of queries (of one head in prefill, the query heads of one kv head in decode) and walks tiles of
keys; the block table maps a tile to its cache blocks. The softmax is accumulated in base 2 (`exp2` is one instruction)
as three values per row: the largest score, the sum of the weights, and the weighted sum of V.

Scale, window and softcap are run-time arguments, so neither a bucket nor a layer of a model compiles its own kernel.
Not supported: attention biases, non-causal attention, TMA.

A cache in FP8 (e4m3) holds K / k_scale and V / v_scale. Its values are exact in 16 bits, so a tile is converted to the
queries' dtype as it is. k_scale is part of the factor of the scores (`fold_k_scale`), and v_scale multiplies the
accumulated output once (`scale_values`). Without `kv_scales`, both functions compile to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.torch_compat.triton.source import ignore_comments

# Arguments that vary between calls. Specialising on them would recompile a kernel for a batch of one, or for a view
# that starts at an unaligned address.
DO_NOT_SPECIALIZE = ["slot_mapping", "block_table", "cu_seqlens_q", "seq_lens", "row_seq_lens", "sinks"]
DO_NOT_SPECIALIZE += ["split_counters", "table_stride", "table_width", "splits", "tokens", "sequences", "window"]
DO_NOT_SPECIALIZE += ["concurrent_programs", "kv_scales"]


@ignore_comments
@triton.jit
def load_rows(start, offsets, row_mask, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Load [rows, DIM]; masked rows (whose memory may hold NaN) and columns past HEAD_DIM are zero."""
    dims = tl.arange(0, DIM)
    mask = row_mask[:, None] if HEAD_DIM == DIM else row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(start + offsets[:, None] + dims[None, :], mask=mask, other=0.0)


@ignore_comments
@triton.jit
def store_rows(start, rows, values, row_mask, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Store values [rows, DIM] as the given rows of a contiguous [*, HEAD_DIM] tensor."""
    dims = tl.arange(0, DIM)
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(start + rows[:, None] * HEAD_DIM + dims[None, :], values.to(start.dtype.element_ty), mask=mask)


@ignore_comments
@triton.jit
def block_ids(table, start, width, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Block ids of the KEYS keys from `start`: a scalar if one block holds them all, else [KEYS]; 0 past the table."""
    if BLOCK_SIZE >= KEYS:  # tiles are aligned
        return tl.load(table + start // BLOCK_SIZE, mask=start // BLOCK_SIZE < width, other=0)
    else:  # noqa: RET505 - Triton requires one return per branch
        entries = (start + tl.arange(0, KEYS)) // BLOCK_SIZE
        return tl.load(table + entries, mask=entries < width, other=0)


@ignore_comments
@triton.jit
def key_slots(blocks, keys, kv_head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Index of each key in the flattened [blocks, block_size, kv_heads]; int64, like `blocks`."""
    return (blocks * BLOCK_SIZE + keys % BLOCK_SIZE) * KV_HEADS + kv_head


@ignore_comments
@triton.jit
def scaled_tanh(scores, tanh_scale):
    """tanh(tanh_scale * scores); the constant is 2 * log2(e)."""
    return 1.0 - 2.0 / (tl.exp2(scores * (tanh_scale * 2.8853900817779268)) + 1.0)


@ignore_comments
@triton.jit
def fold_k_scale(scale_log2, tanh_scale, kv_scales, SOFTCAP: tl.constexpr):
    """(scale_log2, tanh_scale) for scores with keys that are stored as K / k_scale; kv_scales [2] is k_scale, v_scale.

    A softcap bounds the scores after they are scaled, so its factor stays as it is.
    """
    if kv_scales is not None:
        if SOFTCAP:
            tanh_scale *= tl.load(kv_scales)
        else:
            scale_log2 *= tl.load(kv_scales)
    return scale_log2, tanh_scale


@ignore_comments
@triton.jit
def scale_values(acc, kv_scales):
    """The weighted sum of V from that of V / v_scale; kv_scales as in `fold_k_scale`."""
    if kv_scales is not None:
        acc *= tl.load(kv_scales + 1)
    return acc


@ignore_comments
@triton.jit
def to_stored(x, scale, cache):
    """x / scale, in the FP8 dtype of `cache`. Values beyond its largest saturate, and NaN stays NaN."""
    scaled = tl.div_rn(x.to(tl.float32), scale)
    return tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(cache.dtype.element_ty)


@ignore_comments
@triton.jit
def attend_tile(
    acc, row_max, row_sum,  # running state: [rows, V_DIM] weighted V, [rows] largest score, [rows] sum of weights
    q, slots, key_mask, score_mask,  # [rows, DIM], [KEYS], [KEYS] keys to load, [1 or rows, KEYS] keys that a row sees
    k_cache, v_cache, scale_log2, tanh_scale,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the KEYS keys and values in `slots`; returns the new running state."""
    k = load_rows(k_cache, slots * HEAD_DIM, key_mask, HEAD_DIM, DIM).to(q.dtype)
    # Not scaled yet: the multiplication by scale_log2 fuses with the subtraction before exp2.
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [rows, KEYS]
    if SOFTCAP:
        scores = scaled_tanh(scores, tanh_scale)
    if MASKED:
        scores = tl.where(score_mask, scores, float("-inf"))

    new_row_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shift = new_row_max
    if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
        shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    v = load_rows(v_cache, slots * V_HEAD_DIM, key_mask, V_HEAD_DIM, V_DIM).to(q.dtype)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_row_max, row_sum * rescale + tl.sum(weights, 1)


@ignore_comments
@triton.jit
def output_scale(row_max, row_sum, sinks, heads, head_mask):
    """The factor from `acc` to the output. Attention sinks join the denominator here. Rows without keys give 0."""
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=head_mask, other=0.0).to(tl.float32) * 1.4426950408889634
        shift = tl.maximum(shift, sink)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.exp2(sink - shift)
    return tl.exp2(row_max - shift) / tl.where(row_sum == 0.0, 1.0, row_sum)
