"""The Triton kernel that kv_write.py launches."""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.attention.online_softmax import DO_NOT_SPECIALIZE


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _write_kernel(
    k, v, k_cache, v_cache, slot_mapping,
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
    tl.store(k_cache + (first + heads) * HEAD_DIM + dims, k_token, mask=k_mask)
    tl.store(v_cache + (first + heads) * V_HEAD_DIM + dims, v_token, mask=v_mask)
