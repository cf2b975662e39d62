"""Triton kernel that writes the keys and values of prefill tokens into the paged KV cache.

One launch writes both K and V. Decode does not use it: the decode kernel stores its own token (decode.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tcdeploy.attention.online_softmax import DO_NOT_SPECIALIZE, padded_head_dim
from tcdeploy.torch_compat.triton_source import ignore_comments

WRITE_ELEMENTS, WRITE_WARPS = 4096, 4  # elements of one token per program, and warps per program


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value in its slot, in one launch.

    Shapes: k [tokens, kv_heads, head_dim], v [tokens, kv_heads, v_head_dim], the caches [blocks, block_size, kv_heads,
    dim], slot_mapping [tokens] int64 (slot = block * block_size + offset). k and v may have any strides except in the
    last dimension. Padding tokens may share a slot; its contents are then undefined.
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


@ignore_comments
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
