"""Triton kernels over the paged KV cache: write a prompt's keys, and prefill; what `decode.py` shares is here too.

The public functions mean exactly what `reference.py` says, and are tested against it. The one idea: decode and
prefill are the same loop. A program holds some rows of queries and walks tiles of keys; the block table says where a
tile lies; the softmax is kept running in base 2 (`exp2` is one instruction), as the largest score, the sum of the
weights and the weighted values. `attend_tile` is that step. Around it the two differ in what fills the rows: prefill
has many queries, so the rows are the queries of one head (decode's are the heads of a group). Tiles of keys that
every row sees run without masks; the diagonal and the window's edge run with them.

Everything that shapes a launch is static and nothing reads a length on the host, so the calls are legal inside CUDA
graph capture and replay with any lengths. Window, softcap and scale are run-time numbers: no bucket and no layer of a
model brings its own program.

What it does not do: quantised caches, attention biases, non-causal attention, TMA. Rejected: autotuning at start
(cold-start seconds for a choice that the head size decides; the choices are the constants below), a grid of
(tiles x sequences) for prefill (most of its programs only exit; `_sequence_of_tile` needs tiles + sequences), tiles
of 128 queries at heads of 128 (16.2 for 14.2 us at 512 tokens, 33.2 for 31.5 at 1024, 104 for 100 at 2048).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcdeploy.torch_compat.triton_source import ignore_comments


class TileConfig(NamedTuple):
    """The shape of one program of a kernel: rows of queries, keys per step, warps, software-pipeline stages."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# What to tune on a GPU, all of it. Block ids are loaded a tile ahead: else a stage more would hold no more keys.
PREFILL_TILES = {
    64: TileConfig(128, 64, 4, 2),
    128: TileConfig(64, 64, 4, 3),
    256: TileConfig(128, 64, 8, 2),
}  # by padded head_dim
PREFILL_TILES_FLOAT32 = TileConfig(16, 16, 4, 2)  # no tensor cores: float32 is for exactness, not for speed
WRITE_ELEMENTS, WRITE_WARPS = 4096, 4  # of one token, per program

NO_WINDOW = 2**30  # a window no sequence outgrows, so the kernels need no case for "none"; positions less it fit int32
LOG2_E = 1.4426950408889634


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value in its slot, both in one launch.

    Shapes: k [tokens, kv_heads, head_dim], v [tokens, kv_heads, v_head_dim], the caches [blocks, block_size, kv_heads,
    dim], slot_mapping [tokens] int64 (slot = block * block_size + offset). k and v may be strided but for the last
    dimension. Several padding tokens may name one slot: what stays there is undefined.
    """
    tokens, kv_heads, head_dim = k.shape
    v_head_dim = v.shape[-1]
    assert k.stride(-1) == 1 and v.stride(-1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    dim = padded_head_dim(max(head_dim, v_head_dim))
    heads_tile = min(triton.next_power_of_2(kv_heads), max(WRITE_ELEMENTS // dim, 1))
    _write_kernel[(tokens, triton.cdiv(kv_heads, heads_tile))](
        k, v, k_cache, v_cache, slot_mapping,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv_heads, head_dim, v_head_dim, heads_tile, dim,
        num_warps=WRITE_WARPS,
    )  # fmt: skip


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Packed queries over their pages; see `reference.paged_prefill`. `block_size` is a power of two >= 16."""
    (tokens, heads, head_dim), (_, block_size, kv_heads, v_head_dim) = q.shape, v_cache.shape
    assert q.stride(-1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    sequences, dim, v_dim = block_table.shape[0], padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    tiles = PREFILL_TILES_FLOAT32 if q.dtype == torch.float32 else PREFILL_TILES[max(dim, v_dim, 64)]
    out = q.new_empty(tokens, heads, v_head_dim)
    # Each sequence, and the padding behind the last, may end in a tile that is not full.
    _prefill_kernel[(heads, tokens // tiles.queries + sequences + 1)](
        out, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, sinks,
        q.stride(0), q.stride(1), block_table.stride(0), tokens, sequences, window or NO_WINDOW,
        *log2_score_scales(scale, softcap),
        heads, kv_heads, tiles.queries, head_dim, v_head_dim, block_size, tiles.keys, dim, v_dim, softcap > 0,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def padded_head_dim(dim: int) -> int:
    """A head's size as `tl.dot` takes it: a power of two from 16."""
    return max(16, triton.next_power_of_2(dim))


def log2_score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """(unit, inner): a score in base 2 is `scale_log2 * dot`, or with a softcap `scale_log2 * tanh(tanh_scale * dot)`."""
    return (softcap * LOG2_E, scale / softcap) if softcap else (scale * LOG2_E, 0.0)


# The kernels. Arguments that vary between calls are not specialised: else a batch of one, or a view that begins at an
# odd element, would compile them again. `rows` are queries; `x[None, :]` runs over keys or a head's size.
DO_NOT_SPECIALIZE = ["slot_mapping", "block_table", "cu_seqlens_q", "seq_lens", "sinks", "split_counters"]
DO_NOT_SPECIALIZE += ["table_stride", "table_width", "splits", "tokens", "sequences", "window"]


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _write_kernel(
    k, v, k_cache, v_cache, slot_mapping,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE))[:, None]
    dims = tl.arange(0, DIM)[None, :]
    first = tl.load(slot_mapping + token) * KV_HEADS  # of the slot's heads; int64, a cache can be larger than 2**31
    k_inside, v_inside = (heads < KV_HEADS) & (dims < HEAD_DIM), (heads < KV_HEADS) & (dims < V_HEAD_DIM)
    k_token = tl.load(k + token * k_stride_token + heads * k_stride_head + dims, mask=k_inside)
    v_token = tl.load(v + token * v_stride_token + heads * v_stride_head + dims, mask=v_inside)
    tl.store(k_cache + (first + heads) * HEAD_DIM + dims, k_token, mask=k_inside)
    tl.store(v_cache + (first + heads) * V_HEAD_DIM + dims, v_token, mask=v_inside)


@ignore_comments
@triton.jit
def load_rows(start, offsets, row_mask, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """[rows, DIM], with zeros in rows that are not wanted (what lies there may be NaN) and past the head's size."""
    dims = tl.arange(0, DIM)
    inside = row_mask[:, None] if HEAD_DIM == DIM else row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(start + offsets[:, None] + dims[None, :], mask=inside, other=0.0)


@ignore_comments
@triton.jit
def store_rows(start, rows, values, row_mask, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    dims = tl.arange(0, DIM)
    inside = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(start + rows[:, None] * HEAD_DIM + dims[None, :], values.to(start.dtype.element_ty), mask=inside)


@ignore_comments
@triton.jit
def block_ids(table, start, width, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """The blocks of the KEYS keys from `start`: one number if they lie in one block, else [KEYS]; 0 past the table."""
    if BLOCK_SIZE >= KEYS:  # tiles are aligned
        return tl.load(table + start // BLOCK_SIZE, mask=start // BLOCK_SIZE < width, other=0)
    else:  # noqa: RET505 - Triton wants one return per branch
        entries = (start + tl.arange(0, KEYS)) // BLOCK_SIZE
        return tl.load(table + entries, mask=entries < width, other=0)


@ignore_comments
@triton.jit
def key_slots(blocks, keys, kv_head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where these keys lie, counted in heads: [blocks, block_size, kv_heads] flattened; int64 as the blocks are."""
    return (blocks * BLOCK_SIZE + keys % BLOCK_SIZE) * KV_HEADS + kv_head


@ignore_comments
@triton.jit
def scaled_tanh(scores, tanh_scale):
    """tanh(inner * scores); the number is 2 * log2(e)."""
    return 1.0 - 2.0 / (tl.exp2(scores * (tanh_scale * 2.8853900817779268)) + 1.0)


@ignore_comments
@triton.jit
def attend_tile(
    acc, row_max, row_sum,  # of each row so far: [rows, V_DIM] weighted values, [rows] largest score, [rows] sum of weights
    q, slots, row_mask, score_mask,  # [KEYS] where the keys lie and whether to read them; [1 or rows, KEYS] who sees them
    k_cache, v_cache, scale_log2, tanh_scale,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the KEYS keys and values in `slots`."""
    k = load_rows(k_cache, slots * HEAD_DIM, row_mask, HEAD_DIM, DIM)
    scores = tl.dot(
        q, tl.trans(k), input_precision="ieee"
    )  # in units of `scale_log2`: the multiply joins exp2's subtract
    if SOFTCAP:
        scores = scaled_tanh(scores, tanh_scale)
    if MASKED:
        scores = tl.where(score_mask, scores, float("-inf"))

    new_row_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shift = new_row_max
    if MASKED:  # a row that has seen no key yet: -inf less -inf would be NaN
        shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    v = load_rows(v_cache, slots * V_HEAD_DIM, row_mask, V_HEAD_DIM, V_DIM)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_row_max, row_sum * rescale + tl.sum(weights, 1)


@ignore_comments
@triton.jit
def output_scale(row_max, row_sum, sinks, heads, inside):
    """What the weighted values are multiplied with in the end. A sink joins here, once; a row without keys gives 0."""
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        shift = tl.maximum(shift, sink)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.exp2(sink - shift)
    return tl.exp2(row_max - shift) / tl.where(row_sum == 0.0, 1.0, row_sum)


@ignore_comments
@triton.jit
def _sequence_of_tile(cu_seqlens_q, tile, sequences, QUERIES: tl.constexpr):
    """Sequence s owns the tiles from cu[s] // QUERIES + s: enough for its queries, wherever they begin."""
    found = -1
    for start in range(0, sequences + 1, 64):
        rows = start + tl.arange(0, 64)
        first_tile = tl.load(cu_seqlens_q + rows, mask=rows <= sequences, other=0) // QUERIES + rows
        found += tl.sum(((first_tile <= tile) & (rows <= sequences)).to(tl.int32), 0)
    return found


@ignore_comments
@triton.jit
def _attend_causal_tile(
    acc, row_max, row_sum, q, positions, start, oldest, end, window,  # the row at position p sees the keys in (p - window, p]
    k_cache, v_cache, blocks, kv_head, scale_log2, tanh_scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`attend_tile` for the KEYS keys from `start`, of which those in [oldest, end) may be read."""
    keys = start + tl.arange(0, KEYS)
    row_mask = (keys >= oldest) & (keys < end) if MASKED else tl.full([KEYS], 1, tl.int1)
    distance = positions[:, None] - keys[None, :]
    score_mask = (distance >= 0) & (distance < window) & row_mask[None, :]
    return attend_tile(
        acc, row_max, row_sum, q, key_slots(blocks, keys, kv_head, KV_HEADS, BLOCK_SIZE), row_mask, score_mask,
        k_cache, v_cache, scale_log2, tanh_scale, HEAD_DIM, V_HEAD_DIM, DIM, V_DIM, SOFTCAP, MASKED,
    )  # fmt: skip


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _prefill_kernel(
    out, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, sinks,
    q_stride_token, q_stride_head, table_stride, tokens, sequences, window, scale_log2, tanh_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Rows: QUERIES queries of one head of one sequence, last tiles first, for those have the most keys.

    The padding behind the last sequence counts as one more sequence, of length 0: it sees no key and is zeros.
    """
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = _sequence_of_tile(cu_seqlens_q, tile, sequences, QUERIES)
    q_start = tl.load(cu_seqlens_q + sequence)
    q_end = tl.load(cu_seqlens_q + sequence + 1, mask=sequence < sequences, other=tokens)
    first_row = q_start + (tile - sequence - q_start // QUERIES) * QUERIES
    if first_row >= q_end:
        return
    length = tl.load(seq_lens + sequence, mask=sequence < sequences, other=0)
    first_position = length - q_end + first_row
    last_position = tl.minimum(first_position + QUERIES, length) - 1

    rows = first_row + tl.arange(0, QUERIES)
    offsets = rows.to(tl.int64) * q_stride_token
    q = load_rows(q + head.to(tl.int64) * q_stride_head, offsets, rows < q_end, HEAD_DIM, DIM)
    positions = first_position + tl.arange(0, QUERIES)
    acc = tl.zeros([QUERIES, V_DIM], tl.float32)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    table = block_table + sequence.to(tl.int64) * table_stride
    kv_head = head // (HEADS // KV_HEADS)

    # Keys, in whole tiles: [left, inner_left) crosses the window's edge, [inner_left, inner_right) is seen by every
    # row, [inner_right, last_position] crosses the diagonal. The softmax does not mind the order.
    oldest = tl.maximum(first_position - window + 1, 0)
    left = oldest // KEYS * KEYS
    inner_right = tl.maximum((first_position + 1) // KEYS * KEYS, left)
    inner_left = tl.minimum(tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS, inner_right)
    table_width = tl.cdiv(length, BLOCK_SIZE)
    ids = block_ids(table, inner_left, table_width, BLOCK_SIZE, KEYS)
    for start in range(inner_left, inner_right, KEYS):
        blocks = ids.to(tl.int64)
        ids = block_ids(table, start + KEYS, table_width, BLOCK_SIZE, KEYS)  # a tile ahead: loads that wait for no load
        acc, row_max, row_sum = _attend_causal_tile(
            acc, row_max, row_sum, q, positions, start, oldest, length, window,
            k_cache, v_cache, blocks, kv_head, scale_log2, tanh_scale,
            KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_SIZE, KEYS, DIM, V_DIM, SOFTCAP, False,
        )  # fmt: skip
    left_tiles = (inner_left - left) // KEYS
    for i in range(left_tiles + tl.cdiv(last_position + 1 - inner_right, KEYS)):
        start = tl.where(i < left_tiles, left + i * KEYS, inner_right + (i - left_tiles) * KEYS)
        blocks = block_ids(table, start, table_width, BLOCK_SIZE, KEYS).to(tl.int64)
        acc, row_max, row_sum = _attend_causal_tile(
            acc, row_max, row_sum, q, positions, start, oldest, length, window,
            k_cache, v_cache, blocks, kv_head, scale_log2, tanh_scale,
            KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_SIZE, KEYS, DIM, V_DIM, SOFTCAP, True,
        )  # fmt: skip
    acc = acc * output_scale(row_max, row_sum, sinks, head, True)[:, None]
    store_rows(out, rows.to(tl.int64) * HEADS + head, acc, rows < q_end, V_HEAD_DIM, V_DIM)
