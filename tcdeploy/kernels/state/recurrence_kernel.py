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
def _load_part(start, rows, row_mask, stride, part, KEY_DIM: tl.constexpr, PART: tl.constexpr):
    """PART columns from column `part` on: [rows, PART] in float32. Masked rows and columns are zero."""
    columns = part + tl.arange(0, PART)
    mask = row_mask[:, None] & (columns < KEY_DIM)[None, :]
    return tl.load(start + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0).to(tl.float32)


@ignore_comments
@triton.jit
def _joins(i, level):
    """A mask [i, i] of the products of token i with token j, if they are in a pair of blocks of 2**level tokens: token
    i in the second block, and token j in the first.
    """
    block = i >> level
    return (block[:, None] == block[None, :] + 1) & (block % 2 == 1)[:, None]


@ignore_comments
@triton.jit
def _products_by_head(
    queries, keys, token, mask, stride, total, eps,
    KEY_DIM: tl.constexpr, KEYS: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Two tensors [CHUNK, CHUNK]: (q[i] k[j]) G[i] / G[j] and, with DELTA, (k[i] k[j]) G[i] / G[j]; 0 for j > i."""
    products, squares = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    q_sum, k_sum = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for part in range(0, KEYS, PART):
        q = _load_part(queries, token, mask, stride, part, KEY_DIM, PART)
        k = _load_part(keys, token, mask, stride, part, KEY_DIM, PART)
        products = tl.dot(q, tl.trans(k), products, input_precision=PRECISION)
        if DELTA:
            squares = tl.dot(k, tl.trans(k), squares, input_precision=PRECISION)
            q_sum += tl.sum(q * q, 1)
            k_sum += tl.sum(k * k, 1)
    is_past = token[:, None] >= token[None, :]
    decay = tl.where(is_past, tl.exp(tl.where(is_past, total[:, None] - total[None, :], 0)), 0)
    if DELTA:
        k_norm = tl.rsqrt(k_sum + eps)
        decay *= k_norm[None, :]
        products *= tl.rsqrt(q_sum + eps)[:, None]
        squares *= k_norm[:, None]
    return products * decay, squares * decay


@ignore_comments
@triton.jit
def _products_by_channel(
    queries, keys, a, dt_bias, totals, token, mask, stride, a_stride, rate, min_dt, max_dt, eps,
    KEY_DIM: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_products_by_head`, with a decay per channel. The second tensor is 0 for j = i too. Stores log(G).

    G[i] / G[j] cannot be factored out of the products, and 1 / G[j] could overflow. For each pair of neighbouring
    blocks of 1, 2, 4, ... tokens, token i of the second block is therefore scaled by the decays from the border between
    them to i, and token j of the first block by those from j to the border. Neither exceeds 1.
    """
    products, squares = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    q_sum, k_sum, own = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    i = tl.arange(0, CHUNK)
    for part in range(0, KEYS, PART):
        column = part + tl.arange(0, PART)
        bias = tl.load(dt_bias + column, mask=column < KEY_DIM, other=0).to(tl.float32)
        x = _load_part(a, token, mask, a_stride, part, KEY_DIM, PART)
        dt = _time_step(x + bias[None, :], min_dt, max_dt)
        total = tl.cumsum(tl.where(mask[:, None], -rate * dt, 0), 0)
        tl.store(totals + i[:, None] * KEYS + column[None, :], total)
        tl.debug_barrier()  # before other threads read it
        q = _load_part(queries, token, mask, stride, part, KEY_DIM, PART)
        k = _load_part(keys, token, mask, stride, part, KEY_DIM, PART)
        q_sum += tl.sum(q * q, 1)
        k_sum += tl.sum(k * k, 1)
        own += tl.sum(q * k, 1)
        for level in range(LEVELS):
            border = (i >> (level + 1) << (level + 1)) + (1 << level) - 1  # the last token of the first block
            at_border = tl.load(totals + border[:, None] * KEYS + column[None, :])
            scaling = tl.exp(-tl.abs(total - at_border))
            scaled, joins = tl.trans(k * scaling), _joins(i, level)
            products += tl.where(joins, tl.dot(q * scaling, scaled, input_precision=PRECISION), 0)
            squares += tl.where(joins, tl.dot(k * scaling, scaled, input_precision=PRECISION), 0)
    q_norm, k_norm = tl.rsqrt(q_sum + eps), tl.rsqrt(k_sum + eps)
    products += tl.where(i[:, None] == i[None, :], own[:, None], 0)
    return products * q_norm[:, None] * k_norm[None, :], squares * k_norm[:, None] * k_norm[None, :]


@ignore_comments
@triton.jit
def _inverse(system, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """The inverse of I + A, where A is the part of `system` [CHUNK, CHUNK] below the diagonal.

    It is computed for diagonal blocks of 1, 2, 4, ... tokens. If X has the inverses of the blocks of one size, and B
    the parts of A that join two neighbouring blocks, then X - X B X has the inverses of the blocks of twice the size.
    This is as stable as forward substitution, unlike a sum of powers of A.
    """
    i = tl.arange(0, CHUNK)
    inverse = (i[:, None] == i[None, :]).to(tl.float32) - tl.where(_joins(i, 0), system, 0)
    for level in range(1, LEVELS):
        joining = tl.dot(tl.where(_joins(i, level), system, 0), inverse, input_precision="tf32x3")
        inverse -= tl.dot(inverse, joining, input_precision="tf32x3")
    return inverse


@ignore_comments
@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _solve_kernel(
    inverses, products, totals, betas, x, a, b, a_log, dt_bias, starts, seq_lens, sequences,
    x_stride, a_stride, b_stride, min_dt, max_dt, max_beta, scale, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERY_COLUMN: tl.constexpr, KEY_COLUMN: tl.constexpr, VALUE_COLUMN: tl.constexpr, BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, FLOAT32: tl.constexpr, PART: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """One program computes P, log(G) and beta for CHUNK tokens and one head, and with DELTA the inverse of I + A.

    It reads PART columns of keys and queries at a time.
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
    i = tl.arange(0, CHUNK)
    token, mask = first + i, first + i < end
    queries, keys = x + head // GROUP * KEY_DIM + QUERY_COLUMN, x + head // GROUP * KEY_DIM + KEY_COLUMN
    cell = (part.to(tl.int64) * HEADS + head) * CHUNK
    cells = cell * CHUNK + i[:, None] * CHUNK + i[None, :]
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    if BY_CHANNEL:
        beta = _beta(token, mask, head, b, b_stride, max_beta)
        product, system = _products_by_channel(
            queries, keys, a + head * KEY_DIM, dt_bias + head * KEY_DIM, totals + cell * KEYS, token, mask, x_stride,
            a_stride, rate, min_dt, max_dt, eps, KEY_DIM, KEYS, CHUNK, PART, LEVELS, PRECISION,
        )  # fmt: skip
    else:
        x_dt = tl.load(a + token.to(tl.int64) * a_stride + head, mask=mask, other=0).to(tl.float32)
        dt = _time_step(x_dt + tl.load(dt_bias + head).to(tl.float32), min_dt, max_dt)
        beta = dt if b is None else _beta(token, mask, head, b, b_stride, max_beta)
        total = tl.cumsum(tl.where(mask, -rate * dt, 0), 0)
        tl.store(totals + cell + i, total)
        product, system = _products_by_head(
            queries, keys, token, mask, x_stride, total, eps, KEY_DIM, KEYS, DELTA, CHUNK, PART, PRECISION
        )
    tl.store(betas + cell + i, beta)
    tl.store(products + cells, product * scale)
    if DELTA:
        tl.store(inverses + cells, _inverse(beta[:, None] * system, CHUNK, LEVELS))


@ignore_comments
@triton.jit
def _decays_to_end(total):
    """The decays from each token to the last one, and of the state up to the last one. total: log(G) [tokens, ...]."""
    last = tl.min(total, 0)  # log(G) of the last token: log decays are not positive
    return tl.exp(last - total), tl.exp(last)


@ignore_comments
@triton.jit
def _store_zeros(results, start, end, value_mask, stride, CHUNK: tl.constexpr, VALUES: tl.constexpr):
    """Write zeros as the outputs of the padding tokens [start, end)."""
    for first in range(start, end, CHUNK):
        token = first + tl.arange(0, CHUNK)
        cells = results + token.to(tl.int64)[:, None] * stride
        zeros = tl.zeros([CHUNK, VALUES], results.dtype.element_ty)
        tl.store(cells, zeros, mask=(token < end)[:, None] & value_mask[None, :])


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
        _store_zeros(results, start, end, value_mask, HEADS * VALUE_DIM, CHUNK, VALUES)
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
        else:
            total = tl.load(totals + cell + i)
            remaining, last_grown = _decays_to_end(total)
            remaining, total = remaining[:, None], total[:, None]
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
        if BY_CHANNEL:  # k is read again: there are too few registers to keep it beside `total`
            k = _load_keys(group + KEY_COLUMN, token, mask, x_stride, eps, KEY_DIM, KEYS, DELTA)
            remaining, last_grown = _decays_to_end(total)
            last_grown = last_grown[:, None]
        k *= remaining
        matrix = last_grown * matrix + tl.dot(tl.trans(k), correction, input_precision=PRECISION)
        cell += HEADS * CHUNK
    tl.store(matrix_cells, matrix, mask=matrix_mask)
