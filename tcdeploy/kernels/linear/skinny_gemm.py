"""Triton GEMM for decode batches of 2 to 64 rows: y = x @ w.T, bound by streaming w from memory.

The epilogue may add a bias or a residual, or apply SwiGLU. Each weight is read once and used for all rows, so the
kernel's task is to keep enough loads in flight. It computes y.T = w @ x.T: a program owns whole rows of w and reads
them from end to end with asynchronous copies, `num_stages` deep, and consecutive programs sweep w in order. K is not
split between programs, so there is no workspace and no counter, and results are deterministic. Two inner products:

- `k_slices` = 1: one dot of [block_n, block_k], at least 64 columns, the native size of Hopper's tensor cores.
- `k_slices` > 1: one dot per warp, each on its own slice of block_k, summed once at the end. 16 columns per program
  suffice then: n = 2048 still makes 128 programs for 132 SMs, and a step reads long pieces of a row.

With programmatic dependent launch (torch_compat/inductor/pdl.py) the kernel starts while its predecessor drains, and
waits (`gdc_wait`) before it accesses memory.

On an H100 the four GEMMs of a Llama 3.1 8B layer take 153 us at 4 rows, where cuBLAS takes 163 and the bytes 139.
Rejected, with timings in docs/performance-log.md: stream-K, split-K, CUDA cores, register loads without a pipeline, TMA
descriptors, and loading w before the wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.kernels.linear.tile_configs import K_MULTIPLE, MAX_ROWS, MIN_ROWS, N_MULTIPLE, SkinnyGemmTile, fit_block_k
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

KERNEL = Kernel("tcdeploy.kernels.linear.matmul_kernel", "_skinny_gemm_kernel")


def matmul(x: Tensor, w: Tensor, tile: SkinnyGemmTile, addend: Tensor | None = None, gated: bool = False) -> Tensor:
    """x [rows, k] @ w [n, k].T + addend ([n] or [rows, n]), summed in float32: [rows, n], contiguous, in x's dtype.

    2 to 64 rows of bfloat16 or float16; n is a multiple of 16 and k of 64. w is contiguous; the rows of x and addend
    may be strided. `gated` returns silu(y[:, : n/2]) * y[:, n/2 :], [rows, n/2], for n a multiple of 32 and no addend.
    """
    (rows, k), n = x.shape, w.shape[0]
    assert x.dtype in (torch.bfloat16, torch.float16) and w.dtype == x.dtype
    assert w.shape[1] == k and w.is_contiguous() and x.stride(1) == 1
    assert addend is None or (addend.dtype == x.dtype and addend.stride(-1) == 1 and addend.shape in ((n,), (rows, n)))
    assert MIN_ROWS <= rows <= MAX_ROWS and n % N_MULTIPLE == 0 and k % K_MULTIPLE == 0
    assert not gated or (addend is None and n % (2 * N_MULTIPLE) == 0)
    out = x.new_empty(rows, n // 2 if gated else n)
    use_pdl = supports_pdl(x.device)
    padded_rows = max(8, next_power_of_2(rows))  # for the tensor cores; batches with equal padding share a kernel
    KERNEL.launch(
        (-(-n // tile.block_n),),
        out, x, w, addend, rows, n, k, x.stride(0), addend.stride(0) if addend is not None and addend.ndim == 2 else 0,
        padded_rows, tile.block_n, fit_block_k(tile.block_k, k), tile.k_slices, gated, use_pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out
