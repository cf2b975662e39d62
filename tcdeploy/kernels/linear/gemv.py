"""Triton GEMV for batch 1: y = x @ w.T without tensor cores, bound by streaming w from memory.

A program owns a few rows of w (columns of y) and reads them from end to end into registers, `block_k` elements per
step; its threads' partial sums are added once, at the end. The neighbouring operations can be fused, so a decoder layer
at batch 1 is five kernels:

- RMSNorm of x: the row is multiplied by the norm's weight as it is read, and its squares are summed beside the product,
  which is scaled by 1 / sqrt(mean + eps) at the end. Each program computes the mean again, from a row that its SM's
  cache holds.
- A bias or residual is added, or SwiGLU is applied to the two halves of the product.

With programmatic dependent launch (torch_compat/inductor/pdl.py) a program loads its first piece of w before it waits
for the previous kernel, because no kernel of the step writes w: o of Llama 3.2 1B takes 3.7 instead of 4.3 us.

On an H100 the four GEMVs of a Llama 3.1 8B layer, with their fused operations, take 143.9 us; reading their bytes takes
139.4. Per-shape timings beside cuBLAS and Inductor: docs/performance-log.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.kernels.linear.tile_configs import K_MULTIPLE, N_MULTIPLE, GemvTile, fit_gemv_block_k
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel

KERNEL = Kernel("tcdeploy.kernels.linear.matmul_kernel", "_gemv_kernel")


def matmul(
    x: Tensor, w: Tensor, tile: GemvTile, addend: Tensor | None = None, gated: bool = False,
    norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """x [1, k] @ w [n, k].T + addend ([n] or [1, n]), summed in float32: [1, n] in x's dtype.

    bfloat16 or float16; w is contiguous; n is a multiple of 16 (32 if gated) and k of 64. `gated` returns
    silu(y[:, : n/2]) * y[:, n/2 :], [1, n/2], and takes no addend. With `norm` [k], x is replaced by
    x / sqrt(mean(x^2) + eps) * norm. w and `norm` may be read before the previous kernel on the stream has ended.
    """
    (rows, k), n = x.shape, w.shape[0]
    assert rows == 1 and x.dtype in (torch.bfloat16, torch.float16) and w.dtype == x.dtype
    assert w.shape[1] == k and w.is_contiguous() and x.stride(1) == 1
    assert addend is None or (addend.dtype == x.dtype and addend.stride(-1) == 1 and addend.shape in ((n,), (1, n)))
    assert n % N_MULTIPLE == 0 and k % K_MULTIPLE == 0
    assert not gated or (addend is None and n % (2 * N_MULTIPLE) == 0)
    assert norm is None or (norm.shape == (k,) and norm.is_contiguous())
    out = x.new_empty(1, n // 2 if gated else n)
    block_n = max(tile.block_n, 2) if gated else tile.block_n
    assert N_MULTIPLE % block_n == 0, "every program must own a whole block of columns"
    block_k, use_pdl = fit_gemv_block_k(tile.block_k, k), supports_pdl(x.device)
    KERNEL.launch(
        (n // block_n,),
        out, x, w, addend, norm, n, k, eps, block_n, block_k, tile.num_stages, k % block_k > 0, gated, use_pdl,
        num_warps=tile.num_warps, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out
