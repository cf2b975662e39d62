"""The Triton GEMVs of quantised experts, for few pairs; matmul.py launches and describes them.

A thread has the same 16 bytes of all rows of a tile, so it converts the inputs of these columns only once.

Latency limits products of one token, so the kernels of 4-bit codes and of the weighted sum issue all loads of a step
before its arithmetic. To save registers, the compiler would move the loads of scales and inputs behind the arithmetic
of the first rows, and a step would wait for memory two or three times. A barrier stops loads from moving past it, but
not arithmetic. So each conversion of codes also takes `blank`, which is always 0, but is computed from a value that is
loaded after the barrier. `_expert_gemv_kernel` has no barrier: FP8 was slower with one (docs/performance-log.md).
"""

# ruff: noqa: SIM108, SIM300 - a constexpr is not the constant of a comparison, and branches of Triton read better
from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.experts.gemv_kernel import _apply_swiglu, _columns
from tcdeploy.kernels.linear.scheme_codes import (
    HAS_PTX,
    _byte_values,
    _code_floats,
    _default_zero,
    _float_scales,
    _unit,
)
from tcdeploy.kernels.linear.scheme_kernel import _multiply_tile
from tcdeploy.torch_compat.triton.source import ignore_comments


def _expansion_ptx(format: str) -> list[str]:
    """PTX: 1 + c / 128 in float32 ($0 to $7) of the bytes c + 128 of `first` and `last`.

    As in scheme_codes.py, $0 to $3 are the low and $4 to $7 the high codes of four bytes.
    """
    if format == "int4":
        sources = [(word, byte) for word in ("first", "last") for byte in range(4)]
    else:
        sources = [(word, byte) for half in (0, 1) for word in ("first", "last") for byte in (half, half + 2)]
    return [f"prmt.b32 ${i}, {word}, top, 0x4{byte}55;" for i, (word, byte) in enumerate(sources)]


def _int4_ptx() -> str:
    """PTX: 1 + c / 128 of four bytes ($8). $9: `blank`."""
    lines = [
        ".reg .b32 mask, first, last, top;",
        "xor.b32 top, $9, 0x3F;",
        "xor.b32 mask, $9, 0x0F0F0F0F;",
        "lop3.b32 first, $8, mask, 0x80808080, 0xEA;",
        "shr.u32 last, $8, 4;",
        "lop3.b32 last, last, mask, 0x80808080, 0xEA;",
    ]
    return "{" + " ".join(lines + _expansion_ptx("int4")) + "}"


def _e2m1_ptx() -> str:
    """The same for e2m1, where c is 16 plus twice the value.

    `prmt`, with four codes as selectors, looks up twice their magnitudes in a table of bytes. For a selector of 8 or
    more, which is a negative code, it returns the top bit of the byte in all bits: 0. So of two look-ups, by a code and
    by the code with its sign inverted, one is 0, and the difference of both has the sign. The table and `top` are made
    from `blank`: as constants, they would be copied from uniform registers again and again.
    """
    lines = [
        ".reg .b32 table, negated, first, last, other, upper, top;",
        "xor.b32 top, $9, 0x3F;",
        "xor.b32 table, $9, 0x03020100;",
        "xor.b32 negated, $8, 0x88888888;",
        "shr.u32 upper, $8, 16;",
    ]
    for target, codes in (("first", "$8"), ("last", "upper")):
        lines += [
            f"prmt.b32 {target}, table, 0x0C080604, {codes};",
            "prmt.b32 other, table, 0x0C080604, negated;",
            f"sub.u32 {target}, {target}, other;",
            f"add.u32 {target}, {target}, 0x90909090;",
            "shr.u32 negated, negated, 16;",
        ]
    return "{" + " ".join(lines + _expansion_ptx("e2m1")) + "}"


_E2M1, _INT4 = tl.constexpr(_e2m1_ptx()), tl.constexpr(_int4_ptx())


@ignore_comments
@triton.jit
def _load_codes(pointers, byte, row_bytes, IS_WHOLE: tl.constexpr):
    """Codes that are read once; zero past the end of a row."""
    if IS_WHOLE:
        codes = tl.load(pointers, eviction_policy="evict_first")
    else:
        codes = tl.load(pointers, mask=byte < row_bytes, other=0.0, eviction_policy="evict_first")
    return codes


@ignore_comments
@triton.jit
def _load_chunks(pointers, mask, COLUMNS: tl.constexpr):
    """[chunks, COLUMNS] elements, consecutive from each pointer on; zeros where the mask is not set.

    Like `_load_row` of scheme_kernel.py, but with a mask. COLUMNS is 16 or 32. A thread loads 8 elements at once.
    """
    ptrs, mask = pointers[:, None] + tl.arange(0, 8)[None, :], mask[:, None]
    first, second = tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + 8, mask=mask, other=0.0)
    if COLUMNS == 32:
        third, fourth = tl.load(ptrs + 16, mask=mask, other=0.0), tl.load(ptrs + 24, mask=mask, other=0.0)
        eights = tl.permute(tl.join(tl.join(first, third), tl.join(second, fourth)), (0, 2, 3, 1))
    else:
        eights = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(eights, (pointers.shape[0], COLUMNS))


@ignore_comments
@triton.jit
def _floats(tile, blank, FORMAT: tl.constexpr):
    """1 + c / 128 of the low and of the high codes of bytes, in float32, as `_code_floats` returns them."""
    if HAS_PTX:
        PTX: tl.constexpr = _INT4 if FORMAT == "int4" else _E2M1
        low, high = tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r", [tile, blank], dtype=(tl.float32, tl.float32),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = _code_floats(tile, FORMAT)
    return low, high


@ignore_comments
@triton.jit
def _ordered(tile, blank):
    """The same bytes, which depend on `blank`."""
    if HAS_PTX:
        words = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r,r,r,r", [tile.to(tl.int8, bitcast=True), blank], dtype=tl.int8,
            is_pure=True, pack=4,
        )  # fmt: skip
        tile = words.to(tile.dtype, bitcast=True)
    return tile


@ignore_comments
@triton.jit
def _multiply_codes(
    codes, inputs, scales, zeros, blank,
    FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, SUM_BYTES: tl.constexpr,
):  # fmt: skip
    """`_multiply_tile` of scheme_kernel.py, with scales and zero points [sums, BLOCK_N] that are loaded already.

    In the transposed order they have the layout of the sums; others would be exchanged through shared memory.
    """
    SUMS: tl.constexpr = CHUNKS * 16 // SUM_BYTES
    tile = tl.reshape(codes, (BLOCK_N, SUMS, SUM_BYTES))
    columns = inputs.to(tl.float32)
    if FORMAT == "int4" or FORMAT == "e2m1":
        if zeros is not None:
            shifts = tl.trans(zeros).to(tl.float32)
        else:
            shifts = tl.full([1, 1], _default_zero(FORMAT), tl.float32)
        low, high = _floats(tile, blank, FORMAT)
        even, odd = tl.split(tl.reshape(columns, (SUMS, SUM_BYTES, 2)))
        sums = tl.sum(low * even[None, :, :], 2) + tl.sum(high * odd[None, :, :], 2)
        sums = (sums - tl.sum(even + odd, 1)[None, :] * (1.0 + shifts / 128.0)) * (128.0 * _unit(FORMAT))
    else:
        values = _byte_values(_ordered(tile, blank), tl.float32)
        sums = tl.sum(values * tl.reshape(columns, (SUMS, SUM_BYTES))[None, :, :], 2)
    if scales is not None:
        sums *= tl.trans(_float_scales(scales, FORMAT))
    return sums


@ignore_comments
@triton.jit(do_not_specialize=["slots"])
def _expert_gemv_kernel(
    out, x, ids, weight, row_scale, group_scale, zero, bias, n, row_bytes, groups, slots, x_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, GATED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """For formats with a column in each byte, whose groups have at least 16 columns."""
    CHUNKS: tl.constexpr = BLOCK_BYTES // 16
    pair = tl.program_id(0)
    column, w_column, out_columns = _columns(n, BLOCK_N, GATED)
    byte = tl.arange(0, BLOCK_BYTES)[None, :]
    sum_columns = tl.arange(0, CHUNKS)[None, :] * 16
    if USE_PDL:  # no memory access before the wait: the expert is not known
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(ids + pair)
    w_row = expert * n + w_column
    w_ptrs = weight + w_row[:, None] * row_bytes + byte
    group_rows = ((expert * ((n + ROW_BLOCK - 1) // ROW_BLOCK) + w_column // ROW_BLOCK) * groups)[:, None]
    chunk = tl.arange(0, CHUNKS)
    x_ptrs = x + (pair // slots).to(tl.int64) * x_stride + chunk * 16

    codes = _load_codes(w_ptrs, byte, row_bytes, False)
    if row_scale is not None:
        row_scales = tl.load(row_scale + w_row).to(tl.float32)
    if bias is not None:
        biases = tl.load(bias + w_row).to(tl.float32)
    inputs = _load_chunks(x_ptrs, chunk < row_bytes // 16, 16).to(tl.float32)
    # Past the end of a row, the last scale is read again.
    offsets = group_rows + tl.minimum(sum_columns // GROUP, groups - 1)
    acc = _multiply_tile(codes, inputs, group_scale, zero, offsets, FORMAT, BLOCK_N, CHUNKS, 16)
    for start in tl.range(BLOCK_BYTES, row_bytes, BLOCK_BYTES):
        codes = _load_codes(w_ptrs + start, byte, row_bytes - start, False)
        inputs = _load_chunks(x_ptrs + start, chunk < (row_bytes - start) // 16, 16).to(tl.float32)
        offsets = group_rows + tl.minimum((start + sum_columns) // GROUP, groups - 1)
        acc += _multiply_tile(codes, inputs, group_scale, zero, offsets, FORMAT, BLOCK_N, CHUNKS, 16)

    y = tl.sum(acc, 1)
    if row_scale is not None:
        y *= row_scales
    if bias is not None:
        y += biases
    y = _apply_swiglu(y, GATED)
    tl.store(out + pair.to(tl.int64) * out_columns + column, y.to(out.dtype.element_ty))


@ignore_comments
@triton.jit(do_not_specialize=["slots"])
def _expert_code_gemv_kernel(
    out, x, ids, weight, row_scale, group_scale, zero, bias, n, row_bytes, groups, slots, x_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, IS_WHOLE: tl.constexpr, GATED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """For formats with two columns in each byte. IS_WHOLE: whether row_bytes is a multiple of BLOCK_BYTES."""
    CHUNKS: tl.constexpr = BLOCK_BYTES // 16
    SUM_BYTES: tl.constexpr = 16 if GROUP >= 32 else GROUP // 2
    SUMS: tl.constexpr = BLOCK_BYTES // SUM_BYTES
    pair = tl.program_id(0)
    column, w_column, out_columns = _columns(n, BLOCK_N, GATED)
    byte = tl.arange(0, BLOCK_BYTES)[None, :]
    w_offsets = w_column[:, None] * row_bytes + byte  # in the weight of an expert
    group_rows = (w_column // ROW_BLOCK * groups)[None, :]
    sum_columns = tl.arange(0, SUMS)[:, None] * (2 * SUM_BYTES)
    if USE_PDL:  # no memory access before the wait: the expert is not known
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(ids + pair)
    w_row = expert * n + w_column
    w_ptrs = weight + expert * n * row_bytes + w_offsets
    first_group = expert * ((n + ROW_BLOCK - 1) // ROW_BLOCK) * groups
    chunk = tl.arange(0, CHUNKS)
    x_ptrs = x + (pair // slots).to(tl.int64) * x_stride + chunk * 32

    if row_scale is not None:
        row_scales = tl.load(row_scale + w_row).to(tl.float32)
    if bias is not None:
        biases = tl.load(bias + w_row).to(tl.float32)
    acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    for start in tl.range(0, row_bytes, BLOCK_BYTES):
        codes = _load_codes(w_ptrs + start, byte, row_bytes - start, IS_WHOLE)
        inputs = _load_chunks(x_ptrs + 2 * start, chunk < (row_bytes - start) // 16, 32)
        # Past the end of a row, the last scale is read again.
        offsets = group_rows + tl.minimum((2 * start + sum_columns) // GROUP, groups - 1)
        scales, zeros = None, None
        if group_scale is not None:
            scales = tl.load(group_scale + first_group + offsets)
        if zero is not None:
            zeros = tl.load(zero + first_group + offsets)
        tl.debug_barrier()
        blank = (tl.load(ids + pair) >> 62).to(tl.int32)
        acc += _multiply_codes(codes, inputs, scales, zeros, blank, FORMAT, BLOCK_N, CHUNKS, SUM_BYTES)

    y = tl.sum(acc, 1)
    if row_scale is not None:
        y *= row_scales
    if bias is not None:
        y += biases
    y = _apply_swiglu(y, GATED)
    tl.store(out + pair.to(tl.int64) * out_columns + column, y.to(out.dtype.element_ty))


@ignore_comments
@triton.jit
def _expert_gemv_sum_kernel(
    out, x, ids, factors, weight, row_scale, group_scale, zero, bias, addend, n, row_bytes, groups, x_stride,
    addend_stride, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_BYTES: tl.constexpr, IS_WHOLE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies the rows of all pairs of a token, as if they were one long row.

    SLOTS: TOP_K, rounded up to a power of two. IS_WHOLE: whether row_bytes is a multiple of BLOCK_BYTES.
    """
    PER_BYTE: tl.constexpr = 2 if FORMAT == "int4" or FORMAT == "e2m1" else 1
    CHUNKS: tl.constexpr = BLOCK_BYTES // 16
    SUM_BYTES: tl.constexpr = 16 if GROUP >= 16 * PER_BYTE else GROUP // PER_BYTE
    SUMS: tl.constexpr = BLOCK_BYTES // SUM_BYTES
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot, byte = tl.arange(0, SLOTS), tl.arange(0, BLOCK_BYTES)
    pairs = ids + token * TOP_K
    experts = tl.load(pairs + tl.minimum(slot, TOP_K - 1))
    # Built in two dimensions, so that each version of Triton gives a thread the same columns of all rows.
    w_starts = tl.reshape(experts[:, None] * n * row_bytes + byte[None, :], (SLOTS * BLOCK_BYTES,))
    w_starts = tl.max_contiguous(tl.multiple_of(w_starts, 16), 16)
    sum_byte = (tl.arange(0, SLOTS * BLOCK_BYTES) % BLOCK_BYTES)[None, :]
    w_ptrs = weight + w_starts[None, :] + column[:, None] * row_bytes
    codes = _load_codes(w_ptrs, sum_byte, row_bytes, IS_WHOLE)
    sum_slot = tl.arange(0, SLOTS * SUMS) // SUMS
    sum_columns = (tl.arange(0, SLOTS * SUMS) % SUMS * (SUM_BYTES * PER_BYTE))[:, None]
    sum_experts = tl.load(pairs + tl.minimum(sum_slot, TOP_K - 1))[:, None]
    first_groups = sum_experts * ((n + ROW_BLOCK - 1) // ROW_BLOCK) * groups
    group_rows = (column // ROW_BLOCK * groups)[None, :]
    # Past the end of a row, the last scale is read again.
    offsets = group_rows + tl.minimum(sum_columns // GROUP, groups - 1)
    scales, zeros = None, None
    if group_scale is not None:
        scales = tl.load(group_scale + first_groups + offsets)
    if zero is not None:
        zeros = tl.load(zero + first_groups + offsets)
    chunk = tl.arange(0, SLOTS * CHUNKS) % CHUNKS
    x_pairs = token * TOP_K + tl.minimum(tl.arange(0, SLOTS * CHUNKS) // CHUNKS, TOP_K - 1)
    x_ptrs = x + x_pairs * x_stride + chunk * (16 * PER_BYTE)
    if USE_PDL:  # before the wait the kernel accesses weights and ids only: see `expert_linear_sum` in ops.py
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sum_factors = tl.load(factors + token * TOP_K + sum_slot, mask=sum_slot < TOP_K, other=0.0).to(tl.float32)[None, :]
    if row_scale is not None:
        row_scales = tl.load(row_scale + sum_experts * n + column[None, :]).to(tl.float32)
    if bias is not None:
        bias_factors = tl.load(factors + token * TOP_K + slot, mask=slot < TOP_K, other=0.0).to(tl.float32)[:, None]
        biases = tl.load(bias + experts[:, None] * n + column[None, :]).to(tl.float32)
        total_bias = tl.sum(biases * bias_factors, 0)
    if addend is not None:
        addends = tl.load(addend + token * addend_stride + column).to(tl.float32)

    inputs = _load_chunks(x_ptrs, chunk < row_bytes // 16, 16 * PER_BYTE)
    tl.debug_barrier()
    blank = (tl.load(pairs) >> 62).to(tl.int32)
    acc = _multiply_codes(codes, inputs, scales, zeros, blank, FORMAT, BLOCK_N, SLOTS * CHUNKS, SUM_BYTES)
    for start in tl.range(BLOCK_BYTES, row_bytes, BLOCK_BYTES):
        codes = _load_codes(w_ptrs + start, sum_byte, row_bytes - start, IS_WHOLE)
        inputs = _load_chunks(x_ptrs + start * PER_BYTE, chunk < (row_bytes - start) // 16, 16 * PER_BYTE)
        offsets = group_rows + tl.minimum((start * PER_BYTE + sum_columns) // GROUP, groups - 1)
        scales, zeros = None, None
        if group_scale is not None:
            scales = tl.load(group_scale + first_groups + offsets)
        if zero is not None:
            zeros = tl.load(zero + first_groups + offsets)
        tl.debug_barrier()
        blank = (tl.load(pairs) >> 62).to(tl.int32)
        acc += _multiply_codes(codes, inputs, scales, zeros, blank, FORMAT, BLOCK_N, SLOTS * CHUNKS, SUM_BYTES)

    if row_scale is not None:
        acc *= tl.trans(row_scales)
    total = tl.sum(tl.where((sum_slot < TOP_K)[None, :], acc * sum_factors, 0.0), 1)
    if bias is not None:
        total += total_bias
    if addend is not None:
        total += addends
    tl.store(out + token * n + column, total.to(out.dtype.element_ty))
