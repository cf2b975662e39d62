"""The Triton GEMV kernel that gemv.py launches and describes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gemv_kernel(
    out, x, w, addend, norm, n, k, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    if GATED:  # the first half of the tile's rows of w are gate rows, the second half their up rows
        HALF: tl.constexpr = BLOCK_N // 2
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        tile_row = tl.arange(0, BLOCK_N)
        w_row = tl.program_id(0) * HALF + tile_row % HALF + tile_row // HALF * (n // 2)
    else:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_row = column
    k_offsets = tl.arange(0, BLOCK_K)
    w_ptrs = w + w_row.to(tl.int64)[:, None] * k + k_offsets[None, :]
    weights = tl.load(w_ptrs, eviction_policy="evict_first")
    if norm is not None:
        scales = tl.load(norm + k_offsets)
    if USE_PDL:  # before the wait the kernel accesses weights only
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if addend is not None:
        addend_tile = tl.load(addend + column)

    inputs = tl.load(x + k_offsets).to(tl.float32)
    if norm is not None:
        squares = inputs * inputs
        inputs *= scales.to(tl.float32)
    acc = weights.to(tl.float32) * inputs[None, :]
    for start in tl.range(BLOCK_K, k, BLOCK_K, num_stages=STAGES):
        weights = tl.load(w_ptrs + start, eviction_policy="evict_first")
        inputs = tl.load(x + start + k_offsets).to(tl.float32)
        if norm is not None:
            squares += inputs * inputs
            inputs *= tl.load(norm + start + k_offsets).to(tl.float32)
        acc += weights.to(tl.float32) * inputs[None, :]

    y = tl.sum(acc, 1)
    if norm is not None:
        y *= tl.rsqrt(tl.sum(squares, 0) / k + eps)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF)), (1, 0)))
        y = gate * tl.sigmoid(gate) * up
    if addend is not None:
        y += addend_tile.to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty))
