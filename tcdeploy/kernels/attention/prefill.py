"""Triton prefill attention: packed queries of several sequences over the paged KV cache (prefill_kernel.py).

A program holds a tile of queries of one head and walks the keys in tiles (online_softmax.py). Tiles that every row sees
in full run without masks; only those that cross the diagonal or the window's edge run with them. Imports no Triton.

Launch shapes are static and the host reads no lengths, so calls can be captured in a CUDA graph and replayed with any
lengths. The number of programs per head is the maximum number of query tiles over all possible lengths, usually several
times what a step needs. With a `SplitWorkspace`, idle programs and EXTRA_PREFILL_BLOCKS additional ones share the keys
of long sequences (splits.py). Each tile that has keys is assigned the same number of programs (`_prefill_splits`), and
uses as many of them as can get MIN_KEYS_PER_PREFILL_SPLIT keys each. As in decode.py, the split of a tile that finishes
last merges them all, in index order.

Rejected: autotuning at start-up, because the head size alone decides the tile and timing costs seconds of cold start;
a grid of (tiles x sequences), most of whose programs would only exit (`_sequence_of_tile` needs tiles + sequences);
tiles of 128 queries at head size 128 (104 us instead of 100 at 2,048 tokens on an H100; docs/performance-log.md).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.kernels.attention.kernel_arguments import NO_WINDOW, log2_score_scales, padded_head_dim
from tcdeploy.kernels.attention.splits import (
    EXTRA_PREFILL_BLOCKS,
    MAX_PREFILL_TILES_TO_SPLIT,
    MIN_KEYS_PER_PREFILL_SPLIT,
    PREFILL_BLOCKS_PER_SM,
)
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

KERNEL = Kernel("tcdeploy.kernels.attention.prefill_kernel", "_prefill_kernel")
WRITE_KERNEL = Kernel("tcdeploy.kernels.attention.prefill_kernel", "_write_kernel")
WRITE_ELEMENTS, WRITE_WARPS = 4096, 4  # of `write_kv`: elements of one token per program, and warps per program


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
MAX_SPLIT_SEQUENCES = 63  # `_split_of_program` holds these and the padding in one vector of 64
CPU_MULTIPROCESSORS = 132  # SMs assumed on a CPU (Triton's interpreter): those of an H100


class SplitWorkspace(NamedTuple):
    """Scratch memory for the partial results of splits: see `make_split_workspace`."""

    out: Tensor  # [heads, programs, queries, v_head_dim] float32
    lse: Tensor  # [heads, programs, queries] float32: the base-2 log-sum-exp of the scores
    counters: Tensor  # [heads * programs or more] int32: zeros before and after each launch


def make_split_workspace(q: Tensor, v_cache: Tensor, sequences: int, counters: Tensor) -> SplitWorkspace | None:
    """For a call of `paged_prefill` with `sequences` sequences; None if splits are not supported or not faster.

    counters: contiguous zeros, int32, of any shape; `splits.num_prefill_counters` gives a sufficient number.
    """
    (tokens, heads, _), tile = q.shape, _tile_config(q, v_cache)
    programs = _programs_per_head(tokens, sequences, tile, splits_keys=True)
    tiles = heads * -(-tokens // tile.queries)
    if tiles > min(5 * _concurrent_programs(q.device) // 8, MAX_PREFILL_TILES_TO_SPLIT):
        return None  # with more tiles, splits are slower: 624 us against 591 for 380 tokens after 30,000 (H100)
    if sequences > MAX_SPLIT_SEQUENCES or counters.numel() < heads * programs:
        return None
    out = q.new_empty(heads, programs, tile.queries, v_cache.shape[-1], dtype=torch.float32)
    return SplitWorkspace(out, q.new_empty(out.shape[:-1], dtype=torch.float32), counters)


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None,
    workspace: SplitWorkspace | None = None, out: Tensor | None = None, row_seq_lens: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `reference.paged_prefill`; with a `workspace`, the keys of long prefixes are split.

    The block size is a power of two, at least 16. q may have any strides except in the last dimension. If a contiguous
    `out` is given, it is written and returned. If row_seq_lens [rows] int32 is given, the first sequence has no keys
    and holds the tokens of at most `rows` decode rows. Row i of the output is then left unchanged if row_seq_lens[i] is
    not 0.
    """
    (tokens, heads, head_dim), (_, block_size, kv_heads, v_head_dim) = q.shape, v_cache.shape
    assert q.stride(-1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    sequences, tile = block_table.shape[0], _tile_config(q, v_cache)
    dim, v_dim = _tile_columns(head_dim, v_head_dim, is_converted=kv_scales is not None)
    out = q.new_empty(tokens, heads, v_head_dim) if out is None else out
    assert out.is_contiguous()
    partial_out, partial_lse, split_counters = workspace or (None, None, None)
    programs = _programs_per_head(tokens, sequences, tile, splits_keys=workspace is not None)
    KERNEL.launch(
        (heads, programs),
        out, partial_out, partial_lse, split_counters,
        q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, row_seq_lens, sinks, kv_scales,
        q.stride(0), q.stride(1), block_table.stride(0), tokens, sequences, _concurrent_programs(q.device),
        window or NO_WINDOW, *log2_score_scales(scale, softcap),
        heads, kv_heads, tile.queries, head_dim, v_head_dim, block_size, tile.keys, dim, v_dim, softcap > 0,
        max(MIN_KEYS_PER_PREFILL_SPLIT // tile.keys, 1), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> None:
    """As `ops.kv_write`, in one launch: slot = block * block_size + offset.

    k and v may have any strides except in the last dimension. The decode kernel stores its own token.
    """
    tokens, kv_heads, head_dim = k.shape
    v_head_dim = v.shape[-1]
    assert k.stride(-1) == 1 and v.stride(-1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    dim = padded_head_dim(max(head_dim, v_head_dim))
    heads_tile = min(next_power_of_2(kv_heads), max(WRITE_ELEMENTS // dim, 1))
    WRITE_KERNEL.launch(
        (tokens, -(-kv_heads // heads_tile)),
        k, v, k_cache, v_cache, slot_mapping, kv_scales,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv_heads, head_dim, v_head_dim, heads_tile, dim,
        num_warps=WRITE_WARPS,
    )  # fmt: skip


def _tile_config(q: Tensor, v_cache: Tensor) -> TileConfig:
    dim = max(padded_head_dim(q.shape[-1]), padded_head_dim(v_cache.shape[-1]), 64)
    return PREFILL_TILES_FLOAT32 if q.dtype == torch.float32 else PREFILL_TILES[dim]


def _tile_columns(head_dim: int, v_head_dim: int, is_converted: bool) -> tuple[int, int]:
    """Columns of a tile of K and of one of V; those past the head size are masked.

    Tiles of an FP8 cache are converted into shared memory, K and V at the same address. The narrower one gets as many
    columns as the other, up to 64, and so the same swizzle. With two swizzles, ptxas 12.8 confuses the descriptors of
    the wgmma operands: V of all but the first 16 keys was read from a wrong address.
    """
    dim, v_dim = padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    at_least = min(max(dim, v_dim), 64) if is_converted else 0
    return max(dim, at_least), max(v_dim, at_least)


def _programs_per_head(tokens: int, sequences: int, tile: TileConfig, splits_keys: bool) -> int:
    """The maximum number of tiles (the last of each sequence and of the padding may be partial), and extra ones."""
    return tokens // tile.queries + sequences + 1 + EXTRA_PREFILL_BLOCKS * splits_keys


@functools.cache
def _concurrent_programs(device: torch.device) -> int:
    """About how many programs of the kernel a GPU runs at once."""
    if device.type != "cuda":
        return PREFILL_BLOCKS_PER_SM * CPU_MULTIPROCESSORS
    return PREFILL_BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
