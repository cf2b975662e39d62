"""Writes the keys and values of prefill tokens into the paged KV cache, with the Triton kernel in prefill_kernel.py.

One launch writes both K and V. Decode does not use it: the decode kernel stores its own token (decode.py).
"""

from __future__ import annotations

from torch import Tensor

from tcdeploy.kernels.attention.kernel_arguments import padded_head_dim
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

KERNEL = Kernel("tcdeploy.kernels.attention.prefill_kernel", "_write_kernel")
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
    heads_tile = min(next_power_of_2(kv_heads), max(WRITE_ELEMENTS // dim, 1))
    KERNEL.launch(
        (tokens, -(-kv_heads // heads_tile)),
        k, v, k_cache, v_cache, slot_mapping,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv_heads, head_dim, v_head_dim, heads_tile, dim,
        num_warps=WRITE_WARPS,
    )  # fmt: skip
