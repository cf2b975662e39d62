"""The Triton kernels of quantised weights for many rows, which scheme_gemm.py launches and describes."""

# ruff: noqa: SIM108, SIM300 - a constexpr is not the constant of a comparison, and branches of Triton read better
from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.linear.scheme_codes import _byte_values, _code_floats, _default_zero, _load_scales, _unit
from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def _rounded_values(codes, scales, zeros, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The values [n, columns] of a tile of codes [n, bytes], times the scales [n, groups], rounded to DTYPE once.

    (1 + c / 128) * factor - (1 + zero / 128) * factor with factor = 128 * unit * scale is one fused multiply-add, and
    exact in float32 if the scale is a 16-bit float.
    """
    BLOCK_N: tl.constexpr = codes.shape[0]
    if FORMAT == "int4" or FORMAT == "e2m1":
        low, high = _code_floats(codes, FORMAT)
        values = tl.join(low, high)
        COLUMNS: tl.constexpr = 2 * codes.shape[1]
        if scales is None:
            if zeros is None:
                values = (values - (1.0 + _default_zero(FORMAT) / 128.0)) * (128.0 * _unit(FORMAT))
            else:
                values = tl.reshape(values, (BLOCK_N, zeros.shape[1], COLUMNS // zeros.shape[1]))
                values = (values - (1.0 + zeros / 128.0)[:, :, None]) * (128.0 * _unit(FORMAT))
        else:
            values = tl.reshape(values, (BLOCK_N, scales.shape[1], COLUMNS // scales.shape[1]))
            factors = scales[:, :, None] * (128.0 * _unit(FORMAT))
            if zeros is None:
                values = values * factors - factors * (1.0 + _default_zero(FORMAT) / 128.0)
            else:
                values = values * factors - factors * (1.0 + zeros[:, :, None] / 128.0)
        values = tl.reshape(values.to(DTYPE), (BLOCK_N, COLUMNS))
    elif scales is None:
        values = _byte_values(codes, DTYPE)
    else:
        values = tl.reshape(codes.to(tl.float32), (BLOCK_N, scales.shape[1], codes.shape[1] // scales.shape[1]))
        values = tl.reshape((values * scales[:, :, None]).to(DTYPE), codes.shape)
    return values


@ignore_comments
@triton.jit(do_not_specialize=["rows", "m_tiles"])
def _scheme_gemm_kernel(
    out, x, weight, row_scale, group_scale, zero, addend, rows, m_tiles, n, k, split_k, row_bytes, groups, x_stride,
    addend_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SUB: tl.constexpr, GATED: tl.constexpr, IS_SPLIT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    PER_BYTE: tl.constexpr = 2 if FORMAT == "int4" or FORMAT == "e2m1" else 1
    DTYPE: tl.constexpr = x.dtype.element_ty
    # Programs of the same rows of the weight are neighbours, so that the L2 cache serves all but the first.
    row = tl.program_id(0) % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n_tile, first = tl.program_id(0) // m_tiles, tl.program_id(1) * split_k
    tile_row, step_columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if GATED:  # even rows of the tile are gate rows, odd ones their up rows
        n //= 2
        w_row = tl.minimum(n_tile * (BLOCK_N // 2) + tile_row // 2, n - 1) + tile_row % 2 * n
    else:
        w_row = tl.minimum(n_tile * BLOCK_N + tile_row, n - 1)  # past the end: never stored
    bytes_ = tl.arange(0, BLOCK_K // PER_BYTE)
    w_ptrs = weight + w_row.to(tl.int64)[:, None] * row_bytes + tl.multiple_of(first // PER_BYTE, 32) + bytes_[None, :]
    x_ptrs = x + row.to(tl.int64)[:, None] * x_stride + first + step_columns[None, :]
    x_mask = (row < rows)[:, None]  # to read another row instead would be slow, because all programs would read it
    sub = tl.arange(0, BLOCK_K // SUB)
    group_rows = (w_row // ROW_BLOCK * groups)[:, None]
    if USE_PDL:  # no memory access before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offsets = group_rows + ((first + sub * SUB) // GROUP)[None, :]
    if group_scale is not None:
        scales = _load_scales(group_scale + offsets, None, FORMAT)
    else:
        scales = None
    if zero is not None:
        zeros = tl.load(zero + offsets).to(tl.float32)
    else:
        zeros = None

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, split_k, BLOCK_K):
        codes = tl.load(w_ptrs + start // PER_BYTE)
        inputs = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        values = _rounded_values(codes, scales, zeros, FORMAT, DTYPE)
        # Too small for the pipeline of asynchronous copies, so they are loaded one step ahead.
        following = tl.minimum(first + start + BLOCK_K + sub * SUB, k - 1)
        offsets = group_rows + (following // GROUP)[None, :]
        if group_scale is not None:
            scales = _load_scales(group_scale + offsets, None, FORMAT)
        if zero is not None:
            zeros = tl.load(zero + offsets).to(tl.float32)
        acc = tl.dot(inputs, tl.trans(values), acc)

    if row_scale is not None:
        acc *= tl.load(row_scale + w_row).to(tl.float32)[None, :]
    if IS_SPLIT:  # [splits, rows, n] in the order of the tiles' rows; another kernel adds them
        n_all = n * 2 if GATED else n
        column = n_tile * BLOCK_N + tile_row
        mask = (row < rows)[:, None] & (column < n_all)[None, :]
        part = tl.program_id(1).to(tl.int64) * rows + row
        tl.store(out + part[:, None] * n_all + column[None, :], acc, mask=mask)
    else:
        if GATED:
            gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
            acc = gate * tl.sigmoid(gate) * up
            column = n_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        else:
            column = n_tile * BLOCK_N + tile_row
        mask = (row < rows)[:, None] & (column < n)[None, :]
        row_64 = row.to(tl.int64)[:, None]
        if addend is not None:
            acc += tl.load(addend + row_64 * addend_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row_64 * n + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@ignore_comments
@triton.jit(do_not_specialize=["rows"])
def _sum_gemm_parts_kernel(
    out, parts, addend, rows, n, addend_stride,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Adds parts [SPLITS, rows, n]. `GATED`: their columns alternate between gate and up."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    if USE_PDL:  # no memory access before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.load(parts + row * n + column, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        y += tl.load(parts + (split * rows + row) * n + column, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        n //= 2
        gate, up = tl.split(tl.reshape(y, (BLOCK // 2, 2)))
        y = gate * tl.sigmoid(gate) * up
        column = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        mask = column < n
    if addend is not None:
        y += tl.load(addend + row * addend_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * n + column, y.to(out.dtype.element_ty), mask=mask)
