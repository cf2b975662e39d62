"""The Triton kernels of recurrence.py, which launches them and explains the computation.

In 16-bit models, operands of products are rounded to TF32 (10 bits of mantissa; bfloat16 has 7). In float32 models, and
for the inverse, they are split into TF32 terms, whose products are accurate to about 21 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.attention.prefill_kernel import _sequence_of_tile
from tcdeploy.torch_compat.triton.source import ignore_comments

DO_NOT_SPECIALIZE = ["starts", "seq_lens", "slots", "row_seq_lens", "row_slots", "tokens", "sequences"]


@ignore_comments
@triton.jit
def _time_step(x, min_dt, max_dt):
    dt = tl.maximum(x, 0) + tl.log(1 + tl.exp(-tl.abs(x)))  # softplus
    return tl.minimum(tl.maximum(dt, min_dt), max_dt)


@ignore_comments
@triton.jit
def _beta(token, mask, head, b, b_stride, max_beta):
    x = tl.load(b + token.to(tl.int64) * b_stride + head, mask=mask, other=0).to(tl.float32)
    return max_beta / (1 + tl.exp(-x))


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _step_kernel(
    out, x, a, b, a_log, dt_bias, d, state, starts, row_seq_lens, row_slots,
    x_stride, a_stride, b_stride, min_dt, max_dt, max_beta, scale, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERY_COLUMN: tl.constexpr, KEY_COLUMN: tl.constexpr, VALUE_COLUMN: tl.constexpr, BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One program updates VALUES columns of one head's matrix, for the token of a decode row.

    In a mixed step, rows from starts[1] on have no token.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    if starts is not None:  # noqa: SIM102 - Triton evaluates the outer condition at compile time
        if row >= tl.load(starts + 1):
            return
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    value_mask = value < VALUE_DIM
    length = tl.load(row_seq_lens + row)
    result = tl.zeros([VALUES], tl.float32)
    if length > 0:
        key = tl.arange(0, KEYS)
        key_mask = key < KEY_DIM
        slot = tl.load(row_slots + row).to(tl.int64)
        cells = state + (slot * HEADS + head) * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
        mask = key_mask[:, None] & value_mask[None, :]
        matrix = tl.load(cells, mask=mask & (length > 1), other=0)
        columns = x + row.to(tl.int64) * x_stride
        group = columns + head // GROUP * KEY_DIM + key
        q = tl.load(group + QUERY_COLUMN, mask=key_mask, other=0).to(tl.float32)
        k = tl.load(group + KEY_COLUMN, mask=key_mask, other=0).to(tl.float32)
        v = tl.load(columns + VALUE_COLUMN + head * VALUE_DIM + value, mask=value_mask, other=0).to(tl.float32)
        if DELTA:
            q *= tl.rsqrt(tl.sum(q * q, 0) + eps)
            k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
        if BY_CHANNEL:
            channel = head * KEY_DIM + key
            x_dt = tl.load(a + row.to(tl.int64) * a_stride + channel, mask=key_mask, other=0).to(tl.float32)
            dt = _time_step(x_dt + tl.load(dt_bias + channel, mask=key_mask, other=0).to(tl.float32), min_dt, max_dt)
            matrix *= tl.exp(-rate * dt)[:, None]
        else:
            x_dt = tl.load(a + row.to(tl.int64) * a_stride + head).to(tl.float32)
            dt = _time_step(x_dt + tl.load(dt_bias + head).to(tl.float32), min_dt, max_dt)
            matrix *= tl.exp(-rate * dt)
        beta = dt if b is None else _beta(row, True, head, b, b_stride, max_beta)
        correction = beta * v
        if DELTA:
            correction -= beta * tl.sum(matrix * k[:, None], 0)
        matrix += k[:, None] * correction[None, :]
        tl.store(cells, matrix, mask=mask)
        result = tl.sum(matrix * q[:, None], 0) * scale
        if d is not None:
            result += tl.load(d + head).to(tl.float32) * v
    tl.store(
        out + (row.to(tl.int64) * HEADS + head) * VALUE_DIM + value, result.to(out.dtype.element_ty), mask=value_mask
    )


@ignore_comments
@triton.jit
def _load_keys(start, rows, row_mask, stride, eps, KEY_DIM: tl.constexpr, KEYS: tl.constexpr, DELTA: tl.constexpr):
    """Keys or queries [rows, KEYS] in float32, with DELTA normalised; masked rows and columns are zero."""
    columns = tl.arange(0, KEYS)
    mask = row_mask[:, None] & (columns < KEY_DIM)[None, :]
    values = tl.load(start + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0).to(tl.float32)
    if DELTA:
        values *= tl.rsqrt(tl.sum(values * values, 1) + eps)[:, None]
    return values


@ignore_comments
@triton.jit
def _channel_time_steps(tokens, biases, column, mask, min_dt, max_dt, KEY_DIM: tl.constexpr, KEYS: tl.constexpr):
    """dt [tokens, KEYS]: of each channel of the keys of one head."""
    key = tl.arange(0, KEYS)
    x = tl.load(tokens[:, None] + column + key[None, :], mask=mask[:, None] & (key < KEY_DIM)[None, :], other=0)
    bias = tl.load(biases + key, mask=key < KEY_DIM, other=0).to(tl.float32)
    return _time_step(x.to(tl.float32) + bias[None, :], min_dt, max_dt)


@ignore_comments
@triton.jit
def _decays_to_border(log_decay, i, block, is_second):
    """The decays [tokens, KEYS] between each token and the border in the middle of its pair of blocks."""
    is_between = tl.where(is_second[:, None], i[:, None] >= i[None, :], i[:, None] < i[None, :])
    is_between &= block[:, None] == block[None, :]
    return tl.exp(tl.dot(is_between.to(tl.float32), log_decay, input_precision="tf32x3"))


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _solve_kernel(
    inverses, products, totals, betas, x, a, b, a_log, dt_bias, starts, seq_lens, sequences,
    x_stride, a_stride, b_stride, min_dt, max_dt, max_beta, scale, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERY_COLUMN: tl.constexpr, KEY_COLUMN: tl.constexpr, VALUE_COLUMN: tl.constexpr, BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, FLOAT32: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One program computes P, log(G) and beta for CHUNK tokens and one head, and with DELTA the inverse of I + A.

    With BY_CHANNEL, G[i] / G[j] cannot be factored out of the products of keys, and 1 / G[j] could overflow. Token i of
    a block is therefore scaled by the decays from the border between that block and the previous one to i, and token j
    of the previous block by those from j to the border. Neither exceeds 1.

    The inverse is computed for diagonal blocks of 1, 2, 4, ... tokens. If X has the inverses of the blocks of one size,
    and B the parts of A below the diagonal that join two neighbouring blocks, then X - X B X has the inverses of the
    blocks of twice the size. This is as stable as forward substitution, unlike a sum of powers of A.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of_tile(starts, part, sequences, CHUNK)
    if sequence >= sequences:
        return
    start, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    first = start + (part - sequence - start // CHUNK) * CHUNK
    if (first >= end) | (tl.load(seq_lens + sequence) == 0):
        return
    PRECISION: tl.constexpr = "tf32x3" if FLOAT32 else "tf32"
    i, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    token, mask = first + i, first + i < end
    group = x + head // GROUP * KEY_DIM
    k = _load_keys(group + KEY_COLUMN, token, mask, x_stride, eps, KEY_DIM, KEYS, DELTA)
    q = _load_keys(group + QUERY_COLUMN, token, mask, x_stride, eps, KEY_DIM, KEYS, DELTA)
    cell = (part.to(tl.int64) * HEADS + head) * CHUNK
    cells = cell * CHUNK + i[:, None] * CHUNK + i[None, :]
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    a += token.to(tl.int64) * a_stride
    if BY_CHANNEL:
        dt = _channel_time_steps(a, dt_bias + head * KEY_DIM, head * KEY_DIM, mask, min_dt, max_dt, KEY_DIM, KEYS)
        log_decay = tl.where(mask[:, None], -rate * dt, 0)
        tl.store(totals + (cell + i)[:, None] * KEYS + key[None, :], tl.cumsum(log_decay, 0))
        product = tl.where(i[:, None] == i[None, :], tl.sum(q * k, 1)[:, None], 0)
    else:
        x_dt = tl.load(a + head, mask=mask, other=0).to(tl.float32)
        dt = _time_step(x_dt + tl.load(dt_bias + head).to(tl.float32), min_dt, max_dt)
        total = tl.cumsum(tl.where(mask, -rate * dt, 0), 0)
        tl.store(totals + cell + i, total)
        is_past = i[:, None] >= i[None, :]
        decay = tl.exp(tl.where(is_past, total[:, None] - total[None, :], 0))
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        tl.store(products + cells, tl.where(is_past, product * decay, 0))
    beta = dt if b is None else _beta(token, mask, head, b, b_stride, max_beta)
    tl.store(betas + cell + i, beta)
    if DELTA:
        if not BY_CHANNEL:
            system = beta[:, None] * tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay
        inverse = (i[:, None] == i[None, :]).to(tl.float32)
        for level in range(LEVELS):
            block = i >> level
            is_second = block % 2 == 1
            joins = (block[:, None] == block[None, :] + 1) & is_second[:, None]
            if BY_CHANNEL:
                scaling = _decays_to_border(log_decay, i, block, is_second)
                scaled = tl.trans(k * scaling)
                product += tl.where(joins, tl.dot(q * scaling, scaled, input_precision=PRECISION), 0)
                joined = tl.where(joins, beta[:, None] * tl.dot(k * scaling, scaled, input_precision=PRECISION), 0)
            else:
                joined = tl.where(joins, system, 0)
            joining = tl.dot(joined, inverse, input_precision="tf32x3")
            inverse -= tl.dot(inverse, joining, input_precision="tf32x3")
        tl.store(inverses + cells, inverse)
        if BY_CHANNEL:
            tl.store(products + cells, product * scale)


@ignore_comments
@triton.jit
def _read(matrix, keys, total, factor, BY_CHANNEL: tl.constexpr, PRECISION: tl.constexpr):
    """factor times the products of keys or queries with the matrix, which has decayed by exp(total) at each token."""
    if BY_CHANNEL:
        values = factor * tl.dot(keys * tl.exp(total), matrix, input_precision=PRECISION)
    else:
        values = factor * tl.exp(total) * tl.dot(keys, matrix, input_precision=PRECISION)
    return values


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _scan_kernel(
    out, inverses, products, totals, betas, x, d, state, starts, seq_lens, slots, tokens, sequences,
    x_stride, scale, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERY_COLUMN: tl.constexpr, KEY_COLUMN: tl.constexpr, VALUE_COLUMN: tl.constexpr, BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, FLOAT32: tl.constexpr, VALUES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """One program walks through a sequence, with VALUES columns of one head's matrix.

    Padding tokens form an additional sequence, whose output is zero. With HAS_ROWS, the first sequence has the tokens
    of decode rows, whose outputs are not written.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    if HAS_ROWS:  # noqa: SIM102
        if sequence == 0:
            return
    start = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1, mask=sequence < sequences, other=tokens)
    length = tl.load(seq_lens + sequence, mask=sequence < sequences, other=0)
    PRECISION: tl.constexpr = "tf32x3" if FLOAT32 else "tf32"
    i, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    value_mask = value < VALUE_DIM
    results = out + head * VALUE_DIM + value[None, :]
    if length == 0:
        for first in range(start, end, CHUNK):
            token = first + i
            cells = results + token.to(tl.int64)[:, None] * (HEADS * VALUE_DIM)
            zeros = tl.zeros([CHUNK, VALUES], out.dtype.element_ty)
            tl.store(cells, zeros, mask=(token < end)[:, None] & value_mask[None, :])
        return
    slot = tl.load(slots + sequence).to(tl.int64)
    matrix_cells = state + (slot * HEADS + head) * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    matrix_mask = (key < KEY_DIM)[:, None] & value_mask[None, :]
    matrix = tl.load(matrix_cells, mask=matrix_mask & (length != end - start), other=0)
    group = x + head // GROUP * KEY_DIM
    values = x + VALUE_COLUMN + head * VALUE_DIM + value[None, :]
    cell = ((start // CHUNK + sequence).to(tl.int64) * HEADS + head) * CHUNK
    for first in range(start, end, CHUNK):
        token = first + i
        mask = token < end
        k = _load_keys(group + KEY_COLUMN, token, mask, x_stride, eps, KEY_DIM, KEYS, DELTA)
        q = _load_keys(group + QUERY_COLUMN, token, mask, x_stride, eps, KEY_DIM, KEYS, DELTA)
        beta = tl.load(betas + cell + i)
        if BY_CHANNEL:
            total = tl.load(totals + (cell + i)[:, None] * KEYS + key[None, :])
            last = tl.min(total, 0)  # log(G) of the last token: log decays are not positive
            remaining, last_grown = tl.exp(last[None, :] - total), tl.exp(last)[:, None]
        else:
            total = tl.load(totals + cell + i)
            last = tl.min(total, 0)
            remaining, last_grown, total = tl.exp(last - total)[:, None], tl.exp(last), total[:, None]
        squares = cell * CHUNK + i[:, None] * CHUNK + i[None, :]
        v_mask = mask[:, None] & value_mask[None, :]
        v = tl.load(values + token.to(tl.int64)[:, None] * x_stride, mask=v_mask, other=0).to(tl.float32)
        correction = beta[:, None] * v
        if DELTA:
            correction -= _read(matrix, k, total, beta[:, None], BY_CHANNEL, PRECISION)
            correction = tl.dot(tl.load(inverses + squares), correction, input_precision=PRECISION)
        result = _read(matrix, q, total, scale, BY_CHANNEL, PRECISION)
        result += tl.dot(tl.load(products + squares), correction, input_precision=PRECISION)
        if d is not None:
            result += tl.load(d + head).to(tl.float32) * v
        cells = results + token.to(tl.int64)[:, None] * (HEADS * VALUE_DIM)
        tl.store(cells, result.to(out.dtype.element_ty), mask=v_mask)
        k *= remaining
        matrix = last_grown * matrix + tl.dot(tl.trans(k), correction, input_precision=PRECISION)
        cell += HEADS * CHUNK
    tl.store(matrix_cells, matrix, mask=matrix_mask)
