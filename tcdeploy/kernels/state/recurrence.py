"""Recurrences of layers that keep a matrix for each head: the computation of the ops `gated_delta` and `mamba2`.

A head keeps a matrix S [key_dim, value_dim] in float32. A token with the key k, the value v and the query q updates S,
and then its output is read from S:

    S = decay * S                  decay = exp(-exp(a_log) * dt), dt = softplus(a + dt_bias)
    S = S + k u                    delta rule: u = beta * (v - k S), beta = sigmoid(b)      Mamba-2: u = dt * v
    out = scale * (q S)            Mamba-2: + d * v

In the delta rule, k and q are normalised. On a CPU a recurrence is computed in plain torch, and on a GPU with the
kernels of recurrence_kernel.py. Decode rows take one kernel, which reads and writes each matrix once. Prompts are
computed CHUNK tokens at a time, by GEMMs. With G[i], the product of the decays of these tokens up to token i, the
corrections u of the delta rule are the solution of a triangular system (the WY form), and outputs and the new S follow
from u:

    (I + A) u = beta * (v - G * (k S))              A[i, j] = beta[i] * (k[i] k[j]) * G[i] / G[j], j < i
    out = scale * G * (q S) + P u                   P[i, j] = scale * (q[i] k[j]) * G[i] / G[j], j <= i
    S' = G[last] * S + (k * G[last] / G).T u

In Mamba-2, u is known without a system. In Kimi Delta Attention (KDA), each channel of a head's keys has its own decay.
Then G scales the rows of S, and the sums over channels in A and P have the factor G[i] / G[j] of each channel.

Two kernels compute this. The first computes P and the inverse of I + A, for all heads and tokens of a step at once. A
program of the second walks through a sequence with some columns of S in registers, since columns do not depend on each
other. Lengths are read on the device.

With the shape of Qwen3-Next on an H200, 256 decode rows take 275 us, at 3.9 TB/s (docs/performance.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.kernels.state.sequences import Sequences, chunks, decode_rows
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

STEP_KERNEL = Kernel("tcdeploy.kernels.state.recurrence_kernel", "_step_kernel")
SOLVE_KERNEL = Kernel("tcdeploy.kernels.state.recurrence_kernel", "_solve_kernel")
SCAN_KERNEL = Kernel("tcdeploy.kernels.state.recurrence_kernel", "_scan_kernel")
CHUNK = 64  # tokens
EPS = 1e-6  # of the normalisation of keys and queries
# Tuning constants. A program of the step kernel has `STEP_VALUES` columns of a matrix, or fewer if programs are few.
STEP_VALUES, STEP_WARPS, MIN_STEP_PROGRAMS = 32, 4, 512
SOLVE_KEYS, SOLVE_WARPS, SCAN_VALUES, SCAN_WARPS = 32, 4, 32, 8


class Layout(NamedTuple):
    """The columns of x, and the sizes of heads."""

    heads: int  # of values
    group: int  # consecutive heads of values that share a head of keys and queries
    key_dim: int
    value_dim: int
    query_column: int  # the first column of the queries
    key_column: int
    value_column: int
    by_channel: bool = False  # each channel of the keys of each head has a decay, instead of each head


class Inputs(NamedTuple):
    """The arguments of an op without its state. b: only in the delta rule; d: only in Mamba-2."""

    x: Tensor  # [tokens, columns], contiguous only in its last dimension: queries, keys and values
    layout: Layout
    a: Tensor  # [tokens, heads], or by channel [tokens, heads * key_dim]; contiguous only in its last dimension
    a_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads], or by channel [heads * key_dim]
    scale: float
    b: Tensor | None = None  # [tokens, heads]; contiguous only in its last dimension
    d: Tensor | None = None  # [heads]
    min_dt: float = 0.0
    max_dt: float = float("inf")
    max_beta: float = 1.0


def count_key_heads(columns: int, state: Tensor) -> int:
    """The heads of keys in x with this many columns. Raises ValueError unless heads of values are divided among them.

    The fakes of the ops call it too, so that the probe refuses a model whose heads do not fit together.
    """
    _, heads, key_dim, value_dim = state.shape
    count = (columns - heads * value_dim) // (2 * key_dim)
    if columns != heads * value_dim + 2 * count * key_dim or heads % count:
        raise ValueError(f"{heads} heads of values are not a multiple of {count} heads of keys, in {columns} columns")
    return count


def check_heads(heads: int, by_token: tuple[Tensor, ...], by_head: tuple[Tensor, ...]) -> None:
    """Raise ValueError unless these tensors [tokens, heads] and [heads] have a value for each head."""
    if any(tensor.shape[1:] != (heads,) for tensor in by_token) or any(tensor.shape != (heads,) for tensor in by_head):
        shapes = [tuple(tensor.shape[-2:]) for tensor in (*by_token, *by_head)]
        raise ValueError(f"the state has {heads} heads, and its gates, decays and biases have the shapes {shapes}")


def compute(inputs: Inputs, state: Tensor, sequences: Sequences) -> Tensor:
    """The outputs [tokens, heads, value_dim]. Updates state [slots, heads, key_dim, value_dim] float32 in place.

    The result is contiguous, and zero in padding rows.
    """
    tensors = (inputs.x, inputs.a, *(() if inputs.b is None else (inputs.b,)))
    assert all(tensor.stride(-1) == 1 for tensor in tensors) and state.is_contiguous()
    assert state.dtype == torch.float32 and (inputs.b is None) != (inputs.d is None)
    return (launch if inputs.x.is_cuda else compute_plainly)(inputs, state, sequences)


def compute_plainly(inputs: Inputs, state: Tensor, sequences: Sequences) -> Tensor:
    """As `compute`, in plain torch. Reads lengths on the host."""
    q, k, v, log_decay, beta = parts = _parts(inputs)
    is_delta = inputs.b is not None
    out = torch.zeros_like(v)
    for start, end, slot, is_new in chunks(sequences):
        matrix = torch.zeros_like(state[slot]) if is_new else state[slot]
        for first in range(start, end, CHUNK):
            part = slice(first, min(first + CHUNK, end))
            by_head = [states[part].transpose(0, 1) for states in parts]
            out[part], matrix = _chunk(matrix, is_delta, *by_head)
        state[slot] = matrix
    rows, row_slots, is_new_row = decode_rows(sequences, v)
    matrices = torch.where(is_new_row[:, None, None, None], 0, state[row_slots])
    out[rows], state[row_slots] = _step(matrices, is_delta, *(states[rows] for states in parts))
    if inputs.d is not None:
        used = out.new_zeros(len(v), 1, 1, dtype=torch.bool)
        used[rows] = True
        for start, end, *_ in chunks(sequences):
            used[start:end] = True
        out = torch.where(used, out + inputs.d.float()[:, None] * v, 0)
    return out.to(inputs.x.dtype)


def _parts(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In float32, by token and head of values: q (scaled), k, v, the log of the decay, and beta (dt in Mamba-2).

    The log of the decay is [tokens, heads, key_dim], or [tokens, heads, 1] if a head has one decay.
    """
    x, layout = inputs.x.float(), inputs.layout

    def keys(column: int) -> Tensor:
        states = x[:, column : column + layout.heads // layout.group * layout.key_dim].unflatten(
            1, (-1, layout.key_dim)
        )
        if inputs.b is not None:
            states = states * torch.rsqrt(states.square().sum(-1, keepdim=True) + EPS)
        return states.repeat_interleave(layout.group, dim=1)

    values = x[:, layout.value_column : layout.value_column + layout.heads * layout.value_dim]
    dt = functional.softplus(inputs.a.float() + inputs.dt_bias.float()).clamp(inputs.min_dt, inputs.max_dt)
    beta = dt if inputs.b is None else inputs.max_beta * inputs.b.float().sigmoid()
    log_decay = -inputs.a_log.float().exp()[:, None] * dt.unflatten(1, (layout.heads, -1))
    q, k = keys(layout.query_column) * inputs.scale, keys(layout.key_column)
    return q, k, values.unflatten(1, (-1, layout.value_dim)), log_decay, beta


def _step(
    matrices: Tensor, is_delta: bool, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: q and k [rows, heads, key_dim], v [rows, heads, value_dim] -> (outputs, new matrices)."""
    matrices = matrices * log_decay.exp()[..., None]
    error = v - (k[..., None] * matrices).sum(-2) if is_delta else v
    matrices = matrices + k[..., None] * (beta[..., None] * error)[..., None, :]
    return (q[..., None] * matrices).sum(-2), matrices


def _chunk(
    matrix: Tensor, is_delta: bool, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """At most CHUNK tokens: q and k [heads, tokens, key_dim] -> (outputs [tokens, heads, value_dim], new matrix)."""
    total = log_decay.cumsum(1)  # [heads, tokens, channels]
    grown = total.exp()
    correction = beta[..., None] * v
    if is_delta:
        system = (beta[..., None] * _decayed_products(k, k, total)).tril(-1)
        right = correction - beta[..., None] * ((grown * k) @ matrix)
        correction = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = (grown * q) @ matrix + _decayed_products(q, k, total) @ correction
    remaining = (total[:, -1:] - total).exp()
    return out.transpose(0, 1), grown[:, -1].unsqueeze(-1) * matrix + (k * remaining).mT @ correction


def _decayed_products(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """left[i] * right[j] decayed from token j to token i, for j <= i; else 0: [heads, tokens, tokens]."""
    past = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).tril()[..., None]
    decay = (total[:, :, None] - total[:, None]).where(past, -torch.inf).exp()  # [heads, tokens, tokens, channels]
    if total.shape[-1] == 1:
        return (left @ right.mT) * decay[..., 0]
    return torch.einsum("hic,hjc,hijc->hij", left, right, decay)


def launch(inputs: Inputs, state: Tensor, sequences: Sequences) -> Tensor:
    """As `compute`, with Triton kernels."""
    tokens, layout = len(inputs.x), inputs.layout
    out = inputs.x.new_empty(tokens, layout.heads, layout.value_dim)
    if sequences.starts is not None:
        _launch_chunks(out, inputs, state, sequences)
    if rows := sequences.launched_rows(tokens):
        _launch_rows(out, inputs, state, sequences, rows)
    return out


def _strides(inputs: Inputs) -> tuple[int, int, int]:
    """The strides of the tokens in x, a and b."""
    return inputs.x.stride(0), inputs.a.stride(0), 0 if inputs.b is None else inputs.b.stride(0)


def _launch_rows(out: Tensor, inputs: Inputs, state: Tensor, sequences: Sequences, rows: int) -> None:
    layout = inputs.layout
    values = min(STEP_VALUES, next_power_of_2(layout.value_dim))
    while values > 8 and rows * layout.heads * layout.value_dim // values < MIN_STEP_PROGRAMS:
        values //= 2
    STEP_KERNEL.launch(
        (-(-layout.value_dim // values), layout.heads, rows),
        out, inputs.x, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias, inputs.d, state,
        sequences.starts, sequences.row_seq_lens, sequences.row_slots,
        *_strides(inputs), inputs.min_dt, inputs.max_dt, inputs.max_beta, inputs.scale, EPS,
        *layout, inputs.b is not None, next_power_of_2(layout.key_dim), values, num_warps=STEP_WARPS,
    )  # fmt: skip


def _launch_chunks(out: Tensor, inputs: Inputs, state: Tensor, sequences: Sequences) -> None:
    """The first kernel stores its results by part: CHUNK tokens of a sequence, numbered as in `_sequence_of_part`."""
    starts, seq_lens, slots, *_ = sequences
    assert starts is not None and slots is not None
    x, layout, is_delta = inputs.x, inputs.layout, inputs.b is not None
    count = len(slots)
    parts = len(x) // CHUNK + count
    products = state.new_empty(parts, layout.heads, CHUNK, CHUNK)
    inverses = torch.empty_like(products) if is_delta else None
    keys = max(next_power_of_2(layout.key_dim), 16)
    totals = state.new_empty(parts, layout.heads, CHUNK, keys if layout.by_channel else 1)
    betas = state.new_empty(parts, layout.heads, CHUNK)
    constants = (*layout, is_delta, CHUNK, keys, x.dtype == torch.float32)
    SOLVE_KERNEL.launch(
        (layout.heads, parts),
        inverses, products, totals, betas, x, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias, starts, seq_lens, count,
        *_strides(inputs), inputs.min_dt, inputs.max_dt, inputs.max_beta, inputs.scale, EPS,
        *constants, min(SOLVE_KEYS, keys), CHUNK.bit_length() - 1, num_warps=SOLVE_WARPS, num_stages=1,
    )  # fmt: skip
    values = min(SCAN_VALUES, max(next_power_of_2(layout.value_dim), 16))
    SCAN_KERNEL.launch(
        (-(-layout.value_dim // values), layout.heads, count + 1),
        out, inverses, products, totals, betas, x, inputs.d, state, starts, seq_lens, slots, len(x), count,
        x.stride(0), inputs.scale, EPS, *constants, values, sequences.row_slots is not None,
        num_warps=SCAN_WARPS, num_stages=1,
    )  # fmt: skip
