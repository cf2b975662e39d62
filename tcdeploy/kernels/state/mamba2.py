"""The op `mamba2`: the recurrence of Mamba-2 over packed sequences. recurrence.py computes it."""

from __future__ import annotations

from torch import Tensor

from tcdeploy.kernels.custom_op import custom_op
from tcdeploy.kernels.state import recurrence
from tcdeploy.kernels.state.recurrence import Inputs, Layout
from tcdeploy.kernels.state.sequences import Sequences


@custom_op("mamba2", mutates_args=("state",))
def mamba2(
    xbc: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, d: Tensor, min_dt: float, max_dt: float, state: Tensor,
    starts: Tensor | None, seq_lens: Tensor | None, slots: Tensor | None, host_scalars: Tensor | None,
    row_seq_lens: Tensor | None, row_slots: Tensor | None,
) -> Tensor:  # fmt: skip
    """The outputs [tokens, heads, head_dim] of xbc [tokens, columns]: x, and then B and C of each group of heads.

    dt [tokens, heads]: before dt_bias and softplus, whose result is clamped to [min_dt, max_dt]. a_log, dt_bias and d
    [heads]; state [slots, heads, state_size, head_dim] float32 is updated in place. The other arguments are those of
    `Sequences`. xbc and dt must be contiguous only in their last dimension. The result is contiguous, and zero in
    padding rows.
    """
    sequences = Sequences(starts, seq_lens, slots, host_scalars, row_seq_lens, row_slots)
    return recurrence.compute(make_inputs(xbc, dt, a_log, dt_bias, d, min_dt, max_dt, state), state, sequences)


@mamba2.register_fake
def _(
    xbc: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, d: Tensor, min_dt: float, max_dt: float, state: Tensor,
    *rest: object,
) -> Tensor:  # fmt: skip
    make_inputs(xbc, dt, a_log, dt_bias, d, min_dt, max_dt, state)
    return xbc.new_empty(xbc.shape[0], state.shape[1], state.shape[3])


def make_inputs(
    xbc: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, d: Tensor, min_dt: float, max_dt: float, state: Tensor
) -> Inputs:
    """The arguments of the op, with the layout that their shapes determine."""
    _, heads, state_size, head_dim = state.shape
    groups = recurrence.count_key_heads(xbc.shape[1], state)
    recurrence.check_heads(heads, (dt,), (a_log, dt_bias, d))
    values = heads * head_dim
    layout = Layout(heads, heads // groups, state_size, head_dim, values + groups * state_size, values, 0)
    return Inputs(xbc, layout, dt, a_log, dt_bias, 1.0, d=d, min_dt=min_dt, max_dt=max_dt)
