"""The Triton kernels of quantised weights, which scheme_matmul.py launches and describes.

The same kernels serve all schemes, because schemes differ in two places only. FORMAT says how bytes become values
(scheme_codes.py). Scales are of two kinds: `row_scale` multiplies a row of the weight, so it is applied to the sums;
`group_scale` multiplies GROUP columns of ROW_BLOCK rows.

They are apart from the kernels of matmul_kernel.py: the source of a kernel is the key of its compiled code, and the
dense kernels would have to be timed again whenever a format changes.
"""

# ruff: noqa: SIM108, SIM300 - a constexpr is not the constant of a comparison, and branches of Triton read better
from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.linear.scheme_codes import (
    _byte_values,
    _code_floats,
    _default_zero,
    _load_scales,
    _scaled_values,
    _slice_values,
    _unit,
)
from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def _load_row(pointer, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """[CHUNKS, COLUMNS] consecutive elements in float32; COLUMNS is 16 or 32.

    If INTERLEAVED, the 32 elements are in the order of the codes of the weight (int4_scheme.py).
    They belong to the 16 bytes of the weight that a thread loads at once. A thread cannot load as many of them at once:
    they are loaded by eights, and put together in registers. Loaded in one piece, they would go through shared memory.
    """
    ptrs = pointer + tl.arange(0, CHUNKS)[:, None] * COLUMNS + tl.arange(0, 8)[None, :]
    if COLUMNS == 32:
        even_eights, odd_eights = (
            tl.join(tl.load(ptrs), tl.load(ptrs + 16)),
            tl.join(tl.load(ptrs + 8), tl.load(ptrs + 24)),
        )
        eights = tl.join(even_eights, odd_eights)
        if not INTERLEAVED:
            eights = tl.permute(eights, (0, 2, 3, 1))
    else:
        eights = tl.permute(tl.join(tl.load(ptrs), tl.load(ptrs + 8)), (0, 2, 1))
    return tl.reshape(eights, (CHUNKS, COLUMNS)).to(tl.float32)


@ignore_comments
@triton.jit
def _multiply_tile(
    codes, inputs, group_scale, zero, offsets,
    FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, SUM_BYTES: tl.constexpr,
):  # fmt: skip
    """Sums over SUM_BYTES bytes of the rows of a tile, [BLOCK_N, sums], from its bytes and the inputs of its columns.

    `offsets`: of the scale and zero point of each sum. A thread holds all bytes of a sum.
    """
    SUMS: tl.constexpr = CHUNKS * 16 // SUM_BYTES
    tile = tl.reshape(codes, (BLOCK_N, SUMS, SUM_BYTES))
    if FORMAT == "int4" or FORMAT == "e2m1":
        if zero is not None:
            zeros = tl.load(zero + offsets).to(tl.float32)
        else:
            zeros = tl.full([1, 1], _default_zero(FORMAT), tl.float32)
        low, high = _code_floats(tile, FORMAT)
        even, odd = tl.split(tl.reshape(inputs, (SUMS, SUM_BYTES, 2)))
        sums = tl.sum(low * even[None, :, :], 2) + tl.sum(high * odd[None, :, :], 2)
        sums = (sums - tl.sum(even + odd, 1)[None, :] * (1.0 + zeros / 128.0)) * (128.0 * _unit(FORMAT))
    else:
        sums = tl.sum(_byte_values(tile, tl.float32) * tl.reshape(inputs, (SUMS, SUM_BYTES))[None, :, :], 2)
    if group_scale is not None:
        sums *= _load_scales(group_scale + offsets, None, FORMAT)
    return sums


@ignore_comments
@triton.jit
def _scheme_gemv_kernel(
    out, x, weight, row_scale, group_scale, zero, addend, norm, n, k, row_bytes, groups, eps,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, INTERLEAVED: tl.constexpr, GATED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    PER_BYTE: tl.constexpr = 2 if FORMAT == "int4" or FORMAT == "e2m1" else 1
    CHUNKS: tl.constexpr = BLOCK_BYTES // 16
    SUM_BYTES: tl.constexpr = 16 if GROUP >= 16 * PER_BYTE else GROUP // PER_BYTE
    SUMS: tl.constexpr = BLOCK_BYTES // SUM_BYTES
    if GATED:  # the first half of the tile's rows of the weight are gate rows, the second half their up rows
        HALF: tl.constexpr = BLOCK_N // 2
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        tile_row = tl.arange(0, BLOCK_N)
        w_row = tl.program_id(0) * HALF + tile_row % HALF + tile_row // HALF * (n // 2)
    else:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_row = column
    w_ptrs = weight + w_row.to(tl.int64)[:, None] * row_bytes + tl.arange(0, BLOCK_BYTES)[None, :]
    group_rows = (w_row // ROW_BLOCK * groups)[:, None]
    sum_columns = tl.arange(0, SUMS)[None, :] * (SUM_BYTES * PER_BYTE)
    codes = tl.load(w_ptrs, eviction_policy="evict_first")
    if row_scale is not None:
        row_scales = tl.load(row_scale + w_row).to(tl.float32)
    if USE_PDL:  # before the wait the kernel accesses weights only
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if addend is not None:
        addend_tile = tl.load(addend + column)

    inputs = _load_row(x, CHUNKS, 16 * PER_BYTE, INTERLEAVED)
    if norm is not None:
        squares = inputs * inputs
        inputs *= _load_row(norm, CHUNKS, 16 * PER_BYTE, INTERLEAVED)
    offsets = group_rows + sum_columns // GROUP
    acc = _multiply_tile(codes, inputs, group_scale, zero, offsets, FORMAT, BLOCK_N, CHUNKS, SUM_BYTES)
    for start in tl.range(BLOCK_BYTES, row_bytes, BLOCK_BYTES):
        codes = tl.load(w_ptrs + start, eviction_policy="evict_first")
        inputs = _load_row(x + start * PER_BYTE, CHUNKS, 16 * PER_BYTE, INTERLEAVED)
        if norm is not None:
            squares += inputs * inputs
            inputs *= _load_row(norm + start * PER_BYTE, CHUNKS, 16 * PER_BYTE, INTERLEAVED)
        offsets = group_rows + (start * PER_BYTE + sum_columns) // GROUP
        acc += _multiply_tile(codes, inputs, group_scale, zero, offsets, FORMAT, BLOCK_N, CHUNKS, SUM_BYTES)

    y = tl.sum(acc, 1)
    if row_scale is not None:
        y *= row_scales
    if norm is not None:
        y *= tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / k + eps)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF)), (1, 0)))
        y = gate * tl.sigmoid(gate) * up
    if addend is not None:
        y += addend_tile.to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty))


@ignore_comments
@triton.jit
def _scheme_dequantise_kernel(
    out, weight, row_scale, group_scale, zero, n, k, row_bytes, groups,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, SUB: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """`SUB` columns, a power of two that divides GROUP and the block, share a scale."""
    PER_BYTE: tl.constexpr = 2 if FORMAT == "int4" or FORMAT == "e2m1" else 1
    COLUMNS: tl.constexpr = BLOCK_BYTES * PER_BYTE
    row, first = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * COLUMNS
    byte, column = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES), first + tl.arange(0, COLUMNS)
    sub = first + tl.arange(0, COLUMNS // SUB) * SUB
    is_row, row_64 = (row < n)[:, None], row.to(tl.int64)[:, None]
    codes = tl.load(weight + row_64 * row_bytes + byte[None, :], mask=is_row & (byte < row_bytes)[None, :])
    if row_scale is not None:
        factors = tl.load(row_scale + row, mask=row < n).to(tl.float32)[:, None]
    else:
        factors = tl.full([1, 1], 1.0, tl.float32)
    offsets, mask = (row // ROW_BLOCK * groups)[:, None] + (sub // GROUP)[None, :], is_row & (sub < k)[None, :]
    if group_scale is not None:
        factors *= _load_scales(group_scale + offsets, mask, FORMAT)
    if PER_BYTE == 2:
        if zero is not None:
            zeros = tl.load(zero + offsets, mask=mask).to(tl.float32)
        else:
            zeros = tl.full([1, 1], _default_zero(FORMAT), tl.float32)
        low, high = _code_floats(codes, FORMAT)
        values = tl.reshape(tl.join(low, high), (BLOCK_N, COLUMNS // SUB, SUB)) - (1.0 + zeros / 128.0)[:, :, None]
        factors *= 128.0 * _unit(FORMAT)
    else:
        values = tl.reshape(_byte_values(codes, tl.float32), (BLOCK_N, COLUMNS // SUB, SUB))
    values = (values * factors[:, :, None]).to(out.dtype.element_ty)
    if INTERLEAVED:  # n, 32 columns, t, column % 2, i // 2, i % 2, with the names of `int4_scheme.interleave`
        values = tl.permute(tl.reshape(values, (BLOCK_N, COLUMNS // 32, 4, 2, 2, 2)), (0, 1, 4, 5, 2, 3))
    values = tl.reshape(values, (BLOCK_N, COLUMNS))
    tl.store(out + row_64 * k + column[None, :], values, mask=is_row & (column < k)[None, :])


@ignore_comments
@triton.jit
def _multiply_slices(weights, inputs):
    """weights [slices, n, k] @ inputs [slices, m, k].T: [slices, n, m]. Each slice is computed by a warp of its own.

    If there is only one, the warps share it: rows of the weight are divided among them.
    """
    if weights.shape[0] == 1:
        rows = tl.reshape(weights, (weights.shape[1], weights.shape[2]))
        columns = tl.trans(tl.reshape(inputs, (inputs.shape[1], inputs.shape[2])))
        sums = tl.dot(rows, columns)[None, :, :]
    else:
        sums = tl.dot(weights, tl.trans(inputs, 0, 2, 1))
    return sums


# `rows` is not specialised; otherwise a batch of 16 would recompile the kernel.
@ignore_comments
@triton.jit(do_not_specialize=["rows"])
def _scheme_skinny_gemm_kernel(
    out, x, weight, row_scale, group_scale, zero, addend, rows, n, k, row_bytes, groups, x_stride, addend_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr, K_SLICES: tl.constexpr, GATED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    PER_BYTE: tl.constexpr = 2 if FORMAT == "int4" or FORMAT == "e2m1" else 1
    SLICE_BYTES: tl.constexpr = WIDTH // PER_BYTE
    GROUPS: tl.constexpr = WIDTH // GROUP if WIDTH > GROUP else 1  # in a slice; if several, scales multiply the values
    DTYPE: tl.constexpr = x.dtype.element_ty
    row, k_slice = tl.arange(0, BLOCK_M), tl.arange(0, K_SLICES)
    if GATED:  # the first half of the tile's rows of the weight are gate rows, the second half their up rows
        HALF: tl.constexpr = BLOCK_N // 2
        n //= 2
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        tile_row = tl.arange(0, BLOCK_N)
        w_row = tl.minimum(tl.program_id(0) * HALF + tile_row % HALF, n - 1) + tile_row // HALF * n
    else:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_row = tl.minimum(column, n - 1)  # past the end: reads the last row again, never stored
    w_ptrs = weight + w_row.to(tl.int64)[:, None] * row_bytes + tl.arange(0, K_SLICES * SLICE_BYTES)[None, :]
    x_rows = x + row.to(tl.int64) * x_stride
    x_ptrs = x_rows[None, :, None] + k_slice[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    x_mask = (row < rows)[None, :, None]
    group_rows = (w_row // ROW_BLOCK * groups)[None, :]
    out_mask = (row < rows)[:, None] & (column < n)[None, :]
    if USE_PDL:  # no memory access before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if addend is not None:  # a bias (row stride 0) or a residual; loaded before the loop, which hides its latency
        addend_ptrs = addend + row.to(tl.int64)[:, None] * addend_stride + column[None, :]
        addend_tile = tl.load(addend_ptrs, mask=out_mask, other=0.0)
    if row_scale is not None:
        row_scales = tl.load(row_scale + w_row).to(tl.float32)
    offsets = group_rows + (k_slice * WIDTH // GROUP)[:, None]
    if GROUPS > 1:
        scale_ptrs = group_scale + offsets[:, :, None] + tl.arange(0, GROUPS)[None, None, :]
        scales = _load_scales(scale_ptrs, None, FORMAT)
    elif group_scale is not None:
        scales = _load_scales(group_scale + offsets, None, FORMAT)
    if zero is not None:
        zeros = tl.load(zero + offsets)[:, :, None]
    else:
        zeros = None

    acc = tl.zeros([K_SLICES, BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, k // WIDTH, K_SLICES):
        tile = tl.reshape(tl.load(w_ptrs + first * SLICE_BYTES), (BLOCK_N, K_SLICES, SLICE_BYTES))
        tile = tl.permute(tile, (1, 0, 2))
        inputs = tl.load(x_ptrs + first * WIDTH, mask=x_mask, other=0.0)
        weights = _slice_values(tile, zeros, FORMAT, DTYPE)
        # Too small for the pipeline of asynchronous copies, so they are loaded one step ahead.
        following = first + K_SLICES + k_slice
        offsets = group_rows + (following * WIDTH // GROUP)[:, None]
        in_row = (following < k // WIDTH)[:, None]
        if zero is not None:
            zeros = tl.load(zero + offsets, mask=in_row)[:, :, None]
        if GROUPS > 1:
            acc += _multiply_slices(_scaled_values(weights, scales), inputs)
            scale_ptrs = group_scale + offsets[:, :, None] + tl.arange(0, GROUPS)[None, None, :]
            scales = _load_scales(scale_ptrs, in_row[:, :, None], FORMAT)
        elif group_scale is not None:
            acc += _multiply_slices(weights, inputs) * scales[:, :, None]
            scales = _load_scales(group_scale + offsets, in_row, FORMAT)
        else:
            acc += _multiply_slices(weights, inputs)

    y = tl.sum(acc, 0)
    if row_scale is not None:
        y *= row_scales[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF, BLOCK_M)), (1, 2, 0)))
        y = gate * tl.sigmoid(gate) * up
    y = tl.trans(y)
    if addend is not None:
        y += addend_tile.to(tl.float32)
    tl.store(out + row[:, None] * n + column[None, :], y.to(out.dtype.element_ty), mask=out_mask)
