"""Triton decode attention over the paged KV cache, in one kernel launch (decode_kernel.py). Imports no Triton.

The kernel writes the new token's key and value, computes attention and merges the splits. With `cos` and `sin` it first
applies RoPE to q and k, and with `norms` an RMSNorm to each head before RoPE (programs/passes/rotary.py).

At large batches the kernel is limited by memory bandwidth, and at batch 1 by latency. Four choices keep the chain of
dependent loads short ("program" means a Triton program instance here, one thread block):

- A program's rows are the query heads that share a kv head, so each key is read once. `splits` programs share the keys
  of a sequence, in round-robin turns of consecutive tiles (splits.py). Which tiles a program reads does not depend on
  the length, so it loads its first block ids in parallel with the length, and prefetches those of the next tile.
- The new token does not pass through memory. Split 0 takes its key and value from registers after its last tile and
  stores them in the cache. The loops end before the new token, so no program reads what another program writes.
- With one sequence and PDL, a program prefetches its first tile into the L2 cache before it waits for the kernel that
  writes q, k and v.
- The last split to finish merges all splits in index order, so the result does not depend on which one finished last.
  An atomic counter in `split_counters` detects it, which it resets to zero for the next launch. The counter's
  acquire-release order makes the other splits' stores visible; the barrier before it orders the program's own threads.

The host reads no lengths, and `splits` is an argument, so a captured CUDA graph replays with any lengths. Splits
without tiles exit at once, and a sequence that fits one turn needs no merge.

The op is opaque (ops.py) and not a `triton_op`, because Inductor does not pass `launch_pdl` through, and programmatic
dependent launch (torch_compat/inductor/pdl.py) takes a decode step of Llama 3.1 8B from 5.73 to 5.67 ms at batch 4.

On an H100, batch 256 at 512 tokens runs at 97% of the bandwidth of a copy. Batch 1 takes 7.4 us where reading the cache
takes 2.2. All timings and the rejected alternatives: docs/performance-log.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.kernels.attention.kernel_arguments import NO_WINDOW, log2_score_scales, padded_head_dim
from tcdeploy.kernels.attention.metadata import HeadNorms
from tcdeploy.kernels.attention.splits import tiles_per_turn
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

KERNEL = Kernel("tcdeploy.kernels.attention.decode_kernel", "_decode_kernel")
# Tuning constants.
TILE_BYTES = 16 * 1024  # of K per loop step, and as much of V; `num_stages - 1` steps are in flight
WARPS, STAGES = 4, 3
# Grids of this size put several programs on an SM. They hide each other's load latency, so fewer stages suffice.
HIGH_OCCUPANCY_PROGRAMS, HIGH_OCCUPANCY_STAGES = 384, 2
MERGE_ELEMENTS = 4096  # float32 elements of the splits' outputs that one step of the merge loads
# With one sequence, larger tiles leave fewer splits to merge, and a thread of the merge holds fewer elements at a time.
SINGLE_TILE_BYTES, SINGLE_MERGE_ELEMENTS = 32 * 1024, 2048


def paged_decode(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    split_counters: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None, splits: int,
    cos: Tensor | None = None, sin: Tensor | None = None, out: Tensor | None = None, kv_scales: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:  # fmt: skip
    """As `ops.decode_attention`; split_counters is zero before and after the call.

    The block size is a power of two, at least 16. q, k, v, cos and sin may have any strides except in the last
    dimension. If a contiguous `out` is given, it is written and returned, and rows of length 0 keep their contents.
    """
    (batch, heads, head_dim), (_, block_size, kv_heads, v_head_dim) = q.shape, v_cache.shape
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    if cos is not None and sin is not None:
        assert cos.shape == sin.shape == (batch, head_dim) and cos.stride() == sin.stride() and cos.stride(-1) == 1
    q_norm, k_norm, norm_eps = (None, None, 0.0) if norms is None else norms
    assert norms is None or (cos is not None and norms.q.shape == norms.k.shape == (head_dim,))
    group, dim, v_dim = heads // kv_heads, padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    padded_group = next_power_of_2(group)
    is_single = batch == 1
    tile_bytes = SINGLE_TILE_BYTES if is_single else TILE_BYTES
    merge_elements = SINGLE_MERGE_ELEMENTS if is_single else MERGE_ELEMENTS
    keys = min(max(tile_bytes // (max(dim, v_dim) * k_cache.element_size()), 16), 128)
    scale_log2, tanh_scale = log2_score_scales(scale, softcap)
    turn = tiles_per_turn(batch, kv_heads)
    busy_programs = kv_heads * batch * (splits if turn == 1 else 1)  # a lower bound, except for very short sequences
    stages = HIGH_OCCUPANCY_STAGES if busy_programs >= HIGH_OCCUPANCY_PROGRAMS else STAGES
    use_pdl = supports_pdl(q.device)
    keeps_padding = out is not None
    out = q.new_empty(batch, heads, v_head_dim) if out is None else out
    assert out.is_contiguous()
    partial_out = partial_lse = None  # each split's output and the base-2 log-sum-exp of its scores
    if splits > 1:
        partial_out = q.new_empty(batch, kv_heads, splits, group, v_head_dim, dtype=torch.float32)
        partial_lse = q.new_empty(batch, kv_heads, splits, group, dtype=torch.float32)
    KERNEL.launch(
        (kv_heads, batch, splits),
        out, partial_out, partial_lse, split_counters,
        q, k, v, cos, sin, k_cache, v_cache, block_table, seq_lens, sinks, kv_scales, q_norm, k_norm, norm_eps,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cos.stride(0) if cos is not None else 0,
        block_table.stride(0), block_table.shape[1], splits, window or NO_WINDOW, scale_log2, tanh_scale,
        turn, kv_heads, group, max(16, padded_group), padded_group, head_dim, v_head_dim, block_size, keys, dim, v_dim,
        max(merge_elements // (padded_group * v_dim), 1), window > 0, softcap > 0, use_pdl and is_single, use_pdl,
        keeps_padding,
        num_warps=WARPS, num_stages=stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out
