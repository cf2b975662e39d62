"""The op `gated_delta`: the gated delta rule over packed sequences, with a decay per head, or per channel (KDA).

recurrence.py computes it.
"""

from __future__ import annotations

from torch import Tensor

from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.state import recurrence
from tcdeploy.kernels.state.recurrence import Inputs, Layout
from tcdeploy.kernels.state.sequences import Sequences


@custom_op("gated_delta", mutates_args=("state",))
def gated_delta(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    starts: Tensor | None, seq_lens: Tensor | None, slots: Tensor | None, host_scalars: Tensor | None,
    row_seq_lens: Tensor | None, row_slots: Tensor | None, max_beta: float = 1.0,
) -> Tensor:  # fmt: skip
    """The outputs [tokens, heads, value_dim] of qkv [tokens, columns]: queries, keys, and then values.

    Queries and keys may have fewer heads than values, each shared by consecutive heads of values. a [tokens, decays]
    and dt_bias [decays]: `decays` is heads for a decay per head, or heads * key_dim for a decay per channel of keys.
    b [tokens, heads]: beta is max_beta * sigmoid(b). a_log [heads]. state [slots, heads, key_dim, value_dim] float32 is
    updated in place. The others are those of `Sequences`. qkv, a and b must be contiguous only in their last dimension.
    The result is contiguous, and zero in padding rows.
    """
    sequences = Sequences(starts, seq_lens, slots, host_scalars, row_seq_lens, row_slots)
    return recurrence.compute(make_inputs(qkv, a, b, a_log, dt_bias, state, max_beta), state, sequences)


@gated_delta.register_fake
def _(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, *rest: object, **options: object
) -> Tensor:  # fmt: skip
    make_inputs(qkv, a, b, a_log, dt_bias, state)
    return qkv.new_empty(qkv.shape[0], state.shape[1], state.shape[3])


def make_inputs(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, max_beta: float = 1.0
) -> Inputs:
    """The arguments of the op, with the layout that their shapes determine."""
    _, heads, key_dim, _ = state.shape
    key_heads = recurrence.count_key_heads(qkv.shape[1], state)
    by_channel = a.shape[1] != heads
    recurrence.check_heads(heads, (b,), (a_log,))
    recurrence.check_heads(heads * key_dim if by_channel else heads, (a,), (dt_bias,))
    keys = key_heads * key_dim
    layout = Layout(heads, heads // key_heads, key_dim, state.shape[3], 0, keys, 2 * keys, by_channel)
    return Inputs(qkv, layout, a, a_log, dt_bias, key_dim**-0.5, b=b, max_beta=max_beta)
