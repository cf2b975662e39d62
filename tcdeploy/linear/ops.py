"""What torch.compile sees of our products: opaque nodes where `aten.mm` stood.

`tcdeploy::linear` and `linear_silu_mul` are of the kernel for a few rows (kernels.py) or of that for one row (vector.py),
`rms_norm_linear` of the latter alone; for `linear_add_` cuBLAS has the kernel.

The config (an index into `TILE_CONFIGS` of either) is an argument, so the choice stands in the graph and in the cache's key;
the body does not, so a cache that must notice a change of the kernel's source needs to hash it (passes/post_grad.py).

A custom_op, not a triton_op: torch 2.11 and 2.13 pass no `launch_pdl` through wrap_triton, and Inductor has nothing to
fuse into the kernel. The price is host time per call, which the replay of a CUDA graph does not pay. On a CPU the same
formula in plain torch answers, so that programs with the op in them run, and can be tested, anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("tcdeploy::linear", mutates_args=(), device_types="cuda")
def linear(x: Tensor, w: Tensor, addend: Tensor | None, config: int) -> Tensor:
    """x [rows, k] @ w [n, k].T + addend [n] or [rows, n], summed in float32: [rows, n] in x's dtype.

    bfloat16 or float16; rows <= 64; k is a multiple of 64 and n of 16; w is contiguous, x and the addend may have
    strided rows. One row: w may be read before the kernel before this one has ended, so that must not write it.
    """
    return _dispatch(x, w, config, addend, gated=False)


@linear.register_kernel("cpu")
def _(x: Tensor, w: Tensor, addend: Tensor | None, config: int) -> Tensor:
    return _reference(x, w, addend)


@linear.register_fake
def _(x: Tensor, w: Tensor, addend: Tensor | None, config: int) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@torch.library.custom_op("tcdeploy::linear_silu_mul", mutates_args=(), device_types="cuda")
def linear_silu_mul(x: Tensor, w: Tensor, config: int) -> Tensor:
    """silu(x @ gates.T) * (x @ ups.T) of x [rows, k] and w [2n, k], the n gates first: [rows, n] in x's dtype.

    As `linear`, and n is a multiple of 16; rounded once, at the end.
    """
    return _dispatch(x, w, config, None, gated=True)


@linear_silu_mul.register_kernel("cpu")
def _(x: Tensor, w: Tensor, config: int) -> Tensor:
    return _reference(x, w, gated=True)


@linear_silu_mul.register_fake
def _(x: Tensor, w: Tensor, config: int) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0] // 2)


@torch.library.custom_op("tcdeploy::rms_norm_linear", mutates_args=(), device_types="cuda")
def rms_norm_linear(
    x: Tensor, norm: Tensor, eps: float, w: Tensor, addend: Tensor | None, gated: bool, config: int
) -> Tensor:
    """`linear`, or `linear_silu_mul` without an addend, of the one row x [1, k] / sqrt(mean(x^2) + eps) * norm [k].

    The row is not rounded between; `norm` is contiguous and, like w, may be read early.
    """
    from tcdeploy.linear import gemv

    return gemv.matmul(x, w, gemv.TILE_CONFIGS[config], addend, gated, norm, eps)


@rms_norm_linear.register_kernel("cpu")
def _(x: Tensor, norm: Tensor, eps: float, w: Tensor, addend: Tensor | None, gated: bool, config: int) -> Tensor:
    assert x.shape[0] == 1, "one row"
    row = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * norm.float()
    return _reference(row, w, addend, gated)


@rms_norm_linear.register_fake
def _(x: Tensor, norm: Tensor, eps: float, w: Tensor, addend: Tensor | None, gated: bool, config: int) -> Tensor:
    return x.new_empty(1, w.shape[0] // 2 if gated else w.shape[0])


def _dispatch(x: Tensor, w: Tensor, config: int, addend: Tensor | None, gated: bool) -> Tensor:
    from tcdeploy.linear import (
        gemv,
        skinny_gemm,  # import triton, which a CPU needs not have
    )

    if x.shape[0] == 1:
        return gemv.matmul(x, w, gemv.TILE_CONFIGS[config], addend, gated)
    return skinny_gemm.matmul(x, w, skinny_gemm.TILE_CONFIGS[config], addend, gated)


def _reference(x: Tensor, w: Tensor, addend: Tensor | None = None, gated: bool = False) -> Tensor:
    y = x.float() @ w.float().T
    if gated:
        gate, passed = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(gate) * passed
    return (y if addend is None else y + addend.float()).to(w.dtype)


@torch.library.custom_op("tcdeploy::linear_add_", mutates_args=("total",))
def linear_add_(total: Tensor, x: Tensor, w: Tensor) -> None:
    """total [rows, n] += x [rows, k] @ w [n, k].T: cuBLAS adds as it writes, which spares a read and a write."""
    total.addmm_(x, w.T)


@linear_add_.register_fake
def _(total: Tensor, x: Tensor, w: Tensor) -> None:
    return None
