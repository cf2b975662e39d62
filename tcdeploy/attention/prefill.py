"""Triton prefill attention: packed queries of several sequences over the paged KV cache.

A program holds a tile of queries of one head and walks the keys in tiles (online_softmax.py). Tiles that every row sees
in full run without masks; only those that cross the diagonal or the window's edge run with them. The result is that of
`reference.paged_prefill`, against which the kernel is tested.

Launch shapes are static and the host reads no lengths, so calls can be captured in a CUDA graph and replayed with any
lengths.

Rejected: autotuning at start-up, because the head size alone decides the tile and timing costs seconds of cold start;
a grid of (tiles x sequences), most of whose programs would only exit (`_sequence_of_tile` needs tiles + sequences);
tiles of 128 queries at head size 128 (104 us instead of 100 at 2,048 tokens on an H100; docs/performance.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcdeploy.attention.online_softmax import (
    DO_NOT_SPECIALIZE,
    NO_WINDOW,
    attend_tile,
    block_ids,
    key_slots,
    load_rows,
    log2_score_scales,
    output_scale,
    padded_head_dim,
    store_rows,
)
from tcdeploy.torch_compat.triton_source import ignore_comments


class TileConfig(NamedTuple):
    """The shape of one program: query rows, keys per loop step, warps, software-pipeline stages."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# Tuning constants, by padded head size. Block ids are loaded one tile ahead; otherwise an additional stage would not
# prefetch any more keys.
PREFILL_TILES = {
    64: TileConfig(128, 64, 4, 2),
    128: TileConfig(64, 64, 4, 3),
    256: TileConfig(128, 64, 8, 2),
    512: TileConfig(64, 32, 8, 2),
}
PREFILL_TILES_FLOAT32 = TileConfig(16, 16, 4, 2)  # no tensor cores: float32 is for exactness, not for speed


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """As `reference.paged_prefill`.

    The block size is a power of two, at least 16. q may have any strides except in the last dimension.
    """
    (tokens, heads, head_dim), (_, block_size, kv_heads, v_head_dim) = q.shape, v_cache.shape
    assert q.stride(-1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    sequences, dim, v_dim = block_table.shape[0], padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    tile = PREFILL_TILES_FLOAT32 if q.dtype == torch.float32 else PREFILL_TILES[max(dim, v_dim, 64)]
    out = q.new_empty(tokens, heads, v_head_dim)
    # The last tile of each sequence may be partial, and so may that of the padding after the last sequence.
    _prefill_kernel[(heads, tokens // tile.queries + sequences + 1)](
        out, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, sinks,
        q.stride(0), q.stride(1), block_table.stride(0), tokens, sequences, window or NO_WINDOW,
        *log2_score_scales(scale, softcap),
        heads, kv_heads, tile.queries, head_dim, v_head_dim, block_size, tile.keys, dim, v_dim, softcap > 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


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
    out, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, sinks,
    q_stride_token, q_stride_head, table_stride, tokens, sequences, window, scale_log2, tanh_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One program computes QUERIES queries of one head of one sequence.

    The last tiles run first because they have the most keys. Padding rows after the last sequence form an additional
    sequence of length 0, so they see no key and their output is zero.
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

    # Keys in whole tiles: [left, inner_left) crosses the window's edge, [inner_left, inner_right) is visible to every
    # row, [inner_right, last_position] crosses the diagonal. The online softmax does not depend on their order.
    oldest = tl.maximum(first_position - window + 1, 0)
    left = oldest // KEYS * KEYS
    inner_right = tl.maximum((first_position + 1) // KEYS * KEYS, left)
    inner_left = tl.minimum(tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS, inner_right)
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
