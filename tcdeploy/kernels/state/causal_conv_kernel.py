"""The Triton kernels of causal_conv.py, which launches them.

Taps of the convolution are accumulated in float32, from the oldest input to the newest. A slot is shifted in place: a
thread owns the same channels in all positions, and stores a position after it has loaded it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.torch_compat.triton.source import ignore_comments

DO_NOT_SPECIALIZE = ["starts", "seq_lens", "slots", "row_seq_lens", "row_slots", "tokens", "sequences"]


@ignore_comments
@triton.jit
def _activate(acc, bias, channel, mask, SILU: tl.constexpr):
    """acc + bias, and SiLU. `acc` [channels] or [tokens, channels]."""
    if bias is not None:
        acc += tl.load(bias + channel, mask=mask, other=0).to(tl.float32)
    if SILU:
        acc = acc / (1 + tl.exp(-acc))
    return acc


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _conv_step_kernel(
    out, x, state, weight, bias, starts, row_seq_lens, row_slots, x_stride, channels,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """One program computes CHANNELS channels of a decode row. In a mixed step, rows from starts[1] on have no token."""
    row = tl.program_id(0)
    if starts is not None:  # noqa: SIM102 - Triton evaluates the outer condition at compile time
        if row >= tl.load(starts + 1):
            return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    length = tl.load(row_seq_lens + row)
    acc = tl.zeros([CHANNELS], tl.float32)
    if length > 0:
        slot = state + tl.load(row_slots + row).to(tl.int64) * (WIDTH - 1) * channels + channel
        for tap in tl.static_range(WIDTH - 1):
            value = tl.load(slot + tap * channels, mask=mask & (length > 1), other=0)
            acc += value.to(tl.float32) * tl.load(weight + channel * WIDTH + tap, mask=mask, other=0).to(tl.float32)
            if tap > 0:
                tl.store(slot + (tap - 1) * channels, value, mask=mask)
        value = tl.load(x + row.to(tl.int64) * x_stride + channel, mask=mask, other=0)
        acc += value.to(tl.float32) * tl.load(weight + channel * WIDTH + WIDTH - 1, mask=mask, other=0).to(tl.float32)
        if WIDTH > 1:  # a convolution of width 1 keeps no inputs
            tl.store(slot + (WIDTH - 2) * channels, value.to(state.dtype.element_ty), mask=mask)
        acc = _activate(acc, bias, channel, mask, SILU)
    tl.store(out + row.to(tl.int64) * channels + channel, acc.to(out.dtype.element_ty), mask=mask)


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _conv_chunk_kernel(
    out, x, state, weight, bias, starts, seq_lens, slots, tokens, sequences, x_stride, channels,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SEQUENCES: tl.constexpr,
    SILU: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """One program computes TOKENS x CHANNELS outputs. Padding tokens follow the last sequence.

    With HAS_ROWS, the first sequence has the tokens of decode rows, whose outputs are not written.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    numbers = tl.arange(0, SEQUENCES)
    ends = tl.load(starts + 1 + numbers, mask=numbers < sequences, other=2147483647)
    sequence = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    is_known = sequence < sequences
    start = tl.load(starts + sequence, mask=is_known, other=0)
    end = tl.load(starts + sequence + 1, mask=is_known, other=0)
    length = tl.load(seq_lens + sequence, mask=is_known, other=0)
    is_used = length > 0
    is_continued = is_used & (length != end - start)
    slot = tl.load(slots + sequence, mask=is_known, other=0).to(tl.int64) * (WIDTH - 1)
    mask = channel < channels
    acc = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(WIDTH):
        source = token - (WIDTH - 1) + tap
        in_chunk = source >= start
        values = tl.load(
            x + source.to(tl.int64)[:, None] * x_stride + channel[None, :],
            mask=(is_used & in_chunk)[:, None] & mask[None, :], other=0,
        ).to(tl.float32)  # fmt: skip
        values += tl.load(
            state + (slot + source - start + WIDTH - 1)[:, None] * channels + channel[None, :],
            mask=(is_continued & (source < start))[:, None] & mask[None, :], other=0,
        ).to(tl.float32)  # fmt: skip
        acc += values * tl.load(weight + channel * WIDTH + tap, mask=mask, other=0).to(tl.float32)[None, :]
    acc = _activate(acc, bias, channel[None, :], mask[None, :], SILU)
    acc = tl.where(is_used[:, None], acc, 0)
    stored = token < tokens
    if HAS_ROWS:
        stored &= sequence > 0
    tl.store(
        out + token.to(tl.int64)[:, None] * channels + channel[None, :], acc.to(out.dtype.element_ty),
        mask=stored[:, None] & mask[None, :],
    )  # fmt: skip


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _conv_tail_kernel(
    x, state, starts, seq_lens, slots, x_stride, channels, WIDTH: tl.constexpr, CHANNELS: tl.constexpr
):
    """One program writes CHANNELS channels of a sequence's slot: the last inputs up to the end of its chunk."""
    sequence = tl.program_id(0)
    length = tl.load(seq_lens + sequence)
    if length > 0:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        mask = channel < channels
        start, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
        slot = state + tl.load(slots + sequence).to(tl.int64) * (WIDTH - 1) * channels + channel
        for tap in tl.static_range(WIDTH - 1):
            source = end - (WIDTH - 1) + tap
            is_old = (source < start) & (length != end - start)
            old = tl.load(slot + (source - start + WIDTH - 1).to(tl.int64) * channels, mask=mask & is_old, other=0)
            new = tl.load(x + source.to(tl.int64) * x_stride + channel, mask=mask & (source >= start), other=0)
            tl.store(slot + tap * channels, tl.where(is_old, old, new.to(state.dtype.element_ty)), mask=mask)
