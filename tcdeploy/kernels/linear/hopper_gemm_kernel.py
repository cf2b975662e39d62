"""The kernel of interleaved int4 weights for many rows on Hopper, which hopper_gemm.py launches.

It is written in Gluon, so that the tensor cores multiply the columns of a step while the threads make the
values of the next one. `tl.dot` would wait for the product first (scheme_codes._wait_for_dot).

Rejected: products of 16 columns at a time, between which the values of the next 16 are made: with 256 rows, 195 us
instead of 174 for the four products of a layer (H200). Equal shares of the columns of all tiles for each program: the
kernel that added the parts took 6 to 7 us per product.
"""

# ruff: noqa: SIM102, SIM108, SIM300 - a constexpr is not the constant of a comparison, and branches of Triton read better
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tcdeploy.kernels.linear.scheme_codes import _SCALED_BF16, _SCALED_F16, _pair
from tcdeploy.torch_compat.triton.source import ignore_comments

STEP = tl.constexpr(64)  # columns between two barriers
GROUP_STEPS = tl.constexpr(2)  # steps of 128 columns, which share a scale


@gluon.constexpr_function
def _words_layout(block_n, num_warps):
    """[block_n, 8] words of a step: a thread has those of two rows, 8 apart, from which it makes its operand."""
    powers = [16 << i for i in range((block_n // 16).bit_length() - 1)]
    warp_bits = num_warps.bit_length() - 1
    registers = [[8, 0], [0, 4], *([power, 0] for power in powers[warp_bits:])]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[power, 0] for power in powers[:warp_bits]], [], [block_n, 8])


@gluon.constexpr_function
def _out_layout(rows, block_m, num_warps, thread_rows):
    """[rows, block_m] sums, of which a thread has thread_rows neighbouring rows."""
    powers = [8 * thread_rows << i for i in range((rows // (8 * thread_rows)).bit_length() - 1)]
    warp_bits = num_warps.bit_length() - 1
    columns = [8 << i for i in range((block_m // 8).bit_length() - 1)]
    registers = [[1, 0]] * (thread_rows - 1) + [[0, 1], *([0, column] for column in columns)]
    registers += [[power, 0] for power in powers[warp_bits:]]
    lanes = [[0, 2], [0, 4], *([thread_rows << i, 0] for i in range(3))]
    warps = [[power, 0] for power in powers[:warp_bits]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, block_m])


@ignore_comments
@gluon.jit
def _operand(words, factors, MMA: gl.constexpr, DTYPE: gl.constexpr):
    """The values [n, 64] of words [n, 8], times the pairs `factors` [n]. Values stay in their threads."""
    PTX: gl.constexpr = _SCALED_BF16 if DTYPE == gl.bfloat16 else _SCALED_F16
    SHIFT: gl.constexpr = 0xC308C308 if DTYPE == gl.bfloat16 else 0xE408E408  # a pair of -8 - base, see scheme_codes.py
    shifts = gl.full([1, 1], SHIFT - 0x100000000, gl.int32, layout=words.type.layout)
    first, second, third, last = gl.inline_asm_elementwise(
        PTX, "=r,=r,=r,=r,r,r,r", [words, shifts, factors[:, None]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    first, second, third, last = _pair(first, DTYPE), _pair(second, DTYPE), _pair(third, DTYPE), _pair(last, DTYPE)
    values = gl.join(gl.join(first, third), gl.join(second, last))
    # n, 32 columns, t, column % 2, i // 2, i % 2, with the names of `int4_scheme.interleave`
    values = gl.reshape(values, (words.shape[0], words.shape[1] // 4, 4, 2, 2, 2))
    values = gl.reshape(gl.permute(values, (0, 1, 4, 5, 2, 3)), (words.shape[0], 8 * words.shape[1]))
    return gl.convert_layout(values, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@ignore_comments
@gluon.jit
def _load_factors(scale_ptrs, group, GROUP: gl.constexpr, DTYPE: gl.constexpr):
    """The scales of 128 columns in DTYPE, twice in each int32."""
    scales = gl.load(scale_ptrs + group * (STEP * GROUP_STEPS) // GROUP).to(DTYPE)
    return scales.to(gl.int16, bitcast=True).to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001


@ignore_comments
@gluon.jit
def _weight_rows(tile_row, n_tile, n, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """The rows of the weight in a tile. The two rows of a thread are neighbours, or a gate row and its up row."""
    i, is_second = tile_row % 8, tile_row // 8 % 2
    if GATED:
        rows = gl.minimum(n_tile * (BLOCK_N // 2) + tile_row // 16 * 8 + i, n // 2 - 1) + is_second * (n // 2)
    else:
        rows = gl.minimum(n_tile * BLOCK_N + tile_row // 16 * 16 + 2 * i + is_second, n - 1)
    return rows  # past the end: never stored


@ignore_comments
@gluon.jit
def _copy_step(x_stage, w_stage, x, weight, x_offsets, w_offsets, step, end):
    """Start the copies of the inputs of a step and of the codes of the next one."""
    x_ptrs, w_ptrs = x + (x_offsets + step * STEP), weight + (w_offsets + (step + 1) * (STEP // 8))
    async_copy.async_copy_global_to_shared(x_stage, x_ptrs, mask=step < end)
    async_copy.async_copy_global_to_shared(w_stage, w_ptrs, mask=step + 1 < end)
    async_copy.commit_group()


@ignore_comments
@gluon.jit
def _multiply(
    acc, x_stages, w_stages, x, weight, x_offsets, w_offsets, scale_ptrs, first, end, GROUP: gl.constexpr,
    SLOTS: gl.constexpr, MMA: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """acc [n, m] plus the products of groups `first` to `end` of 128 columns.

    Even and odd steps each have their own shared memory, of SLOTS stages. A step starts the copies of the step SLOTS
    later. With an odd SLOTS, these go to the memory that the step does not read, so that Triton does not add a barrier.
    They overwrite a slot that was last read SLOTS steps ago or earlier. After the barrier at the beginning of a step,
    only the product of the previous step may still run.
    """
    DTYPE: gl.constexpr = x.dtype.element_ty
    first_step, end_step = first * GROUP_STEPS, end * GROUP_STEPS
    factors = _load_factors(scale_ptrs, first, GROUP, DTYPE)
    async_copy.async_copy_global_to_shared(w_stages[0].index(0), weight + (w_offsets + first_step * (STEP // 8)))
    for i in gl.static_range(SLOTS):
        x_stage, w_stage = x_stages[i % 2].index(i // 2), w_stages[(i + 1) % 2].index((i + 1) // 2)
        _copy_step(x_stage, w_stage, x, weight, x_offsets, w_offsets, first_step + i, end_step)
    async_copy.wait_group(SLOTS - 1)
    operand = _operand(w_stages[0].index(0).load(WORDS), factors, MMA, DTYPE)
    slot = 0
    for group in range(first, end):
        next_factors = _load_factors(scale_ptrs, gl.minimum(group + 1, end - 1), GROUP, DTYPE)
        for i in gl.static_range(GROUP_STEPS):
            async_copy.wait_group(SLOTS - 1)
            x_stage = x_stages[(i + SLOTS) % 2].index((slot + (i + SLOTS) // 2) % SLOTS)
            w_stage = w_stages[(i + SLOTS + 1) % 2].index((slot + (i + SLOTS + 1) // 2) % SLOTS)
            _copy_step(x_stage, w_stage, x, weight, x_offsets, w_offsets, group * GROUP_STEPS + i + SLOTS, end_step)
            acc = warpgroup_mma(operand, x_stages[i].index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the tensor cores no longer read the previous operand
            words = w_stages[(i + 1) % 2].index((slot + i) % SLOTS).load(WORDS)
            if i == GROUP_STEPS - 1:
                factors = next_factors
            operand = _operand(words, factors, MMA, DTYPE)
        slot = (slot + 1) % SLOTS
    return warpgroup_mma_wait(0, deps=[acc])


@ignore_comments
@gluon.jit
def _load_addend(addend, stride, columns, rows, MMA: gl.constexpr, N: gl.constexpr, M: gl.constexpr):
    """`addend` [m, n] in the order of the sums [n, m]. `columns`, `rows`: how many are loaded; the others are 0."""
    OUT: gl.constexpr = _out_layout(N, M, gl.num_warps(), 2)
    column = gl.arange(0, N, layout=gl.SliceLayout(1, OUT))[:, None]
    row = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))[None, :]
    mask = (column < columns) & (row < rows)
    sums = gl.load(addend + (row * stride + column), mask=mask, other=0.0).to(gl.float32)
    sums = gl.reshape(gl.permute(gl.reshape(sums, (N // 16, 8, 2, M)), (0, 2, 1, 3)), (N, M))
    return gl.convert_layout(sums, MMA, assert_trivial=True)


@ignore_comments
@gluon.jit
def _store(target, acc, stride, columns, rows):
    """Store sums [n, m] at target [m, stride]. `columns`, `rows`: how many are stored."""
    N: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    OUT: gl.constexpr = _out_layout(N, M, gl.num_warps(), 2)
    sums = gl.reshape(gl.permute(gl.reshape(acc, (N // 16, 2, 8, M)), (0, 2, 1, 3)), (N, M))
    sums = gl.convert_layout(sums, OUT, assert_trivial=True)
    column = gl.arange(0, N, layout=gl.SliceLayout(1, OUT))[:, None]
    row = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))[None, :]
    mask = (column < columns) & (row < rows)
    gl.store(target + (row * stride + column), sums.to(target.dtype.element_ty), mask=mask)


@ignore_comments
@gluon.jit
def _store_gated(target, acc, stride, columns, rows):
    """Store silu of the gate rows times the up rows of sums [n, m] at target [m, stride]."""
    N: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    OUT: gl.constexpr = _out_layout(N // 2, M, gl.num_warps(), 1)
    pairs = gl.permute(gl.reshape(acc, (N // 16, 2, 8, M)), (0, 2, 3, 1))
    gate, up = gl.split(gl.reshape(pairs, (N // 2, M, 2)))
    products = gl.convert_layout(gate / (1.0 + gl.exp(-gate)) * up, OUT, assert_trivial=True)
    column = gl.arange(0, N // 2, layout=gl.SliceLayout(1, OUT))[:, None]
    row = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))[None, :]
    mask = (column < columns) & (row < rows)
    gl.store(target + (row * stride + column), products.to(target.dtype.element_ty), mask=mask)


@ignore_comments
@gluon.jit(do_not_specialize=["rows"])
def _hopper_gemm_kernel(
    out, x, weight, scales, addend, rows, n, k, splits, row_words, groups, x_stride, addend_stride,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    IS_SPLIT: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    NUM_WARPS: gl.constexpr = gl.num_warps()
    SLOTS: gl.constexpr = STAGES // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 16])
    WORDS: gl.constexpr = _words_layout(BLOCK_N, NUM_WARPS)
    X_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NUM_WARPS, 1], [1, 0])  # 16 bytes per thread
    W_COPY: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [NUM_WARPS, 1], [1, 0])
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    W_SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 4, 2, [1, 0])
    x_even = gl.allocate_shared_memory(x.dtype.element_ty, [SLOTS, BLOCK_M, STEP], X_SHARED)
    x_odd = gl.allocate_shared_memory(x.dtype.element_ty, [SLOTS, BLOCK_M, STEP], X_SHARED)
    w_even = gl.allocate_shared_memory(gl.int32, [SLOTS, BLOCK_N, STEP // 8], W_SHARED)
    w_odd = gl.allocate_shared_memory(gl.int32, [SLOTS, BLOCK_N, STEP // 8], W_SHARED)
    # Programs of the same rows of the weight are neighbours, so that the L2 cache serves all but the first.
    first_row, n_tile, part = gl.program_id(0) * BLOCK_M, gl.program_id(1), gl.program_id(2)
    all_groups = k // (STEP * GROUP_STEPS)
    first, end = part * all_groups // splits, (part + 1) * all_groups // splits
    # Rows past the batch are not stored. They repeat rows of x, because a mask takes an instruction for each copy.
    x_row = (first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, X_COPY))) % rows
    x_offsets = x_row[:, None] * x_stride + gl.arange(0, STEP, layout=gl.SliceLayout(0, X_COPY))[None, :]
    w_row = _weight_rows(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, W_COPY)), n_tile, n, BLOCK_N, GATED)
    word = gl.arange(0, STEP // 8, layout=gl.SliceLayout(0, W_COPY))
    w_offsets = w_row[:, None] * row_words + word[None, :]
    scale_row = _weight_rows(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, WORDS)), n_tile, n, BLOCK_N, GATED)
    column, tile_rows, first_row = n_tile * BLOCK_N, rows - first_row, first_row.to(gl.int64)
    if USE_PDL:  # no memory access before the wait
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [part],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if addend is None:
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    else:
        addend += first_row * addend_stride + column
        acc = _load_addend(addend, addend_stride, n - column, tile_rows, MMA, BLOCK_N, BLOCK_M)
    acc = _multiply(
        acc, (x_even, x_odd), (w_even, w_odd), x, weight, x_offsets, w_offsets, scales + scale_row * groups, first, end,
        GROUP, SLOTS, MMA, WORDS,
    )  # fmt: skip
    if IS_SPLIT:  # [splits, rows, n], gate and up in turn if GATED; another kernel adds them
        out += (part.to(gl.int64) * rows + first_row) * n + column
        _store(out, acc, n, n - column, tile_rows)
    elif GATED:
        width, column = n // 2, n_tile * (BLOCK_N // 2)
        _store_gated(out + (first_row * width + column), acc, width, width - column, tile_rows)
    else:
        _store(out + (first_row * n + column), acc, n, n - column, tile_rows)
