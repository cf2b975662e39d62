"""The Triton kernel of int4 and FP8 weights whose values stay in registers, which register_gemm.py launches."""

# ruff: noqa: SIM108 - branches of Triton read better
from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.linear.scheme_codes import _fp8_fragment_values, _fragment_values, _wait_for_dot
from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def _int4_tile(words, scales, DTYPE: tl.constexpr):
    """The values [n, k] of words [n, k / 8], times `scales` [n], if not None. Values stay in their threads."""
    values = _fragment_values(words, scales, DTYPE)
    # n, 32 columns, t, column % 2, i // 2, i % 2, with the names of `int4_scheme.interleave`
    values = tl.reshape(values, (words.shape[0], words.shape[1] // 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(values, (0, 1, 4, 5, 2, 3)), (words.shape[0], 8 * words.shape[1]))


@ignore_comments
@triton.jit
def _fp8_tile(words, DTYPE: tl.constexpr):
    """The values [n, k] of words [n, k / 4], in the order of `_fp8_columns`. Values stay in their threads."""
    values = _fp8_fragment_values(words, DTYPE)
    values = tl.reshape(values, (words.shape[0], words.shape[1] // 16, 4, 4, 2, 2))
    return tl.reshape(tl.permute(values, (0, 1, 3, 4, 2, 5)), (words.shape[0], 4 * words.shape[1]))


@ignore_comments
@triton.jit
def _fp8_columns(BLOCK_K: tl.constexpr):
    """The columns of the values of `_fp8_tile`. Pairs of neighbouring columns stay together."""
    i = tl.arange(0, BLOCK_K)
    return i // 64 * 64 + i // 2 % 4 * 16 + i // 8 % 8 * 2 + i % 2


@ignore_comments
@triton.jit
def _load_inputs(pointers, is_row, FORMAT: tl.constexpr):
    """A tile of x. Rows past the batch are not stored.

    int4 weights with up to 16 rows of x mask them, which saves reads of x. Otherwise their pointers repeat rows of x,
    because a mask takes three instructions for each copy.
    """
    if FORMAT == "int4" and pointers.shape[0] == 16:
        inputs = tl.load(pointers, mask=is_row, other=0.0)
    else:
        inputs = tl.load(pointers)
    return inputs


@ignore_comments
@triton.jit
def _add_step(acc, words, inputs, scales, FORMAT: tl.constexpr, SCALES_VALUES: tl.constexpr):
    """acc [n, m] plus the product of words [n, words] and inputs [m, k], times `scales` [n], if not None."""
    DTYPE: tl.constexpr = inputs.dtype
    if FORMAT == "fp8":
        values = _fp8_tile(words, DTYPE)
    elif SCALES_VALUES and scales is not None:
        values = _int4_tile(words, scales.to(DTYPE), DTYPE)
    else:
        values = _int4_tile(words, None, DTYPE)
    if scales is None or SCALES_VALUES:
        acc = _wait_for_dot(tl.dot(values, tl.trans(inputs), acc))
    else:
        acc += tl.dot(values, tl.trans(inputs)) * scales.to(tl.float32)[:, None]
    return acc


@ignore_comments
@triton.jit(do_not_specialize=["rows"])
def _register_gemm_kernel(
    out, x, weight, row_scale, group_scale, addend, rows, n, k, splits, row_words, groups, x_stride, addend_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GATED: tl.constexpr, IS_SPLIT: tl.constexpr, SCALES_VALUES: tl.constexpr,
    UNROLL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    PER_WORD: tl.constexpr = 4 if FORMAT == "fp8" else 8
    # Programs of the same rows of the weight are neighbours, so that the L2 cache serves all but the first.
    n_tile, part, steps = tl.program_id(1), tl.program_id(2), k // (BLOCK_K * UNROLL)
    first_row, row, tile_row = tl.program_id(0) * BLOCK_M, tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    first, end = part * steps // splits * (BLOCK_K * UNROLL), (part + 1) * steps // splits * (BLOCK_K * UNROLL)
    if GATED:  # eight gate rows, then their up rows: a thread has the sums of both
        n //= 2
        half_row = n_tile * (BLOCK_N // 2) + tile_row // 16 * 8 + tile_row % 8
        w_row = tl.minimum(half_row, n - 1) + tile_row // 8 % 2 * n
    else:
        w_row = tl.minimum(n_tile * BLOCK_N + tile_row, n - 1)  # past the end: never stored
    word = tl.arange(0, BLOCK_K // PER_WORD)
    w_ptrs = weight + w_row.to(tl.int64)[:, None] * row_words + word[None, :]
    columns = _fp8_columns(BLOCK_K) if FORMAT == "fp8" else tl.arange(0, BLOCK_K)
    is_row = (first_row + row < rows)[:, None]
    x_offsets = ((first_row + row) % rows)[:, None] * x_stride + columns[None, :]
    if USE_PDL:  # no memory access before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(first, end, BLOCK_K * UNROLL):
        for step in tl.static_range(UNROLL):
            column = start + step * BLOCK_K
            words = tl.load(w_ptrs + column // PER_WORD)
            inputs = _load_inputs(x + (x_offsets + column), is_row, FORMAT)
            if group_scale is not None:
                scales = tl.load(group_scale + w_row // ROW_BLOCK * groups + column // GROUP)
            else:
                scales = None
            acc = _add_step(acc, words, inputs, scales, FORMAT, SCALES_VALUES)

    if row_scale is not None:
        acc *= tl.load(row_scale + w_row).to(tl.float32)[:, None]
    is_row = (row < rows - first_row)[None, :]
    if IS_SPLIT:  # [splits, rows, n], gate and up in turn if GATED; another kernel adds them
        n_all = n * 2 if GATED else n
        column = n_tile * BLOCK_N + tile_row
        if GATED:
            column = n_tile * BLOCK_N + tile_row // 16 * 16 + tile_row % 8 * 2 + tile_row // 8 % 2
        mask = (column < n_all)[:, None] & is_row
        out += (part.to(tl.int64) * rows + first_row) * n_all
        tl.store(out + row[None, :] * n_all + column[:, None], acc.to(out.dtype.element_ty), mask=mask)
    else:
        if GATED:
            pairs = tl.permute(tl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
            gate, up = tl.split(tl.reshape(pairs, (BLOCK_N // 2, BLOCK_M, 2)))
            acc = gate * tl.sigmoid(gate) * up
            column = n_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        else:
            column = n_tile * BLOCK_N + tile_row
        mask = (column < n)[:, None] & is_row
        if addend is not None:
            addend_ptrs = addend + first_row.to(tl.int64) * addend_stride + row[None, :] * addend_stride
            acc += tl.load(addend_ptrs + column[:, None], mask=mask, other=0.0).to(tl.float32)
        out += first_row.to(tl.int64) * n
        tl.store(out + row[None, :] * n + column[:, None], acc.to(out.dtype.element_ty), mask=mask)
