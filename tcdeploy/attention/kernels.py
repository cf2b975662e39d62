"""Triton kernels over the paged KV cache: write the new keys, decode one token, prefill many.

The three public functions mean exactly what `reference.py` says, and are tested against it. The one idea: decode and
prefill are the same loop. A program holds some rows of queries and walks tiles of keys; the block table says where a
tile lies; the softmax is kept running in base 2 (`exp2` is one instruction), as the largest score, the sum of the
weights and the weighted values. `_attend_tile` is that step. Around it the two differ only in what fills the rows:

- decode has one query per sequence, so the rows are the query heads that share a kv head, and to fill the GPU the
  keys of a sequence are split among programs; a second kernel merges the parts.
- prefill has many queries, so the rows are the queries of one head. Tiles of keys that every row sees run without
  masks; the diagonal and the window's edge run with them.

Everything that shapes a launch is static (shapes, and the GPU's size) and nothing reads a length on the host, so the
calls are legal inside CUDA graph capture and replay with any lengths. Window, softcap and scale are run-time numbers: a
model compiles at most five programs (write, decode whole and in parts, merge, prefill), and no bucket brings its own.

What it does not do: quantised caches, attention biases, non-causal attention, TMA. Rejected: autotuning at start
(cold-start seconds for a choice that the head size decides; the choices are the constants below), a grid of
(tiles x sequences) for prefill (most of its programs only exit; `_sequence_of_tile` needs tiles + sequences).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tiles(NamedTuple):
    """The shape of one program of a kernel: rows of queries, keys per step, warps, software-pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# What to tune on a GPU, all of it. The stages count one load more than usual: the block ids come before the keys.
PREFILL_TILES = {64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 4), 256: Tiles(128, 64, 8, 3)}  # by padded head_dim
PREFILL_TILES_FLOAT32 = Tiles(16, 16, 4, 2)  # no tensor cores: float32 is for exactness, not for speed
DECODE_TILE_BYTES = 16 * 1024  # of keys, per step; as many of values, and `stages` of them in flight
DECODE_WARPS, DECODE_STAGES = 4, 5
PROGRAMS_PER_MULTIPROCESSOR = 1  # that decode's splitting aims at
MIN_KEYS_PER_SPLIT = 64
MERGE_WARPS = 4
WRITE_ELEMENTS, WRITE_WARPS = 4096, 4  # of one token, per program

NO_WINDOW = 2**30  # a window no sequence outgrows, so the kernels need no case for "none"; positions less it fit int32
LOG2_E = 1.4426950408889634


def decode_splits(batch: int, kv_heads: int, max_context: int, multiprocessors: int) -> int:
    """In how many parts decode cuts every sequence: a power of two that gives the GPU about one full wave of programs.

    Reading the cache is all the work there is, so each multiprocessor should read some of it: one sequence of 8 kv
    heads on 132 multiprocessors is cut in 16, 16 sequences are not cut. Only static facts enter (`max_context` is the
    block table's width in tokens, or the window), so a CUDA graph replays with other lengths and the same answer.
    """
    programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // max(batch * kv_heads, 1)
    parts = min(programs, max_context // MIN_KEYS_PER_SPLIT)
    return 1 << (max(parts, 1).bit_length() - 1)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value in its slot, both in one launch.

    Shapes: k [tokens, kv_heads, head_dim], v [tokens, kv_heads, v_head_dim], the caches [blocks, block_size, kv_heads,
    dim], slot_mapping [tokens] int64 (slot = block * block_size + offset). k and v may be strided but for the last
    dimension. Several padding tokens may name one slot: what stays there is undefined.
    """
    tokens, kv_heads, head_dim = k.shape
    v_head_dim = v.shape[-1]
    assert k.stride(-1) == 1 and v.stride(-1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    dim = _padded(max(head_dim, v_head_dim))
    heads_tile = min(triton.next_power_of_2(kv_heads), max(WRITE_ELEMENTS // dim, 1))
    _write_kernel[(tokens, triton.cdiv(kv_heads, heads_tile))](
        k, v, k_cache, v_cache, slot_mapping,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv_heads, head_dim, v_head_dim, heads_tile, dim,
        num_warps=WRITE_WARPS,
    )  # fmt: skip


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """One query per sequence over its pages; see `reference.paged_decode`. `block_size` is a power of two >= 16."""
    (batch, heads, head_dim), (_, block_size, kv_heads, v_head_dim) = q.shape, v_cache.shape
    assert q.stride(-1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    group, dim, v_dim = heads // kv_heads, _padded(head_dim), _padded(v_head_dim)
    keys = min(max(DECODE_TILE_BYTES // (max(dim, v_dim) * q.element_size()), 16), 128)
    longest = min(block_table.shape[1] * block_size, window or NO_WINDOW)
    splits = decode_splits(batch, kv_heads, longest, _multiprocessors(q.device))
    out = q.new_empty(batch, heads, v_head_dim)
    parts, weights = out, None  # the parts' outputs and log2 of their softmax sums
    if splits > 1:
        parts = q.new_empty(batch, heads, splits, v_head_dim, dtype=torch.float32)
        weights = q.new_empty(batch, heads, splits, dtype=torch.float32)
    _decode_kernel[(kv_heads, splits, batch)](
        parts, weights, q, k_cache, v_cache, block_table, seq_lens, sinks,
        q.stride(0), q.stride(1), block_table.stride(0), splits, window or NO_WINDOW, *_score_units(scale, softcap),
        kv_heads, group, max(16, triton.next_power_of_2(group)),
        head_dim, v_head_dim, block_size, keys, dim, v_dim, softcap > 0,
        num_warps=DECODE_WARPS, num_stages=DECODE_STAGES,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(heads, batch)](out, parts, weights, sinks, splits, v_head_dim, v_dim, num_warps=MERGE_WARPS)
    return out


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Packed queries over their pages; see `reference.paged_prefill`. `block_size` is a power of two >= 16."""
    (tokens, heads, head_dim), (_, block_size, kv_heads, v_head_dim) = q.shape, v_cache.shape
    assert q.stride(-1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    sequences, dim, v_dim = block_table.shape[0], _padded(head_dim), _padded(v_head_dim)
    tiles = PREFILL_TILES_FLOAT32 if q.dtype == torch.float32 else PREFILL_TILES[max(dim, v_dim, 64)]
    out = q.new_empty(tokens, heads, v_head_dim)
    # Each sequence, and the padding behind the last, may end in a tile that is not full.
    _prefill_kernel[(heads, tokens // tiles.queries + sequences + 1)](
        out, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, sinks,
        q.stride(0), q.stride(1), block_table.stride(0), tokens, sequences, window or NO_WINDOW,
        *_score_units(scale, softcap),
        heads, kv_heads, tiles.queries, head_dim, v_head_dim, block_size, tiles.keys, dim, v_dim, softcap > 0,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _padded(dim: int) -> int:
    """A head's size as `tl.dot` takes it: a power of two from 16."""
    return max(16, triton.next_power_of_2(dim))


def _score_units(scale: float, softcap: float) -> tuple[float, float]:
    """(unit, inner): a score in base 2 is `unit * dot`, or with a softcap `unit * tanh(inner * dot)`."""
    return (softcap * LOG2_E, scale / softcap) if softcap else (scale * LOG2_E, 0.0)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the GPU has; on a CPU (Triton's interpreter, in tests) one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# The kernels. Arguments that vary between calls are not specialised: else a batch of one, or a view that begins at an
# odd element, would compile them again. `rows` are queries; `x[None, :]` runs over keys or a head's size.
VARYING = ["slot_mapping", "block_table", "cu_seqlens_q", "seq_lens", "sinks"]
VARYING += ["table_stride", "splits", "tokens", "sequences", "window"]


@triton.jit(do_not_specialize=VARYING)
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


@triton.jit
def _load_rows(start, offsets, wanted, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """[rows, DIM], with zeros in rows that are not wanted (what lies there may be NaN) and past the head's size."""
    dims = tl.arange(0, DIM)
    inside = wanted[:, None] if HEAD_DIM == DIM else wanted[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(start + offsets[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(start, rows, values, wanted, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    dims = tl.arange(0, DIM)
    inside = wanted[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(start + rows[:, None] * HEAD_DIM + dims[None, :], values.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _attend_tile(
    acc, top, total,  # of each row so far: [rows, V_DIM] weighted values, [rows] largest score, [rows] sum of weights
    q, positions, start, oldest, end, window,  # the row at position p sees the keys in (p - window, p]
    k_cache, v_cache, table, kv_head, unit, inner,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the KEYS keys from `start`, of which those in [oldest, end) may be read."""
    keys = start + tl.arange(0, KEYS)
    wanted = (keys >= oldest) & (keys < end) if MASKED else tl.full([KEYS], 1, tl.int1)
    if BLOCK_SIZE >= KEYS:  # tiles are aligned, so this one lies in one block
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(table + keys // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)
    slots = (block * BLOCK_SIZE + keys % BLOCK_SIZE) * KV_HEADS + kv_head

    k = _load_rows(k_cache, slots * HEAD_DIM, wanted, HEAD_DIM, DIM)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # in units of `unit`: the multiply joins exp2's subtract
    if SOFTCAP:
        scores = 1.0 - 2.0 / (tl.exp2(scores * (inner * 2.8853900817779268)) + 1.0)  # tanh; the number is 2 * log2(e)
    if MASKED:
        distance = positions[:, None] - keys[None, :]
        scores = tl.where((distance >= 0) & (distance < window) & wanted[None, :], scores, float("-inf"))

    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    shift = new_top
    if MASKED:  # a row that has seen no key yet: -inf less -inf would be NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * unit - shift[:, None])
    keep = tl.exp2(top - shift)
    v = _load_rows(v_cache, slots * V_HEAD_DIM, wanted, V_HEAD_DIM, V_DIM)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, new_top, total * keep + tl.sum(weights, 1)


@triton.jit
def _output_factor(top, total, sinks, heads, inside):
    """What the weighted values are multiplied with in the end. A sink joins here, once; a row without keys gives 0."""
    shift = tl.where(top == float("-inf"), 0.0, top)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        shift = tl.maximum(shift, sink)
        total = total * tl.exp2(top - shift) + tl.exp2(sink - shift)
    return tl.exp2(top - shift) / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=VARYING)
def _decode_kernel(
    parts, part_weights, q, k_cache, v_cache, block_table, seq_lens, sinks,
    q_stride_sequence, q_stride_head, table_stride, splits, window, unit, inner,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Rows: the GROUP query heads of one kv head, padded to what tl.dot takes. Keys: one part of a sequence's."""
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + sequence)
    oldest = tl.maximum(length - window, 0)
    first = oldest // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(length - first, KEYS), splits) * KEYS
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows
    q = _load_rows(q + sequence * q_stride_sequence, heads * q_stride_head, rows < GROUP, HEAD_DIM, DIM)
    positions = tl.zeros([ROWS], tl.int32) + length - 1
    acc = tl.zeros([ROWS, V_DIM], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    table = block_table + sequence * table_stride
    for start in range(begin, end, KEYS):
        acc, top, total = _attend_tile(
            acc, top, total, q, positions, start, oldest, end, window,
            k_cache, v_cache, table, kv_head, unit, inner,
            KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_SIZE, KEYS, DIM, V_DIM, SOFTCAP, True,
        )  # fmt: skip

    out_rows = (sequence * KV_HEADS * GROUP + heads) * splits + split
    if part_weights is None:
        acc = acc * _output_factor(top, total, sinks, heads, rows < GROUP)[:, None]
    else:
        total = tl.where(total == 0.0, 1.0, total)  # an empty part keeps top = -inf, and weighs nothing
        acc = acc / total[:, None]
        tl.store(part_weights + out_rows, top + tl.log2(total), mask=rows < GROUP)
    _store_rows(parts, out_rows, acc, rows < GROUP, V_HEAD_DIM, V_DIM)


@triton.jit(do_not_specialize=VARYING)
def _merge_kernel(out, parts, part_weights, sinks, splits, V_HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr):
    """One head of one sequence: the parts' outputs, weighted by their softmax sums, 16 parts at a time."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    dims = tl.arange(0, V_DIM)
    acc = tl.zeros([V_DIM], tl.float32)
    top, total = float("-inf"), 0.0
    for start in range(0, splits, 16):
        part = start + tl.arange(0, 16)
        scores = tl.load(part_weights + row * splits + part, mask=part < splits, other=float("-inf"))
        values = _load_rows(parts + row * splits * V_HEAD_DIM, part * V_HEAD_DIM, part < splits, V_HEAD_DIM, V_DIM)
        new_top = tl.maximum(top, tl.max(scores, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift)
        keep = tl.exp2(top - shift)
        acc = acc * keep + tl.sum(values * weights[:, None], 0)
        total = total * keep + tl.sum(weights, 0)
        top = new_top
    acc *= _output_factor(top, total, sinks, head, True)
    tl.store(out + row * V_HEAD_DIM + dims, acc.to(out.dtype.element_ty), mask=dims < V_HEAD_DIM)


@triton.jit
def _sequence_of_tile(cu_seqlens_q, tile, sequences, QUERIES: tl.constexpr):
    """Sequence s owns the tiles from cu[s] // QUERIES + s: enough for its queries, wherever they begin."""
    found = -1
    for start in range(0, sequences + 1, 64):
        rows = start + tl.arange(0, 64)
        first_tile = tl.load(cu_seqlens_q + rows, mask=rows <= sequences, other=0) // QUERIES + rows
        found += tl.sum(((first_tile <= tile) & (rows <= sequences)).to(tl.int32), 0)
    return found


@triton.jit(do_not_specialize=VARYING)
def _prefill_kernel(
    out, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, sinks,
    q_stride_token, q_stride_head, table_stride, tokens, sequences, window, unit, inner,
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
    q = _load_rows(q + head.to(tl.int64) * q_stride_head, offsets, rows < q_end, HEAD_DIM, DIM)
    positions = first_position + tl.arange(0, QUERIES)
    acc = tl.zeros([QUERIES, V_DIM], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    table = block_table + sequence.to(tl.int64) * table_stride
    kv_head = head // (HEADS // KV_HEADS)

    # Keys, in whole tiles: [left, inner_left) crosses the window's edge, [inner_left, inner_right) is seen by every
    # row, [inner_right, last_position] crosses the diagonal. The softmax does not mind the order.
    oldest = tl.maximum(first_position - window + 1, 0)
    left = oldest // KEYS * KEYS
    inner_right = tl.maximum((first_position + 1) // KEYS * KEYS, left)
    inner_left = tl.minimum(tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS, inner_right)
    for start in range(inner_left, inner_right, KEYS):
        acc, top, total = _attend_tile(
            acc, top, total, q, positions, start, oldest, length, window,
            k_cache, v_cache, table, kv_head, unit, inner,
            KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_SIZE, KEYS, DIM, V_DIM, SOFTCAP, False,
        )  # fmt: skip
    left_tiles = (inner_left - left) // KEYS
    for i in range(left_tiles + tl.cdiv(last_position + 1 - inner_right, KEYS)):
        start = tl.where(i < left_tiles, left + i * KEYS, inner_right + (i - left_tiles) * KEYS)
        acc, top, total = _attend_tile(
            acc, top, total, q, positions, start, oldest, length, window,
            k_cache, v_cache, table, kv_head, unit, inner,
            KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_SIZE, KEYS, DIM, V_DIM, SOFTCAP, True,
        )  # fmt: skip
    acc = acc * _output_factor(top, total, sinks, head, True)[:, None]
    _store_rows(out, rows.to(tl.int64) * HEADS + head, acc, rows < q_end, V_HEAD_DIM, V_DIM)
