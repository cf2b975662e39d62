"""y = x @ w.T for one row: a Triton kernel without tensor cores that streams the weight past the multiprocessors.

A program owns a few rows of w (columns of y) and walks them from end to end, `block_k` elements a step, straight into
registers; the partial sums of all threads are added once, at the end. It can begin with what comes before and end in
what comes after, so that a decoder layer at batch 1 is five kernels (two of these after a norm, two before a residual):

- x is normalised (RMS): the row is scaled by the norm's weights as it is read, and its squares are summed beside the
  product, whose result is scaled by 1 / sqrt(mean + eps). Every program finds the mean again, from a row that its
  multiprocessor's cache holds.
- a bias or residual is added, or silu of the product's first half is multiplied by its second.

With programmatic dependent launch a program asks for its first piece of w, which no kernel of the step writes, before
it waits for the kernel before it: what the pipeline of a launch costs is spent on reading.

Microseconds on one H100 80GB (torch 2.11, Triton 3.6, November 2026), bfloat16, in CUDA graphs over weights that the L2
cannot hold: the best tile as it serves (qkv normalised, o and down with the residual, gate and up normalised and
gated), the best plain one, what Inductor writes under coordinate descent (plain, early launch, one run of its search),
cuBLAS, and the weight's bytes at 3.13 TB/s. The layer is the four as they serve, in a row. scripts/bench-linear
measures all of it but Inductor's, and what stands below the table; all are from experiments before it did, in which the
kernel still had masks for columns past the end, which no tile can have.

                                qkv      o   gate, up   down    head   layer
    Llama 3.1 8B   serving     17.9   11.8       75.6   39.4           143.9
                   plain       17.2   11.9       75.1   39.7   328.0
                   Inductor    18.0   12.5       75.0   38.8
                   cuBLAS      20.1   15.7       81.4   43.9   370.3
                   bytes       16.1   10.7       75.0   37.5   335.7   139.4
    Qwen2.5 7B     serving     12.4    9.9       88.2   46.5           156.3
                   plain       12.2   10.1       87.6   46.5   343.4
                   Inductor    12.1   10.6       87.6   49.1
                   cuBLAS      13.8   11.5       95.9   52.9   379.1
                   bytes       10.6    8.2       86.8   43.4   348.2   148.9
    Llama 3.2 1B   serving      5.4    3.8       22.8   12.3            45.4
                   plain        5.0    3.9       22.3   12.3   164.7
                   cuBLAS       7.2    6.1       25.4   15.6   186.5
                   bytes        4.0    2.7       21.4   10.7   167.8    38.9

Asking for the first piece of w after the wait, best plain tiles (qkv, o, gate and up, down, head): 17.7, 12.3, 75.1,
39.3 and 328.6 for 17.3, 11.8, 74.5, 39.5 and 327.8 in the same run; 12.6, 10.2, 88.1, 46.1 and 343.1 for 12.2, 10.0,
88.5, 47.2 and 345.4; of the 1B 4.3 (o), 22.9, 12.5 and 165.9 for 3.7, 22.4, 12.4 and 165.3. It pays where a kernel is
short.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcdeploy.linear.skinny_gemm import K_MULTIPLE, MIN_N_AND_K, N_MULTIPLE, fit_block_k
from tcdeploy.torch_compat.pdl import supports_pdl
from tcdeploy.torch_compat.triton_source import ignore_comments


class TileConfig(NamedTuple):
    """The shape of one program: rows of w (columns of y), elements of each per step, and how many steps are asked for.

    With more than one stage the loop's loads are asynchronous copies, so many steps ahead.
    """

    name: str
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1


# What to tune on a GPU, all of it. The op's `config` is an index into this table.
TILE_CONFIGS = (
    TileConfig("n1_k1024", 1, 1024, 4),
    TileConfig("n1_k2048", 1, 2048, 4),
    TileConfig("n2_k2048", 2, 2048, 4),
    TileConfig("n4_k2048", 4, 2048, 8),
    TileConfig("n2_k1024", 2, 1024, 2),
    TileConfig("n4_k512", 4, 512, 4),
    TileConfig("n4_k512_s3", 4, 512, 2, 3),
    TileConfig("n8_k1024", 8, 1024, 8, 3),
)
N1_K1024, N1_K2048, N2_K2048, N4_K2048, N2_K1024, N4_K512, N4_K512_S3, N8_K1024 = range(len(TILE_CONFIGS))
LM_HEAD_N = 65536  # columns: the head
SMALL_K = 2048  # k


def ranked_configs(n: int, k: int) -> tuple[int, ...]:
    """Configs for w [n, k], the best guess first; none where the kernel cannot or was not measured."""
    if min(n, k) < MIN_N_AND_K or n % N_MULTIPLE or k % K_MULTIPLE:
        return ()
    guess = _heuristic_config(n, k)
    return (guess, *(config for config in range(len(TILE_CONFIGS)) if config != guess))


def _heuristic_config(n: int, k: int) -> int:
    """The edges lie between the measured shapes; as it serves, no guess was more than 3% slower than the best tile."""
    is_even = k % TILE_CONFIGS[N1_K2048].block_k == 0
    if n >= LM_HEAD_N:
        return N1_K2048
    if n > 2 * k:  # gate and up
        return N2_K1024 if k <= SMALL_K else N1_K2048 if is_even else N4_K512_S3
    if n > k:  # q, k and v
        return N8_K1024 if k <= SMALL_K else N2_K2048 if is_even else N4_K512
    if k > 2 * n or k <= SMALL_K:  # down; or o of a small model
        return N1_K1024
    return N4_K2048 if is_even else N2_K2048


def matmul(
    x: Tensor,
    w: Tensor,
    tile: TileConfig,
    addend: Tensor | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """x [1, k] @ w [n, k].T + addend ([n] or [1, n]), sums in float32: [1, n] in x's dtype.

    `gated` gives silu of the product's first n/2 columns times the others, [1, n/2]; then no addend. With `norm` [k]
    x is first scaled to a mean square of one (`eps` is added to it), and by `norm`. w is contiguous; n is a multiple
    of 16 (32 if gated), k of 64. w and `norm` may be read before the kernel before this one on the stream has ended.
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
    assert N_MULTIPLE % block_n == 0, "no program may have a part of its columns"
    use_pdl = supports_pdl(x.device)
    _gemv_kernel[(n // block_n,)](
        out, x, w, addend, norm, n, k, eps, block_n, fit_block_k(tile.block_k, k), tile.num_stages, gated, use_pdl,
        num_warps=tile.num_warps, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out


@ignore_comments
@triton.jit
def _gemv_kernel(
    out, x, w, addend, norm, n, k, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    if GATED:  # half of the tile's rows of w are gates, the other half what they let through
        HALF: tl.constexpr = BLOCK_N // 2
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        part = tl.arange(0, BLOCK_N)
        w_row = tl.program_id(0) * HALF + part % HALF + part // HALF * (n // 2)
    else:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_row = column
    block_k = tl.arange(0, BLOCK_K)
    w_tile = w + w_row.to(tl.int64)[:, None] * k + block_k[None, :]
    weights = tl.load(w_tile, eviction_policy="evict_first")
    if norm is not None:
        scales = tl.load(norm + block_k)
    if USE_PDL:  # nothing but weights is touched before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if addend is not None:
        added = tl.load(addend + column)

    inputs = tl.load(x + block_k).to(tl.float32)
    if norm is not None:
        squares = inputs * inputs
        inputs *= scales.to(tl.float32)
    acc = weights.to(tl.float32) * inputs[None, :]
    for start in tl.range(BLOCK_K, k, BLOCK_K, num_stages=STAGES):
        weights = tl.load(w_tile + start, eviction_policy="evict_first")
        inputs = tl.load(x + start + block_k).to(tl.float32)
        if norm is not None:
            squares += inputs * inputs
            inputs *= tl.load(norm + start + block_k).to(tl.float32)
        acc += weights.to(tl.float32) * inputs[None, :]

    y = tl.sum(acc, 1)
    if norm is not None:
        y *= tl.rsqrt(tl.sum(squares, 0) / k + eps)
    if GATED:
        gate, passed = tl.split(tl.permute(tl.reshape(y, (2, HALF)), (1, 0)))
        y = gate * tl.sigmoid(gate) * passed
    if addend is not None:
        y += added.to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty))
