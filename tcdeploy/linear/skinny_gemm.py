"""y = x @ w.T for the few rows of a decode batch (2 to 64): one Triton kernel that does nothing but stream the weight,
and may end in what comes next: a bias or residual, or the gate of an MLP.

Every weight is read once and used `rows` times, so the time is the weight's bytes over the memory's bandwidth, and
what cuBLAS leaves on the table is in how the bytes are asked for. The one idea: w stands on the left (y.T = w @ x.T),
so a program owns whole rows of w and walks them from end to end, asynchronous copies `num_stages` deep, and programs in
order sweep the weight in order. Nothing is split between programs, so there is no workspace, no counter and no order of
arrival: same inputs, same bits, and nothing but the output to allocate under a CUDA graph. Two forms of the product:

- one dot of [columns, depth], the Hopper tensor cores' own size: 64 columns and more.
- `k_slices` dots side by side, one per warp, each on its own part of the depth, added once at the end: 16 columns are
  enough then, so that even 2048 of them give every multiprocessor a program, and a step reads long pieces of a row.

Programmatic dependent launch: the kernel is launched while the one before it drains and waits for it
(`gdc_wait`) before it touches memory; then it lets the next one launch. The trigger stands after the wait, as in
Inductor's own kernels (config `triton.enable_pdl`): whoever starts early then knows that all before us is complete.

Microseconds on one H100 80GB (torch 2.11, Triton 3.6, November 2026), bfloat16, in CUDA graphs, over weights that the
L2 cannot hold; in brackets cuBLAS. The four: Llama 3.1 8B's qkv (6144 x 4096), o (4096 x 4096), gate and up (28672 x
4096) and down (4096 x 14336) added up, whose bytes take 139 at 3.13 TB/s (scripts/bench-linear). The layer: the four in
one program of Inductor's with norms, products and residuals for neighbours, then with `triton.enable_pdl` as well.

    rows                   2          4          8         16         32
    the four         153 (163)  153 (163)  154 (165)  157 (166)  159 (167)
    head             334 (371)  335 (372)  338 (373)  348 (379)  353 (382)       128256 x 4096, 336 at 3.13 TB/s
    the layer                   160 (172)             165 (175)  168 (175)
    with enable_pdl             156                   161        164

Rejected, gate and up at 4 rows unless said (79.3; a kernel that only reads w takes 75.7). A layer here has six plain
stand-ins for the small kernels:
- equal contiguous shares for persistent programs, partial sums in a workspace (stream-K): 84.4. 132 streams far from
  one another are slow even if they are only read: 78.5 to 79.7.
- multiplying and adding without tensor cores, as the best product with one row does: 85.3; 79.1 at 2 rows, 207 at 8.
- w straight into registers, without a pipeline: 83.9. TMA descriptors: 80.9, where the same tiles without took 80.8.
- splitting k between programs: down at 32 rows 44.5, whole 44.4; o at 4 rows 14.4, whole 13.9.
- asking for w before the wait: with prefetches into the L2 the layer's 162 became 163 to 168, the worse the more; with
  the first tile in registers its 159 became 162. Prefetching the tile of a wave later: 80.8 at best, and without 80.8.
- no dependent launch: the layer 162 instead of 159.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcdeploy.torch_compat.pdl import supports_pdl
from tcdeploy.torch_compat.triton_source import ignore_comments


class TileConfig(NamedTuple):
    """The shape of one program: rows of w (columns of y), elements of each per step, and how a step is worked on."""

    name: str
    block_n: int
    block_k: int
    k_slices: int  # parts of the depth, one per warp; 1: all warps share one dot
    num_warps: int
    num_stages: int  # of the software pipeline


# What to tune on a GPU, all of it. The op's `config` is an index into this table.
TILE_CONFIGS = (
    TileConfig("n16_k128", 16, 128, 2, 2, 6),
    TileConfig("n16_k1024", 16, 1024, 4, 4, 3),
    TileConfig("n16_k512", 16, 512, 4, 4, 6),
    TileConfig("n64_k64", 64, 64, 1, 4, 8),
    TileConfig("n64_k128_s4", 64, 128, 1, 4, 4),
    TileConfig("n64_k128_s7", 64, 128, 1, 4, 7),
    TileConfig("n128_k128", 128, 128, 1, 4, 4),
)
N16_K128, N16_K1024, N16_K512, N64_K64, N64_K128_S4, N64_K128_S7, N128_K128 = range(len(TILE_CONFIGS))
MIN_ROWS, MAX_ROWS = 2, 64  # one row: vector.py
MIN_N_AND_K = 1024  # of n and k: nothing smaller was measured
N_MULTIPLE, K_MULTIPLE = 16, 64

# The edges between the best guesses: 2 to 64 rows over the shapes of Llama 3.1 8B, Qwen2.5 7B and Llama 3.2 1B.
ONE_WAVE_N = 16 * 132  # columns: no more tiles of 16 than an H100 has multiprocessors
SMALL_N, MEDIUM_N, LM_HEAD_N = 4096, 8192, 65536  # columns: o and down; qkv; the head
SMALL_K = 2048  # k


def ranked_configs(rows: int, n: int, k: int) -> tuple[int, ...]:
    """Configs worth timing for x [rows, k] @ w [n, k].T, the best guess first; none where cuBLAS is as good.

    The guess was never slower than cuBLAS on the measured shapes, and 3% slower than the best config at most.
    Meant for Hopper: other GPUs were not measured, and may lack the shared memory.
    """
    if not MIN_ROWS <= rows <= MAX_ROWS or min(n, k) < MIN_N_AND_K or n % N_MULTIPLE or k % K_MULTIPLE:
        return ()
    if rows <= 8:
        return _ranked(_heuristic_up_to_8_rows(n, k), N16_K128, N16_K1024, N16_K512, N64_K128_S4)
    if n <= ONE_WAVE_N:
        return (N16_K512,) if rows <= 16 else ()
    if rows <= 32:
        guess = N64_K128_S7 if n <= SMALL_N else N64_K64 if n <= MEDIUM_N else N128_K128
        return _ranked(guess, N64_K128_S7, N128_K128, N64_K64, N64_K128_S4)
    return (N128_K128,) if n >= 2 * MEDIUM_N else ()


def _heuristic_up_to_8_rows(n: int, k: int) -> int:
    if n <= ONE_WAVE_N:
        return N16_K512
    if n <= MEDIUM_N:
        return N16_K128 if k < 2 * n else N16_K1024
    if k <= SMALL_K:
        return N64_K128_S4 if n <= LM_HEAD_N else N16_K1024
    return N16_K1024 if n <= LM_HEAD_N else N16_K512


def _ranked(guess: int, *others: int) -> tuple[int, ...]:
    return (guess, *(other for other in others if other != guess))


def matmul(x: Tensor, w: Tensor, tile: TileConfig, addend: Tensor | None = None, gated: bool = False) -> Tensor:
    """x [rows, k] @ w [n, k].T + addend [n] or [rows, n], sums in float32: [rows, n], contiguous, in x's dtype.

    w is contiguous, x and the addend may have strided rows; rows <= 64, n is a multiple of 16, k of 64. `gated` gives
    silu of the product's first n/2 columns times the others, [rows, n/2]; then n is a multiple of 32, and no addend.
    """
    (rows, k), n = x.shape, w.shape[0]
    assert x.dtype in (torch.bfloat16, torch.float16) and w.dtype == x.dtype
    assert w.shape[1] == k and w.is_contiguous() and x.stride(1) == 1
    assert addend is None or (addend.dtype == x.dtype and addend.stride(-1) == 1 and addend.shape in ((n,), (rows, n)))
    assert MIN_ROWS <= rows <= MAX_ROWS and n % N_MULTIPLE == 0 and k % K_MULTIPLE == 0
    assert not gated or (addend is None and n % (2 * N_MULTIPLE) == 0)
    out = x.new_empty(rows, n // 2 if gated else n)
    use_pdl = supports_pdl(x.device)
    _skinny_gemm_kernel[(triton.cdiv(n, tile.block_n),)](
        out, x, w, addend, rows, n, k, x.stride(0), addend.stride(0) if addend is not None and addend.ndim == 2 else 0,
        _padded_rows(rows), tile.block_n, fit_block_k(tile.block_k, k), tile.k_slices, gated, use_pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out


def _padded_rows(rows: int) -> int:
    """As the tensor cores take them: a power of two from 8. Batches that share it share a compiled kernel."""
    return max(8, triton.next_power_of_2(rows))


def fit_block_k(block_k: int, k: int) -> int:
    """The depth, halved until it divides k, so that no step needs a mask."""
    while k % block_k:
        block_k //= 2
    return block_k


# `rows` is not specialised: else a batch of 16 would compile the kernel again.
@ignore_comments
@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm_kernel(
    out, x, w, addend, rows, n, k, x_stride, addend_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_SLICES: tl.constexpr, GATED: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    if GATED:  # half of the tile's rows of w are gates, the other half what they let through
        HALF: tl.constexpr = BLOCK_N // 2
        n //= 2
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        part = tl.arange(0, BLOCK_N)
        w_row = tl.minimum(tl.program_id(0) * HALF + part % HALF, n - 1) + part // HALF * n
    else:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_row = tl.minimum(column, n - 1)  # past the end: the last row once more, never stored
    w_rows = w + w_row.to(tl.int64) * k
    x_rows = x + row.to(tl.int64) * x_stride
    if K_SLICES == 1:
        block_k = tl.arange(0, BLOCK_K)[None, :]
        w_tile, x_tile = w_rows[:, None] + block_k, x_rows[:, None] + block_k
        inside = (row < rows)[:, None]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        WIDTH: tl.constexpr = BLOCK_K // K_SLICES
        block_k = tl.arange(0, K_SLICES)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
        w_tile, x_tile = w_rows[None, :, None] + block_k, x_rows[None, :, None] + block_k
        inside = (row < rows)[None, :, None]
        acc = tl.zeros([K_SLICES, BLOCK_N, BLOCK_M], tl.float32)
    if USE_PDL:  # nothing is read or written before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_output = (row < rows)[:, None] & (column < n)[None, :]
    if addend is not None:  # a bias, whose rows are one, or a residual; loaded here, its latency is hidden
        added = tl.load(addend + row.to(tl.int64)[:, None] * addend_stride + column[None, :], mask=is_output, other=0.0)

    for start in range(0, k, BLOCK_K):
        weights = tl.load(w_tile + start)
        inputs = tl.load(x_tile + start, mask=inside, other=0.0)
        acc = tl.dot(weights, tl.trans(inputs) if K_SLICES == 1 else tl.trans(inputs, 0, 2, 1), acc)

    if K_SLICES > 1:
        acc = tl.sum(acc, 0)
    if GATED:
        gate, passed = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BLOCK_M)), (1, 2, 0)))
        acc = gate * tl.sigmoid(gate) * passed
    y = tl.trans(acc)
    if addend is not None:
        y += added.to(tl.float32)
    tl.store(out + row[:, None] * n + column[None, :], y.to(out.dtype.element_ty), mask=is_output)
