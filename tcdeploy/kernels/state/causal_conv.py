"""The op `causal_conv`: a depthwise causal convolution over packed sequences, whose last inputs are kept in slots.

A slot has the last `width - 1` inputs of its sequence, oldest first, as [width - 1, channels]: neighbouring channels
lie next to each other, as in the input. On a CPU the op computes in plain torch, and on a GPU with the kernels of
causal_conv_kernel.py:

- Decode rows: one kernel computes the output and shifts the slot.
- Chunks of prompts: one kernel computes all outputs and reads the slots, so a second one writes them. A token finds its
  sequence by counting the sequences that end before it, so the launch does not depend on lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.state.sequences import Sequences, chunks, decode_rows
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

ACTIVATIONS = ("", "silu")
STEP_KERNEL = Kernel("tcdeploy.kernels.state.causal_conv_kernel", "_conv_step_kernel")
CHUNK_KERNEL = Kernel("tcdeploy.kernels.state.causal_conv_kernel", "_conv_chunk_kernel")
TAIL_KERNEL = Kernel("tcdeploy.kernels.state.causal_conv_kernel", "_conv_tail_kernel")
STEP_CHANNELS, CHUNK_TOKENS, CHUNK_CHANNELS, TAIL_CHANNELS, WARPS = 256, 16, 128, 256, 4


@custom_op("causal_conv", mutates_args=("state",))
def causal_conv(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str,
    starts: Tensor | None, seq_lens: Tensor | None, slots: Tensor | None, host_scalars: Tensor | None,
    row_seq_lens: Tensor | None, row_slots: Tensor | None,
) -> Tensor:  # fmt: skip
    """Convolves x [tokens, channels] with weight [channels, width]: each token and the `width - 1` before it.

    state [slots, width - 1, channels] is updated in place; bias [channels]; activation is "" or "silu". The other
    arguments are those of `Sequences`. x must be contiguous only in its last dimension. Sums are float32. The result is
    contiguous, and zero in padding rows.
    """
    _check_shapes(x, state, weight)
    assert activation in ACTIVATIONS and x.stride(-1) == 1 and state.is_contiguous() and weight.is_contiguous()
    sequences = Sequences(starts, seq_lens, slots, host_scalars, row_seq_lens, row_slots)
    compute = launch if x.is_cuda else compute_plainly
    return compute(x, state, weight, bias, activation, sequences)


@causal_conv.register_fake
def _(x: Tensor, state: Tensor, weight: Tensor, *rest: object) -> Tensor:
    _check_shapes(x, state, weight)
    return x.new_empty(x.shape)


def _check_shapes(x: Tensor, state: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless they fit together. The fake calls it too, so that the probe refuses such a model."""
    channels, width = weight.shape
    if x.shape[1] != channels or state.shape[1:] != (width - 1, channels):
        raise ValueError(
            f"a convolution of width {width} over {channels} channels cannot have inputs of {x.shape[1]} channels and "
            f"slots of {tuple(state.shape[1:])}"
        )


def compute_plainly(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str, sequences: Sequences
) -> Tensor:
    """As the op, in plain torch. Reads lengths on the host."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    for start, end, slot, is_new in chunks(sequences):
        tail = torch.zeros_like(state[slot]) if is_new else state[slot]
        inputs = torch.cat([tail, x[start:end]])  # [width - 1 + tokens, channels]
        out[start:end] = _convolve(inputs.unfold(0, width, 1), weight, bias, activation)
        state[slot] = inputs[len(inputs) - width + 1 :]
    rows, row_slots, is_new_row = decode_rows(sequences, x)
    tails = torch.where(is_new_row[:, None, None], 0, state[row_slots])
    windows = torch.cat([tails, x[rows, None]], dim=1)  # [rows, width, channels]
    out[rows] = _convolve(windows.transpose(1, 2), weight, bias, activation)
    state[row_slots] = windows[:, 1:]
    return out


def _convolve(windows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """windows [tokens, channels, width] -> [tokens, channels]."""
    out = (windows.float() * weight.float()).sum(-1)
    out = out if bias is None else out + bias.float()
    return (functional.silu(out) if activation else out).to(windows.dtype)


def launch(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str, sequences: Sequences
) -> Tensor:
    """As the op, with Triton kernels."""
    (tokens, channels), width = x.shape, weight.shape[1]
    out = x.new_empty(tokens, channels)
    starts, seq_lens, slots, _, row_seq_lens, row_slots = sequences
    rows, has_rows = sequences.launched_rows(tokens), row_slots is not None
    if starts is not None and slots is not None:
        CHUNK_KERNEL.launch(
            (-(-tokens // CHUNK_TOKENS), -(-channels // CHUNK_CHANNELS)),
            out, x, state, weight, bias, starts, seq_lens, slots, tokens, len(slots), x.stride(0), channels,
            width, CHUNK_TOKENS, CHUNK_CHANNELS, next_power_of_2(len(slots)), bool(activation), has_rows,
            num_warps=WARPS,
        )  # fmt: skip
        TAIL_KERNEL.launch(
            (len(slots), -(-channels // TAIL_CHANNELS)),
            x, state, starts, seq_lens, slots, x.stride(0), channels, width, TAIL_CHANNELS, num_warps=WARPS,
        )  # fmt: skip
    if rows:
        STEP_KERNEL.launch(
            (rows, -(-channels // STEP_CHANNELS)),
            out, x, state, weight, bias, starts, row_seq_lens, row_slots, x.stride(0), channels,
            width, STEP_CHANNELS, bool(activation), num_warps=WARPS,
        )  # fmt: skip
    return out
