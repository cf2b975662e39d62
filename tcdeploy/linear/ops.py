"""`tcdeploy::linear` and `gated_linear`: what torch.compile sees of the kernel, an opaque node where `aten.mm` stood.

And `add_product_`, for which cuBLAS has the kernel.

The config (an index into `kernels.TILES`) is an argument, so the choice stands in the graph and in the cache's key; the
body does not, so a cache that must notice a change of the kernel's source needs a tag of its own.

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
    strided rows.
    """
    from tcdeploy.linear import kernels  # imports triton, which a CPU needs not have

    return kernels.multiply(x, w, addend, kernels.TILES[config])


@linear.register_kernel("cpu")
def _(x: Tensor, w: Tensor, addend: Tensor | None, config: int) -> Tensor:
    y = x.float() @ w.float().T
    return (y if addend is None else y + addend.float()).to(x.dtype)


@linear.register_fake
def _(x: Tensor, w: Tensor, addend: Tensor | None, config: int) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@torch.library.custom_op("tcdeploy::gated_linear", mutates_args=(), device_types="cuda")
def gated_linear(x: Tensor, w: Tensor, config: int) -> Tensor:
    """silu(x @ gates.T) * (x @ ups.T) of x [rows, k] and w [2n, k], the n gates first: [rows, n] in x's dtype.

    As `linear`, and n is a multiple of 16; rounded once, at the end.
    """
    from tcdeploy.linear import kernels

    return kernels.multiply(x, w, None, kernels.TILES[config], gated=True)


@gated_linear.register_kernel("cpu")
def _(x: Tensor, w: Tensor, config: int) -> Tensor:
    gate, up = (x.float() @ w.float().T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@gated_linear.register_fake
def _(x: Tensor, w: Tensor, config: int) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0] // 2)


@torch.library.custom_op("tcdeploy::add_product_", mutates_args=("total",))
def add_product_(total: Tensor, x: Tensor, w: Tensor) -> None:
    """total [rows, n] += x [rows, k] @ w [n, k].T: cuBLAS adds as it writes, which spares a read and a write."""
    total.addmm_(x, w.T)


@add_product_.register_fake
def _(total: Tensor, x: Tensor, w: Tensor) -> None:
    return None
