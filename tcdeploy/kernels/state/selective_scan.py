"""The op `selective_scan`: the recurrence of Mamba 1 over packed sequences.

A channel keeps a vector h [state_size] in float32. A token with the value x and the vectors b and c updates h, and then
its output is read from h:

    h = exp(-exp(a_log) * dt) * h + dt * x * b          dt is softplus of the op's argument
    out = c h + d * x

Each element of h has its own decay, so GEMMs cannot compute a chunk of tokens, unlike in Mamba-2 (recurrence.py). On a
CPU the op computes one token after the other in plain torch. On a GPU it is one kernel. A program walks through a
sequence with h of some channels in registers; a decode row is a sequence of one token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.state.sequences import Sequences, chunks, decode_rows
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

KERNEL = Kernel("tcdeploy.kernels.state.selective_scan_kernel", "_selective_scan_kernel")
CHANNELS, WARPS = 32, 1  # of a program


@custom_op("selective_scan", mutates_args=("state",))
def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, d: Tensor, state: Tensor,
    starts: Tensor | None, seq_lens: Tensor | None, slots: Tensor | None, host_scalars: Tensor | None,
    row_seq_lens: Tensor | None, row_slots: Tensor | None,
) -> Tensor:  # fmt: skip
    """The outputs [tokens, channels] of x [tokens, channels].

    dt [tokens, channels], before softplus; b and c [tokens, heads * state_size], each head for channels / heads
    consecutive channels; a_log [channels, state_size]; d [channels]. state [slots, channels, state_size] float32 is
    updated in place. The other arguments are those of `Sequences`. The last dimension of x, dt, b and c must be
    contiguous. The result is contiguous, and zero in padding rows. Raises ValueError if shapes do not fit together.
    """
    _check_shapes(x, dt, b, c, a_log, d, state)
    assert all(tensor.stride(-1) == 1 for tensor in (x, dt, b, c))
    assert state.is_contiguous() and a_log.is_contiguous() and state.dtype == torch.float32
    sequences = Sequences(starts, seq_lens, slots, host_scalars, row_seq_lens, row_slots)
    return (launch if x.is_cuda else compute_plainly)(x, dt, b, c, a_log, d, state, sequences)


@selective_scan.register_fake
def _(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, d: Tensor, state: Tensor, *rest: object
) -> Tensor:  # fmt: skip
    _check_shapes(x, dt, b, c, a_log, d, state)
    return x.new_empty(x.shape)


def _check_shapes(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, d: Tensor, state: Tensor) -> None:
    """Raise ValueError if shapes do not fit together. The fake calls it too, so the probe refuses such a model."""
    _, channels, state_size = state.shape
    heads = b.shape[1] // state_size
    fits = x.shape == dt.shape and b.shape == c.shape and x.shape[1:] == d.shape == (channels,)
    if not fits or a_log.shape != state.shape[1:] or b.shape[1] != heads * state_size or channels % heads:
        shapes = [tuple(tensor.shape[-2:]) for tensor in (x, dt, b, c, a_log, d, state)]
        raise ValueError(f"shapes of a selective scan do not fit together: x, dt, b, c, a_log, d, state have {shapes}")


def compute_plainly(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, d: Tensor, state: Tensor, sequences: Sequences
) -> Tensor:
    """As the op, in plain torch. Reads lengths on the host."""
    _, channels, state_size = state.shape
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    rates, values, steps = -a_log.float().exp(), x.float(), functional.softplus(dt.float())
    # [tokens, heads, channels / heads, state_size]
    keys, queries = (
        states.float().unflatten(1, (-1, 1, state_size)).expand(-1, -1, channels * state_size // b.shape[1], -1)
        for states in (b, c)
    )

    def step(tokens: int | slice | Tensor, h: Tensor) -> Tensor:
        decay = (rates * steps[tokens][..., None]).exp()
        h = decay * h + (steps[tokens] * values[tokens])[..., None] * keys[tokens].flatten(-3, -2)
        out[tokens] = (h * queries[tokens].flatten(-3, -2)).sum(-1) + d.float() * values[tokens]
        return h

    for start, end, slot, is_new in chunks(sequences):
        h = torch.zeros_like(state[slot]) if is_new else state[slot]
        for token in range(start, end):
            h = step(token, h)
        state[slot] = h
    rows, row_slots, is_new_row = decode_rows(sequences, x)
    state[row_slots] = step(rows, torch.where(is_new_row[:, None, None], 0, state[row_slots]))
    return out.to(x.dtype)


def launch(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, d: Tensor, state: Tensor, sequences: Sequences
) -> Tensor:
    """As the op, with a Triton kernel."""
    (tokens, channels), state_size = x.shape, state.shape[2]
    out = x.new_empty(tokens, channels)
    starts, seq_lens, slots, _, row_seq_lens, row_slots = sequences
    heads = b.shape[1] // state_size
    programs = heads * -(-(channels // heads) // CHANNELS)
    tensors = (out, x, dt, b, c, a_log, d, state, starts)
    strides = (x.stride(0), dt.stride(0), b.stride(0), c.stride(0))
    sizes = (channels, channels // heads, state_size, CHANNELS, next_power_of_2(state_size))
    if starts is not None and slots is not None:
        KERNEL.launch(
            (programs, len(slots) + 1), *tensors, seq_lens, slots, tokens, len(slots), *strides, *sizes,
            False, row_slots is not None, num_warps=WARPS,
        )  # fmt: skip
    if rows := sequences.launched_rows(tokens):
        KERNEL.launch(
            (programs, rows), *tensors, row_seq_lens, row_slots, tokens, rows, *strides, *sizes,
            True, False, num_warps=WARPS,
        )  # fmt: skip
    return out
