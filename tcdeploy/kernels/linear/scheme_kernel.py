"""The Triton kernels of quantised weights, which scheme_matmul.py launches and describes.

The same kernels serve all schemes, because schemes differ in two places only. FORMAT says how bytes become values
(`_values`). Scales are of two kinds: `row_scale` multiplies a row of the weight, so it is applied to the sums;
`group_scale` multiplies GROUP columns of ROW_BLOCK rows.

They are apart from the kernels of matmul_kernel.py: the source of a kernel is the key of its compiled code, and the
dense kernels would have to be timed again whenever a format changes.
"""

# ruff: noqa: SIM108, SIM300 - a constexpr is not the constant of a comparison, and branches of Triton read better
from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def _nibble_values(codes, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The values of the low and of the high four bits of bytes. In float16, those of e2m1 lack `_missing_factor`.

    Integers need no conversion: in the bits of 2**23 (float32), 2**10 (float16) or 2**7 (bfloat16), the lowest bits of
    the mantissa count ones, and in those of 2**19 and 2**6 bits 4 to 7 do. The bits of an e2m1 code are those of a
    smaller number in any wider format.
    """
    if FORMAT == "int4":
        if DTYPE == tl.float32:
            bits = codes.to(tl.int32)
            low = ((bits & 0x0F) | 0x4B000000).to(DTYPE, bitcast=True) - (zero + 2.0**23)
            high = ((bits & 0xF0) | 0x49000000).to(DTYPE, bitcast=True) - (zero + 2.0**19)
        elif DTYPE == tl.float16:
            bits = codes.to(tl.int16)
            low = ((bits & 0x0F) | 0x6400).to(DTYPE, bitcast=True) - (zero + 2.0**10).to(DTYPE)
            high = ((bits & 0xF0) | 0x5400).to(DTYPE, bitcast=True) - (zero + 2.0**6).to(DTYPE)
        else:
            bits = codes.to(tl.int16)
            shift = (zero + 2.0**7).to(DTYPE)
            low = ((bits & 0x0F) | 0x4300).to(DTYPE, bitcast=True) - shift
            high = ((bits >> 4) | 0x4300).to(DTYPE, bitcast=True) - shift
    elif DTYPE == tl.float32:
        bits = codes.to(tl.int32)
        low = ((bits & 0x08) << 28 | (bits & 0x07) << 22).to(DTYPE, bitcast=True) * 2.0**126
        high = ((bits & 0x80) << 24 | (bits & 0x70) << 18).to(DTYPE, bitcast=True) * 2.0**126
    else:
        bits = codes.to(tl.int16)
        if DTYPE == tl.bfloat16:
            factor = tl.full([1, 1, 1], 2.0**126, tl.float32).to(tl.bfloat16)
            low = ((bits & 0x08) << 12 | (bits & 0x07) << 6).to(DTYPE, bitcast=True) * factor
            high = ((bits & 0x80) << 8 | (bits & 0x70) << 2).to(DTYPE, bitcast=True) * factor
        else:
            low = ((bits & 0x08) << 12 | (bits & 0x07) << 9).to(DTYPE, bitcast=True)
            high = ((bits & 0x80) << 8 | (bits & 0x70) << 5).to(DTYPE, bitcast=True)
    return low, high


@ignore_comments
@triton.jit
def _missing_factor(FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """What sums of e2m1 values in float16 are multiplied by: 2**14, from the difference of the exponents' biases.

    In wider formats, the products with inputs would be too small for float32, so the values are multiplied.
    """
    return 2.0**14 if FORMAT == "e2m1" and DTYPE == tl.float16 else 1.0


@ignore_comments
@triton.jit
def _byte_values(codes, DTYPE: tl.constexpr):
    """The values of fp8 or int8 codes. A conversion of float16 to bfloat16 is slower than two through float32."""
    if codes.dtype == tl.float8e4nv and DTYPE == tl.bfloat16:
        values = codes.to(tl.float16).to(tl.float32).to(DTYPE)
    else:
        values = codes.to(DTYPE)
    return values


@ignore_comments
@triton.jit
def _load_scales(pointers, mask, FORMAT: tl.constexpr):
    """Scales of groups in float32. Those of uint8 are exponents of 2 plus 127; 0 is 2**-127, and 255 is NaN."""
    scales = tl.load(pointers, mask=mask)
    if FORMAT == "e2m1" and scales.dtype == tl.uint8:
        bits = scales.to(tl.int32)
        is_special = (bits == 0) | (bits == 255)
        values = ((bits << 23) | (is_special.to(tl.int32) << 22)).to(tl.float32, bitcast=True)
    else:
        values = scales.to(tl.float32)
    return values


@ignore_comments
@triton.jit
def _load_row(pointer, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    """[CHUNKS, COLUMNS] consecutive elements in float32; COLUMNS is 16 or 32.

    They belong to the 16 bytes of the weight that a thread loads at once. A thread cannot load as many of them at once:
    they are loaded by eights, and put together in registers. Loaded in one piece, they would go through shared memory.
    """
    ptrs = pointer + tl.arange(0, CHUNKS)[:, None] * COLUMNS + tl.arange(0, 8)[None, :]
    if COLUMNS == 32:
        even_eights, odd_eights = (
            tl.join(tl.load(ptrs), tl.load(ptrs + 16)),
            tl.join(tl.load(ptrs + 8), tl.load(ptrs + 24)),
        )
        eights = tl.permute(tl.join(even_eights, odd_eights), (0, 2, 3, 1))
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
            zeros = tl.load(zero + offsets).to(tl.float32)[:, :, None]
        else:
            zeros = tl.full([1, 1, 1], 8.0, tl.float32)
        low, high = _nibble_values(tile, zeros, FORMAT, tl.float32)
        even, odd = tl.split(tl.reshape(inputs, (SUMS, SUM_BYTES, 2)))
        sums = tl.sum(low * even[None, :, :], 2) + tl.sum(high * odd[None, :, :], 2)
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
    BLOCK_BYTES: tl.constexpr, GATED: tl.constexpr, USE_PDL: tl.constexpr,
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

    inputs = _load_row(x, CHUNKS, 16 * PER_BYTE)
    if norm is not None:
        squares = inputs * inputs
        inputs *= _load_row(norm, CHUNKS, 16 * PER_BYTE)
    offsets = group_rows + sum_columns // GROUP
    acc = _multiply_tile(codes, inputs, group_scale, zero, offsets, FORMAT, BLOCK_N, CHUNKS, SUM_BYTES)
    for start in tl.range(BLOCK_BYTES, row_bytes, BLOCK_BYTES):
        codes = tl.load(w_ptrs + start, eviction_policy="evict_first")
        inputs = _load_row(x + start * PER_BYTE, CHUNKS, 16 * PER_BYTE)
        if norm is not None:
            squares += inputs * inputs
            inputs *= _load_row(norm + start * PER_BYTE, CHUNKS, 16 * PER_BYTE)
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
    BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    PER_BYTE: tl.constexpr = 2 if FORMAT == "int4" or FORMAT == "e2m1" else 1
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    mask = (row < n)[:, None] & (byte < row_bytes)[None, :]
    codes = tl.load(weight + row.to(tl.int64)[:, None] * row_bytes + byte[None, :], mask=mask)
    if row_scale is not None:
        factors = tl.load(row_scale + row, mask=row < n).to(tl.float32)[:, None]
    else:
        factors = tl.full([BLOCK_N, 1], 1.0, tl.float32)
    offsets = (row // ROW_BLOCK * groups)[:, None] + (byte * PER_BYTE // GROUP)[None, :]
    if group_scale is not None:
        factors *= _load_scales(group_scale + offsets, mask, FORMAT)
    if PER_BYTE == 2:
        if zero is not None:
            zeros = tl.load(zero + offsets, mask=mask).to(tl.float32)[:, :, None]
        else:
            zeros = tl.full([1, 1, 1], 8.0, tl.float32)
        low, high = _nibble_values(codes[:, :, None], zeros, FORMAT, tl.float32)
        values = tl.reshape(tl.join(low, high), (BLOCK_N, BLOCK_BYTES, 2)) * factors[:, :, None]
        values = tl.reshape(values, (BLOCK_N, BLOCK_BYTES * 2))
    else:
        values = _byte_values(codes, tl.float32) * factors
    column = tl.program_id(1) * BLOCK_BYTES * PER_BYTE + tl.arange(0, BLOCK_BYTES * PER_BYTE)
    out_mask = (row < n)[:, None] & (column < k)[None, :]
    out_ptrs = out + row.to(tl.int64)[:, None] * k + column[None, :]
    tl.store(out_ptrs, values.to(out.dtype.element_ty), mask=out_mask)


@ignore_comments
@triton.jit
def _slice_values(codes, zeros, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The values [slices, n, k] of a tile of codes."""
    if FORMAT == "int4" or FORMAT == "e2m1":
        low, high = _nibble_values(codes, zeros, FORMAT, DTYPE)
        values = tl.reshape(tl.join(low, high), (codes.shape[0], codes.shape[1], 2 * codes.shape[2]))
    else:
        values = _byte_values(codes, DTYPE)
    return values


@ignore_comments
@triton.jit
def _scaled_values(values, scales, FORMAT: tl.constexpr):
    """Values [slices, n, k] times the scales [slices, n, groups] of their columns, in the same dtype.

    Exact for nvfp4: a value has two significant bits, and a scale four. In float16 the product with a small scale would
    underflow, so the scale is multiplied by `_missing_factor` first.
    """
    shape: tl.constexpr = (values.shape[0], values.shape[1], scales.shape[2], values.shape[2] // scales.shape[2])
    tile = tl.reshape(values, shape)
    if values.dtype == tl.bfloat16:
        tile *= scales.to(tl.bfloat16)[:, :, :, None]
    else:
        factors = scales * _missing_factor(FORMAT, values.dtype)
        tile = (tile.to(tl.float32) * factors[:, :, :, None]).to(values.dtype)
    return tl.reshape(tile, values.shape)


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
        zeros = tl.load(zero + offsets).to(tl.float32)
    else:
        zeros = tl.full([1, 1], 8.0, tl.float32)

    acc = tl.zeros([K_SLICES, BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, k // WIDTH, K_SLICES):
        tile = tl.reshape(tl.load(w_ptrs + first * SLICE_BYTES), (BLOCK_N, K_SLICES, SLICE_BYTES))
        tile = tl.permute(tile, (1, 0, 2))
        inputs = tl.load(x_ptrs + first * WIDTH, mask=x_mask, other=0.0)
        weights = _slice_values(tile, zeros[:, :, None], FORMAT, DTYPE)
        # Too small for the pipeline of asynchronous copies, so they are loaded one step ahead.
        following = first + K_SLICES + k_slice
        offsets = group_rows + (following * WIDTH // GROUP)[:, None]
        in_row = (following < k // WIDTH)[:, None]
        if zero is not None:
            zeros = tl.load(zero + offsets, mask=in_row).to(tl.float32)
        if GROUPS > 1:
            acc += _multiply_slices(_scaled_values(weights, scales, FORMAT), inputs)
            scale_ptrs = group_scale + offsets[:, :, None] + tl.arange(0, GROUPS)[None, None, :]
            scales = _load_scales(scale_ptrs, in_row[:, :, None], FORMAT)
        elif group_scale is not None:
            acc += _multiply_slices(weights, inputs) * scales[:, :, None]
            scales = _load_scales(group_scale + offsets, in_row, FORMAT)
        else:
            acc += _multiply_slices(weights, inputs)

    y = tl.sum(acc, 0)
    if GROUPS == 1:
        y *= _missing_factor(FORMAT, DTYPE)
    if row_scale is not None:
        y *= row_scales[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF, BLOCK_M)), (1, 2, 0)))
        y = gate * tl.sigmoid(gate) * up
    y = tl.trans(y)
    if addend is not None:
        y += addend_tile.to(tl.float32)
    tl.store(out + row[:, None] * n + column[None, :], y.to(out.dtype.element_ty), mask=out_mask)
