"""The Triton kernel of the int4 GEMV with persistent programs. persistent_gemv.py launches and describes it."""

# ruff: noqa: SIM108 - branches of Triton read better
from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.linear.scheme_codes import _code_floats
from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def _load_inputs(pointer, CHUNKS: tl.constexpr, WHOLE: tl.constexpr):
    """[CHUNKS, 32] consecutive elements in float32; chunks from WHOLE on are 0.

    They are loaded eight at a time, as in `_load_row` of scheme_kernel.py.
    """
    chunk = tl.arange(0, CHUNKS)[:, None]
    ptrs = pointer + chunk * 32 + tl.arange(0, 8)[None, :]
    if WHOLE == CHUNKS:
        even_eights, odd_eights = (
            tl.join(tl.load(ptrs), tl.load(ptrs + 16)),
            tl.join(tl.load(ptrs + 8), tl.load(ptrs + 24)),
        )
    else:
        mask = chunk < WHOLE
        even_eights, odd_eights = (
            tl.join(tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + 16, mask=mask, other=0.0)),
            tl.join(tl.load(ptrs + 8, mask=mask, other=0.0), tl.load(ptrs + 24, mask=mask, other=0.0)),
        )
    eights = tl.permute(tl.join(even_eights, odd_eights), (0, 2, 3, 1))
    return tl.reshape(eights, (CHUNKS, 32)).to(tl.float32)


@ignore_comments
@triton.jit
def _load_tile(pointers, mask):
    """Bytes of rows of the weight; 0 where `mask` is false. With mask None, all bytes are loaded."""
    if mask is None:
        codes = tl.load(pointers, eviction_policy="evict_first")
    else:
        codes = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    return codes


@ignore_comments
@triton.jit
def _store_tile(
    out, addend, codes, scales, even, odd, excess, factor, tile,
    ROWS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Multiply a tile by the inputs of its even and odd columns, and write ROWS elements of the result."""
    low, high = _code_floats(tl.reshape(codes, (codes.shape[0], even.shape[0], 16)), "int4")
    sums = tl.sum(low * even[None, :, :], 2) + tl.sum(high * odd[None, :, :], 2)
    y = tl.sum((sums - excess[None, :]) * scales.to(tl.float32), 1) * factor
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, ROWS)), (1, 0)))
        y = gate * tl.sigmoid(gate) * up
    column = tile * ROWS + tl.arange(0, ROWS)
    if addend is not None:
        y += tl.load(addend + column).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty))


@ignore_comments
@triton.jit
def _persistent_gemv_kernel(
    out, x, weight, group_scale, addend, norm, n, k, groups, tiles, eps,
    GROUP: tl.constexpr, ROW_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK_N: tl.constexpr,
    GATED: tl.constexpr, IS_EARLY: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = BLOCK_BYTES // 16  # of 16 bytes, which one thread converts
    WHOLE: tl.constexpr = ROW_BYTES // 16  # chunks that a row has; those after it are 0
    HALF: tl.constexpr = BLOCK_N // 2
    ROWS: tl.constexpr = HALF if GATED else BLOCK_N  # of the result, per tile
    tile_row = tl.arange(0, BLOCK_N)
    if GATED:  # the first half of a tile are gate rows of the weight, the second half the corresponding up rows
        offset = tile_row % HALF + tile_row // HALF * (n // 2)
    else:
        offset = tile_row
    byte, chunk = tl.arange(0, BLOCK_BYTES)[None, :], tl.arange(0, CHUNKS)
    if WHOLE == CHUNKS:
        mask = None
    else:
        mask = byte < ROW_BYTES
    w_ptrs = weight + offset.to(tl.int64)[:, None] * ROW_BYTES + byte
    scale_ptrs = group_scale + offset[:, None] * groups + (tl.minimum(chunk, WHOLE - 1) * 32 // GROUP)[None, :]
    tile_bytes = tl.full([1, 1], ROWS * ROW_BYTES, tl.int64)  # a weight may have more than 2**31 bytes
    first, step = tl.program_id(0), tl.num_programs(0)
    scales = tl.load(scale_ptrs + first * (ROWS * groups))
    loop_first = first
    if IS_EARLY:  # the first tile is loaded now, stays in registers, and is multiplied after the others
        early_codes, early_scales = _load_tile(w_ptrs + first * tile_bytes, mask), scales
        loop_first += step
        scales = tl.load(scale_ptrs + tl.minimum(loop_first, tiles - 1) * (ROWS * groups))
    if norm is not None:
        norms = _load_inputs(norm, CHUNKS, WHOLE)
    if USE_PDL:  # before the wait the kernel accesses weights only
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inputs = _load_inputs(x, CHUNKS, WHOLE)
    if norm is not None:
        squares = tl.sum(tl.sum(inputs * inputs, 1), 0)
        inputs *= norms
        factor = 128.0 * tl.rsqrt(squares / k + eps)
    else:
        factor = 128.0
    even, odd = tl.split(tl.reshape(inputs, (CHUNKS, 16, 2)))
    excess = tl.sum(even + odd, 1) * (1.0 + 8.0 / 128.0)  # codes become 1 + c / 128

    for tile in tl.range(loop_first, tiles, step, num_stages=STAGES):
        codes = _load_tile(w_ptrs + tile * tile_bytes, mask)
        following = tl.minimum(tile + step, tiles - 1)  # loaded one step ahead: too few bytes for an asynchronous copy
        following_scales = tl.load(scale_ptrs + following * (ROWS * groups))
        _store_tile(out, addend, codes, scales, even, odd, excess, factor, tile, ROWS, GATED)
        scales = following_scales
    if IS_EARLY:
        _store_tile(out, addend, early_codes, early_scales, even, odd, excess, factor, first, ROWS, GATED)
