"""The op `gated_delta`: the gated delta rule over packed sequences, whose matrices are kept in slots.

A head keeps a matrix S [key_dim, value_dim] in float32. A token with the key k, the value v and the query q, of which k
and q are normalised, updates it and reads the output:

    S = decay * S                      decay = exp(-exp(a_log) * softplus(a + dt_bias))
    S = S + k (beta * (v - k S))       beta = sigmoid(b)
    out = q S / sqrt(key_dim)

On a CPU the op computes in plain torch, and on a GPU with the kernels of gated_delta_kernel.py. Decode rows take one
kernel, which reads and writes each matrix once. Chunks of prompts are computed CHUNK tokens at a time, in the WY form:
with the cumulative decays G of such tokens, their corrections u solve a triangular system, after which all is GEMMs:

    (I + A) u = beta * (v - G * (k S))              A[i, j] = beta[i] * (k[i] k[j]) * G[i] / G[j], j < i
    out = G * (q S) + P u                           P[i, j] = (q[i] k[j]) * G[i] / G[j], j <= i
    S' = G[last] * S + (k * G[last] / G).T u

Two kernels compute this. The first one inverts I + A, for all heads and tokens of a step at once; the second one walks
a sequence, with columns of S in registers, since columns are independent of each other. Lengths are read on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.state.sequences import Sequences, chunks, decode_rows
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

STEP_KERNEL = Kernel("tcdeploy.kernels.state.gated_delta_kernel", "_delta_step_kernel")
SOLVE_KERNEL = Kernel("tcdeploy.kernels.state.gated_delta_kernel", "_delta_solve_kernel")
SCAN_KERNEL = Kernel("tcdeploy.kernels.state.gated_delta_kernel", "_delta_scan_kernel")
CHUNK = 64  # tokens
EPS = 1e-6  # of the normalisation of keys and queries
# Tuning constants. A program of the step kernel has `STEP_VALUES` columns of a matrix, or fewer if programs are few.
STEP_VALUES, STEP_WARPS, MIN_STEP_PROGRAMS = 32, 4, 512
SOLVE_WARPS, SCAN_VALUES, SCAN_WARPS = 8, 32, 8


class _Sizes(NamedTuple):
    """Sizes of a call, from the shapes of its tensors."""

    heads: int  # of values
    key_dim: int
    value_dim: int
    group: int  # heads of values for each head of keys

    @property
    def keys(self) -> int:
        """Columns of all keys, and of all queries."""
        return self.heads // self.group * self.key_dim


def _sizes(qkv: Tensor, state: Tensor) -> _Sizes:
    _, heads, key_dim, value_dim = state.shape
    key_heads = (qkv.shape[1] - heads * value_dim) // (2 * key_dim)
    assert qkv.shape[1] == 2 * key_heads * key_dim + heads * value_dim and heads % key_heads == 0
    return _Sizes(heads, key_dim, value_dim, heads // key_heads)


@custom_op("gated_delta", mutates_args=("state",))
def gated_delta(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    starts: Tensor | None, seq_lens: Tensor | None, slots: Tensor | None, host_scalars: Tensor | None,
    row_seq_lens: Tensor | None, row_slots: Tensor | None,
) -> Tensor:  # fmt: skip
    """The outputs [tokens, heads, value_dim] of qkv [tokens, columns]: queries, keys, and then values.

    Queries and keys may have fewer heads than values, each for several that follow each other. a and b [tokens, heads];
    a_log and dt_bias [heads]; state [slots, heads, key_dim, value_dim] float32 is updated in place. The other arguments
    are those of `Sequences`. qkv, a and b must be contiguous only in their last dimension. Padding rows of the
    contiguous result are zero.
    """
    assert qkv.stride(-1) == a.stride(-1) == b.stride(-1) == 1 and state.is_contiguous()
    assert state.dtype == torch.float32
    sequences = Sequences(starts, seq_lens, slots, host_scalars, row_seq_lens, row_slots)
    compute = launch if qkv.is_cuda else compute_plainly
    return compute(qkv, a, b, a_log, dt_bias, state, sequences)


@gated_delta.register_fake
def _(qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, *rest: object) -> Tensor:
    return qkv.new_empty(qkv.shape[0], state.shape[1], state.shape[3])


def compute_plainly(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, sequences: Sequences
) -> Tensor:
    """As the op, in plain torch. Reads lengths on the host."""
    sizes = _sizes(qkv, state)
    q, k, v = qkv.float().split([sizes.keys, sizes.keys, sizes.heads * sizes.value_dim], dim=1)
    q, k = (_normalised(states.unflatten(1, (-1, sizes.key_dim)), sizes.group) for states in (q, k))
    v = v.unflatten(1, (-1, sizes.value_dim))
    q = q * sizes.key_dim**-0.5
    log_decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    beta = b.float().sigmoid()
    out = torch.zeros_like(v)
    for start, end, slot, is_new in chunks(sequences):
        matrix = torch.zeros_like(state[slot]) if is_new else state[slot]
        for first in range(start, end, CHUNK):
            part = slice(first, min(first + CHUNK, end))
            by_head = [states[part].transpose(0, 1) for states in (q, k, v, log_decay, beta)]
            out[part], matrix = _chunk(matrix, *by_head)
        state[slot] = matrix
    rows, row_slots, is_new_row = decode_rows(sequences, len(qkv))
    matrices = torch.where(is_new_row[:, None, None, None], 0, state[row_slots])
    of_rows = [states[rows] for states in (q, k, v, log_decay, beta)]
    out[rows], state[row_slots] = _step(matrices, *of_rows)
    return out.to(qkv.dtype)


def _normalised(states: Tensor, group: int) -> Tensor:
    """[tokens, key heads, dim] -> [tokens, heads, dim]."""
    states = states * torch.rsqrt(states.square().sum(-1, keepdim=True) + EPS)
    return states.repeat_interleave(group, dim=1)


def _step(matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row: q and k [rows, heads, key_dim], v [rows, heads, value_dim] -> (outputs, new matrices)."""
    matrices = matrices * log_decay.exp()[..., None, None]
    correction = beta[..., None] * (v - (k[..., None] * matrices).sum(-2))
    matrices = matrices + k[..., None] * correction[..., None, :]
    return (q[..., None] * matrices).sum(-2), matrices


def _chunk(matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """At most CHUNK tokens: q and k [heads, tokens, key_dim] -> (outputs [tokens, heads, value_dim], new matrix)."""
    total = log_decay.cumsum(-1)  # [heads, tokens]
    decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    grown = total.exp()[..., None]
    system = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    right = beta[..., None] * (v - grown * (k @ matrix))
    correction = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = grown * (q @ matrix) + ((q @ k.mT) * decay) @ correction
    remaining = (total[:, -1:] - total).exp()[..., None]
    return out.transpose(0, 1), grown[:, -1:] * matrix + (k * remaining).mT @ correction


def launch(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, sequences: Sequences
) -> Tensor:
    """As the op, with Triton kernels."""
    tokens, sizes = len(qkv), _sizes(qkv, state)
    out = qkv.new_empty(tokens, sizes.heads, sizes.value_dim)
    gates = (a, b, a_log, dt_bias)
    if sequences.starts is not None:
        _launch_chunks(out, qkv, gates, state, sizes, sequences)
    if rows := sequences.launched_rows(tokens):
        _launch_rows(out, qkv, gates, state, sizes, sequences, rows)
    return out


def _launch_rows(
    out: Tensor, qkv: Tensor, gates: tuple[Tensor, ...], state: Tensor, sizes: _Sizes, sequences: Sequences, rows: int
) -> None:
    values = min(STEP_VALUES, next_power_of_2(sizes.value_dim))
    while values > 8 and rows * sizes.heads * sizes.value_dim // values < MIN_STEP_PROGRAMS:
        values //= 2
    a, b, *_ = gates
    STEP_KERNEL.launch(
        (-(-sizes.value_dim // values), sizes.heads, rows),
        out, qkv, *gates, state, sequences.starts, sequences.row_seq_lens, sequences.row_slots,
        qkv.stride(0), a.stride(0), b.stride(0), EPS,
        sizes.heads, sizes.group, sizes.key_dim, sizes.value_dim, next_power_of_2(sizes.key_dim), values,
        num_warps=STEP_WARPS,
    )  # fmt: skip


def _launch_chunks(
    out: Tensor, qkv: Tensor, gates: tuple[Tensor, ...], state: Tensor, sizes: _Sizes, sequences: Sequences
) -> None:
    """The matrices of each CHUNK tokens lie at an index that is found like the tiles of prefill attention."""
    starts, seq_lens, slots, *_ = sequences
    assert starts is not None and slots is not None
    a, b, *_ = gates
    tokens, count = len(qkv), len(slots)
    parts = tokens // CHUNK + count
    inverses, products = state.new_empty(2, parts, sizes.heads, CHUNK, CHUNK)
    totals, betas = state.new_empty(2, parts, sizes.heads, CHUNK)
    key_block, is_float32 = max(next_power_of_2(sizes.key_dim), 16), qkv.dtype == torch.float32
    constants = (sizes.heads, sizes.group, sizes.key_dim, sizes.value_dim, CHUNK, key_block, is_float32)
    SOLVE_KERNEL.launch(
        (sizes.heads, parts),
        inverses, products, totals, betas, qkv, *gates, starts, seq_lens, count,
        qkv.stride(0), a.stride(0), b.stride(0), EPS, *constants, CHUNK.bit_length() - 1,
        num_warps=SOLVE_WARPS, num_stages=1,
    )  # fmt: skip
    values = min(SCAN_VALUES, max(next_power_of_2(sizes.value_dim), 16))
    SCAN_KERNEL.launch(
        (-(-sizes.value_dim // values), sizes.heads, count + 1),
        out, inverses, products, totals, betas, qkv, state, starts, seq_lens, slots, tokens, count,
        qkv.stride(0), EPS, *constants, values, sequences.row_slots is not None,
        num_warps=SCAN_WARPS, num_stages=1,
    )  # fmt: skip
