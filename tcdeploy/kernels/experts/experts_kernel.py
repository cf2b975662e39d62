"""The Triton kernels that group pairs by expert, and the GEMM, which grouping.py and matmul.py launch and describe.

kernels/linear/scheme_codes.py converts bytes to values and reads scales. FORMAT is one of its formats, or "dense":
elements in the dtype of the inputs.
"""

# ruff: noqa: SIM108, SIM300 - a constexpr is not the constant of a comparison, and branches of Triton read better
from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.linear.scheme_codes import _load_scales, _scaled_values, _slice_values, _wait_for_dot
from tcdeploy.kernels.linear.scheme_kernel import _multiply_slices
from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit(do_not_specialize=["pairs", "blocks"])
def _group_pairs_kernel(
    groups, ids, pairs, blocks,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Groups all pairs in one program. PAIRS, EXPERTS and BLOCKS: their numbers, rounded up to powers of two."""
    index, expert, block = tl.arange(0, PAIRS), tl.arange(0, EXPERTS), tl.arange(0, BLOCKS)
    if USE_PDL:  # no memory access before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Padding entries count as the last pairs of the last expert.
    expert_ids = tl.load(ids + index, mask=index < pairs, other=EXPERTS - 1).to(tl.int32)
    keys = tl.sort(expert_ids * PAIRS + index)
    tl.store(groups + index, keys & (PAIRS - 1), mask=index < pairs)
    counts = tl.histogram(expert_ids, EXPERTS)
    counts -= tl.where(expert == EXPERTS - 1, PAIRS - pairs, 0)
    stops = tl.cumsum(counts, 0)
    starts = stops - counts
    blocks_of = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks_of, 0)
    table = groups + pairs
    for i in range(tl.max(blocks_of, 0)):  # the i-th block of each expert
        entry = table + ends - blocks_of + i
        tl.store(entry, expert, mask=i < blocks_of)
        tl.store(entry + blocks, starts + i * ROWS, mask=i < blocks_of)
        tl.store(entry + 2 * blocks, stops, mask=i < blocks_of)
    is_unused = (block >= tl.sum(blocks_of, 0)) & (block < blocks)
    for i in tl.static_range(3):
        tl.store(table + i * blocks + block, tl.zeros([BLOCKS], tl.int32), mask=is_unused)


@ignore_comments
@triton.jit(do_not_specialize=["pairs", "blocks"])
def _group_many_pairs_kernel(
    groups, ids, pairs, blocks, CHUNK: tl.constexpr, ENTRIES: tl.constexpr, ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program per expert, which reads the expert ids of all pairs twice: to count its pairs, and to write them."""
    expert, chunk = tl.program_id(0), tl.arange(0, CHUNK)
    if USE_PDL:  # no memory access before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    below, equal = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for first_pair in range(0, pairs, CHUNK):
        expert_ids = tl.load(ids + first_pair + chunk, mask=first_pair + chunk < pairs, other=0x7FFFFFFF)
        below += (expert_ids < expert).to(tl.int32)
        equal += (expert_ids == expert).to(tl.int32)
    start = tl.sum(below, 0)
    stop = start + tl.sum(equal, 0)

    # The range of entries depends on `start` and `stop` only, and those of two experts never overlap. A range may have
    # more entries than the expert has blocks: the others are empty.
    entry, last_entry = start // ROWS + expert, stop // ROWS + expert
    for i in range(entry, last_entry + 1, ENTRIES):
        entries = i + tl.arange(0, ENTRIES)
        table = groups + pairs + entries
        tl.store(table, tl.zeros([ENTRIES], tl.int32) + expert, mask=entries <= last_entry)
        first = tl.minimum(start + (entries - entry) * ROWS, stop)
        tl.store(table + blocks, first, mask=entries <= last_entry)
        tl.store(table + 2 * blocks, tl.zeros([ENTRIES], tl.int32) + stop, mask=entries <= last_entry)

    position = groups + start - 1
    for first_pair in range(0, pairs, CHUNK):
        expert_ids = tl.load(ids + first_pair + chunk, mask=first_pair + chunk < pairs, other=0x7FFFFFFF)
        is_equal = (expert_ids == expert).to(tl.int32)
        tl.store(position + tl.cumsum(is_equal, 0), first_pair + chunk, mask=is_equal > 0)
        position += tl.sum(is_equal, 0)


# Arguments that depend on the number of tokens are not specialised: otherwise a batch of 16 would recompile the kernel.
@ignore_comments
@triton.jit(do_not_specialize=["pairs", "blocks", "slots"])
def _expert_gemm_kernel(
    out, x, groups_table, weight, row_scale, group_scale, zero, bias, pairs, blocks, n, k, groups, slots, x_stride,
    expert_stride, w_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, K_SLICES: tl.constexpr, IS_WHOLE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    n_stride, k_stride = (1, w_stride) if IS_TRANSPOSED else (w_stride, 1)
    PER_BYTE: tl.constexpr = 2 if FORMAT == "int4" or FORMAT == "e2m1" else 1
    GROUPS: tl.constexpr = WIDTH // GROUP if WIDTH > GROUP else 1  # in a slice; if several, scales multiply the values
    STEP: tl.constexpr = K_SLICES * WIDTH
    STEP_BYTES: tl.constexpr = STEP // PER_BYTE
    DTYPE: tl.constexpr = x.dtype.element_ty
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_slice, byte = tl.arange(0, K_SLICES), tl.arange(0, STEP_BYTES)
    if USE_PDL:  # no memory access before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    table = groups_table + pairs + tl.program_id(1)
    expert, first, stop = tl.load(table).to(tl.int64), tl.load(table + blocks), tl.load(table + 2 * blocks)
    if first >= stop:
        return
    row = first + tl.arange(0, BLOCK_M)
    pair = tl.load(groups_table + row, mask=row < stop, other=0)
    w_ptrs = weight + expert * expert_stride + column[:, None] * n_stride + byte[None, :] * k_stride
    x_rows = x + (pair // slots).to(tl.int64) * x_stride
    w_row = expert * n + tl.minimum(column, n - 1)
    if bias is not None:  # loaded before the loop, which hides its latency
        biases = tl.load(bias + w_row).to(tl.float32)
    if row_scale is not None:
        row_scales = tl.load(row_scale + w_row).to(tl.float32)
    group_row = expert * ((n + ROW_BLOCK - 1) // ROW_BLOCK) + tl.minimum(column, n - 1) // ROW_BLOCK
    group_rows = (group_row * groups)[None, :]
    # Past the end of a row, the last scale is read again.
    offsets = group_rows + tl.minimum(k_slice * WIDTH // GROUP, groups - 1)[:, None]
    if GROUPS > 1:
        group = (k_slice * GROUPS)[:, None, None] + tl.arange(0, GROUPS)[None, None, :]
        scales = _load_scales(group_scale + group_rows[:, :, None] + tl.minimum(group, groups - 1), None, FORMAT)
    elif group_scale is not None:
        scales = _load_scales(group_scale + offsets, None, FORMAT)
    if zero is not None:
        zeros = tl.load(zero + offsets)[:, :, None]
    else:
        zeros = None

    if K_SLICES == 1:
        k_offsets = tl.arange(0, WIDTH)[None, :]
        x_ptrs, is_row = x_rows[:, None] + k_offsets, (row < stop)[:, None]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        k_offsets = k_slice[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
        x_ptrs, is_row = x_rows[None, :, None] + k_offsets, (row < stop)[None, :, None]
        acc = tl.zeros([K_SLICES, BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, k, STEP):
        if IS_WHOLE:
            tile = tl.load(w_ptrs + start // PER_BYTE * k_stride)
            inputs = tl.load(x_ptrs + start, mask=is_row, other=0.0)
        else:
            w_mask = (column < n)[:, None] & (byte < (k - start) // PER_BYTE)[None, :]
            tile = tl.load(w_ptrs + start // PER_BYTE * k_stride, mask=w_mask, other=0.0)
            inputs = tl.load(x_ptrs + start, mask=is_row & (k_offsets < k - start), other=0.0)
        if FORMAT == "dense" and K_SLICES == 1:
            weights = tile
        else:
            sliced = tl.permute(tl.reshape(tile, (BLOCK_N, K_SLICES, STEP_BYTES // K_SLICES)), (1, 0, 2))
            weights = _slice_values(sliced, zeros, FORMAT, DTYPE)
        if GROUPS > 1:
            weights = _scaled_values(weights, scales)
        # Scales and zero points are too small for asynchronous copies, so they are loaded one step ahead.
        offsets = group_rows + tl.minimum((start + STEP + k_slice * WIDTH) // GROUP, groups - 1)[:, None]
        if zero is not None:
            zeros = tl.load(zero + offsets)[:, :, None]
        if K_SLICES == 1:
            rows = tl.reshape(weights, (BLOCK_N, WIDTH))
            if GROUPS == 1 and group_scale is not None:
                acc += tl.dot(rows, tl.trans(inputs)) * tl.reshape(scales, (BLOCK_N, 1))
            elif FORMAT == "dense":
                acc = tl.dot(rows, tl.trans(inputs), acc)
            else:
                acc = _wait_for_dot(tl.dot(rows, tl.trans(inputs), acc))
        else:
            if GROUPS == 1 and group_scale is not None:
                acc += _multiply_slices(weights, inputs) * scales[:, :, None]
            else:
                acc = tl.dot(weights, tl.trans(inputs, 0, 2, 1), acc)
        if GROUPS > 1:
            following = (start + STEP) // GROUP + group
            scale_ptrs = group_scale + group_rows[:, :, None] + tl.minimum(following, groups - 1)
            scales = _load_scales(scale_ptrs, None, FORMAT)
        elif group_scale is not None:
            scales = _load_scales(group_scale + offsets, None, FORMAT)

    y = tl.sum(acc, 0) if K_SLICES > 1 else acc
    if row_scale is not None:
        y *= row_scales[:, None]
    if bias is not None:
        y += biases[:, None]
    out_ptrs = out + pair.to(tl.int64)[:, None] * n + column[None, :]
    out_mask = (row < stop)[:, None] & (column < n)[None, :]
    tl.store(out_ptrs, tl.trans(y).to(out.dtype.element_ty), mask=out_mask)
