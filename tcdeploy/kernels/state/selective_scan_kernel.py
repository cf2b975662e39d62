"""The Triton kernel of selective_scan.py, which launches it and explains the computation."""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.torch_compat.triton.source import ignore_comments

DO_NOT_SPECIALIZE = ["starts", "seq_lens", "slots", "tokens", "sequences"]


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _selective_scan_kernel(
    out, x, dt, b, c, a_log, d, state, starts, seq_lens, slots, tokens, sequences,
    x_stride, dt_stride, b_stride, c_stride,
    ALL_CHANNELS: tl.constexpr, HEAD_CHANNELS: tl.constexpr, STATE_SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    STATES: tl.constexpr, IS_ROWS: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """One program computes CHANNELS channels of one head, for all tokens of a sequence.

    With IS_ROWS, sequences are decode rows; in a mixed step, rows from starts[1] on have no token. Without IS_ROWS,
    padding tokens form an additional sequence, whose output is zero. With HAS_ROWS, the first sequence consists of the
    tokens of decode rows. This launch does not compute it; the one with IS_ROWS does.
    """
    sequence = tl.program_id(1)
    if IS_ROWS:
        if starts is not None:  # noqa: SIM102 - Triton evaluates the outer condition at compile time
            if sequence >= tl.load(starts + 1):
                return
        start, end = sequence, sequence + 1
        length = tl.load(seq_lens + sequence)
    else:
        if HAS_ROWS:  # noqa: SIM102
            if sequence == 0:
                return
        start = tl.load(starts + sequence)
        end = tl.load(starts + sequence + 1, mask=sequence < sequences, other=tokens)
        length = tl.load(seq_lens + sequence, mask=sequence < sequences, other=0)
    BLOCKS: tl.constexpr = (HEAD_CHANNELS + CHANNELS - 1) // CHANNELS  # of a head
    head = tl.program_id(0) // BLOCKS
    of_head = tl.program_id(0) % BLOCKS * CHANNELS + tl.arange(0, CHANNELS)
    mask = of_head < HEAD_CHANNELS
    channel = head * HEAD_CHANNELS + of_head
    if length == 0:
        for index in range(start, end):
            token = tl.full([1], index, tl.int64)
            zeros = tl.zeros([CHANNELS], out.dtype.element_ty)
            tl.store(out + token * ALL_CHANNELS + channel, zeros, mask=mask)
        return
    element = tl.arange(0, STATES)
    element_mask = element < STATE_SIZE
    cell = channel[:, None] * STATE_SIZE + element[None, :]
    cell_mask = mask[:, None] & element_mask[None, :]
    slot = tl.load(slots + sequence).to(tl.int64)
    cells = state + slot * ALL_CHANNELS * STATE_SIZE + cell
    h = tl.load(cells, mask=cell_mask & (length != end - start), other=0)
    rate = -tl.exp(tl.load(a_log + cell, mask=cell_mask, other=0).to(tl.float32))
    skip = tl.load(d + channel, mask=mask, other=0).to(tl.float32)
    group = head * STATE_SIZE + element
    for index in range(start, end):
        token = tl.full([1], index, tl.int64)
        value = tl.load(x + token * x_stride + channel, mask=mask, other=0).to(tl.float32)
        step = tl.load(dt + token * dt_stride + channel, mask=mask, other=0).to(tl.float32)
        key = tl.load(b + token * b_stride + group, mask=element_mask, other=0).to(tl.float32)
        query = tl.load(c + token * c_stride + group, mask=element_mask, other=0).to(tl.float32)
        step = tl.maximum(step, 0) + tl.log(1 + tl.exp(-tl.abs(step)))  # softplus
        h = tl.exp(rate * step[:, None]) * h + (step * value)[:, None] * key[None, :]
        result = tl.sum(h * query[None, :], 1) + skip * value
        tl.store(out + token * ALL_CHANNELS + channel, result.to(out.dtype.element_ty), mask=mask)
    tl.store(cells, h, mask=cell_mask)
