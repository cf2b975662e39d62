"""The `tcdeploy::` ops of the linear layers, which replace products in compiled graphs as opaque nodes.

    linear           GEMV (gemv.py) for one row, skinny GEMM (skinny_gemm.py) for 2 to 64, with a bias or residual
    linear_silu_mul  the same kernels with SwiGLU as their epilogue
    rms_norm_linear  GEMV that normalises its input row
    linear_add_      cuBLAS, accumulating into the residual
    scheme_linear    a product with a quantised weight (scheme_linear.py)
    fused_scheme_linear    the same with the operations around it (scheme_matmul.py)
    fp8_product      a product of FP8 codes (fp8_inputs.py)

`config` indexes the tables of tile_configs.py. As an argument it is part of the graph and of its cache key; the Python
bodies are not, so programs/passes/post_grad.py hashes their sources.

These are not `triton_op`s, because torch 2.11 to 2.13 do not pass `launch_pdl` through wrap_triton. The cost is host
time per call, which CUDA graph replay does not pay. On a CPU the ops compute the same formulas in plain PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.linear import (
    gemv,
    scheme_matmul,  # noqa: F401 - registers the schemes, their kernels and ops
    skinny_gemm,
)
from tcdeploy.kernels.linear.tile_configs import GEMV_TILES, SKINNY_GEMM_TILES


@custom_op("linear")
def linear(x: Tensor, w: Tensor, addend: Tensor | None, config: int) -> Tensor:
    """x [rows, k] @ w [n, k].T + addend ([n] or [rows, n]), summed in float32: [rows, n] in x's dtype.

    bfloat16 or float16; rows <= 64; k is a multiple of 64 and n of 16. w is contiguous; the rows of x and addend may be
    strided. With one row, w may be read before the previous kernel has ended, so that kernel must not write w.
    """
    return _matmul(x, w, config, addend)


@linear.register_fake
def _(x: Tensor, w: Tensor, addend: Tensor | None, config: int) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@custom_op("linear_silu_mul")
def linear_silu_mul(x: Tensor, w: Tensor, config: int) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) for x [rows, k] and w [2n, k], the n gate rows first: [rows, n] in x's dtype.

    Constraints as for `linear`; n is a multiple of 16. Rounded once, at the end.
    """
    return _matmul(x, w, config, gated=True)


@linear_silu_mul.register_fake
def _(x: Tensor, w: Tensor, config: int) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0] // 2)


@custom_op("rms_norm_linear")
def rms_norm_linear(
    x: Tensor, norm: Tensor, eps: float, w: Tensor, addend: Tensor | None, gated: bool, config: int
) -> Tensor:
    """`linear`, or with `gated` `linear_silu_mul`, of the row x [1, k] / sqrt(mean(x^2) + eps) * norm [k].

    The normalised row is not rounded. `norm` is contiguous and, like w, may be read before the previous kernel has
    ended. A gated product takes no addend.
    """
    assert x.shape[0] == 1
    return _matmul(x, w, config, addend, gated, norm, eps)


@rms_norm_linear.register_fake
def _(x: Tensor, norm: Tensor, eps: float, w: Tensor, addend: Tensor | None, gated: bool, config: int) -> Tensor:
    return x.new_empty(1, w.shape[0] // 2 if gated else w.shape[0])


def _matmul(
    x: Tensor, w: Tensor, config: int, addend: Tensor | None = None, gated: bool = False,
    norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Only a single row can be normalised."""
    if x.is_cuda and x.shape[0] == 1:
        return gemv.matmul(x, w, GEMV_TILES[config], addend, gated, norm, eps)
    if x.is_cuda:
        return skinny_gemm.matmul(x, w, SKINNY_GEMM_TILES[config], addend, gated)
    row = x.float()
    if norm is not None:
        row = row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
    y = row @ w.float().T
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(gate) * up
    return (y if addend is None else y + addend.float()).to(w.dtype)


@custom_op("linear_add_", mutates_args=("total",))
def linear_add_(total: Tensor, x: Tensor, w: Tensor) -> None:
    """total [rows, n] += x [rows, k] @ w [n, k].T, in place: cuBLAS accumulates (beta = 1), so no add kernel runs."""
    total.addmm_(x, w.T)


@linear_add_.register_fake
def _(total: Tensor, x: Tensor, w: Tensor) -> None:
    return None
