"""The parity check finds faults in the state of hybrid models, and of the ops that compute with it.

Faults are planted in steps that run uncompiled, as in test_state_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import Tensor

from tcdeploy.errors import CompileError
from tcdeploy.kernels.state import causal_conv, recurrence, selective_scan
from tcdeploy.kernels.state.recurrence import Inputs
from tcdeploy.kernels.state.sequences import Sequences
from tests.hybrid_models import save_model
from tests.parity.test_state_faults import FAULTS, check

Compute = Callable[..., Tensor]
FAMILIES = ("qwen3_5_text", "kimi_linear", "bamba", "jamba")
recur, conv, scan = recurrence.compute_plainly, causal_conv.compute_plainly, selective_scan.compute_plainly


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {family: save_model(family, tmp_path_factory.mktemp("model")) for family in FAMILIES}


@pytest.fixture(scope="module")
def references() -> dict[str, list[Any]]:
    """By family; see test_state_faults.py."""
    return {family: [] for family in FAMILIES}


def changed(**changes: Callable[[Inputs], Any]) -> Compute:
    """The recurrence with other inputs."""

    def computed(inputs: Inputs, state: Tensor, sequences: Sequences) -> Tensor:
        return recur(inputs._replace(**{name: change(inputs) for name, change in changes.items()}), state, sequences)

    return computed


def only_in_decode_steps(faulty: Compute, right: Compute) -> Compute:
    return lambda *args: (faulty if args[-1].starts is None else right)(*args)


def twice(compute: Compute) -> Compute:
    """State is updated twice."""

    def computed(*args: Any) -> Tensor:
        compute(*args)
        return compute(*args)

    return computed


def one_tap_late(x: Tensor, state: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return conv(x, state, weight.roll(1, dims=1), *rest)


def one_token_late(x: Tensor, state: Tensor, *rest: Any) -> Tensor:
    """The slot has the inputs of one token earlier: the newest one is missing."""
    before = state.clone()
    out = conv(x, state, *rest)
    updated = (state != before).flatten(1).any(1)
    state[updated] = state[updated].roll(1, dims=1)
    return out


def without_state(compute: Compute) -> Compute:
    """Rows and chunks start from zeros."""

    def computed(x: Any, state: Tensor, *rest: Any) -> Tensor:
        saved = state.clone()
        state.zero_()
        out = compute(x, state, *rest)
        untouched = state.flatten(1).eq(0).all(1)
        state[untouched] = saved[untouched]
        return out

    return computed


def scan_without_decay(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, *rest: Any) -> Tensor:
    return scan(x, dt, b, c, a_log - 100, *rest)


def scan_with_b_and_c_exchanged(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *rest: Any) -> Tensor:
    return scan(x, dt, c, b, *rest)


def scan_without_state(*args: Any) -> Tensor:
    """As `without_state`, for an op that takes the state after its other tensors."""
    inputs, (state, sequences) = args[:-2], args[-2:]
    return without_state(lambda _, state: scan(*inputs, state, sequences))(None, state)


def in_bfloat16(inputs: Inputs, state: Tensor, sequences: Sequences) -> Tensor:
    """The matrices are rounded to bfloat16 after each step."""
    out = recur(inputs, state, sequences)
    state.copy_(state.bfloat16())
    return out


def exchanged(inputs: Inputs) -> Any:
    """The layout with the columns of queries for keys."""
    layout = inputs.layout
    return layout._replace(query_column=layout.key_column, key_column=layout.query_column)


def with_rolled_keys(inputs: Inputs) -> Tensor:
    """The inputs, whose heads have the keys of the previous one."""
    layout, x = inputs.layout, inputs.x.clone()
    keys = x[:, layout.key_column : layout.key_column + layout.heads // layout.group * layout.key_dim]
    keys.copy_(keys.roll(layout.key_dim, dims=1))
    return x


def by_head(inputs: Inputs) -> Tensor:
    """Each channel has the decay of the first one of its head."""
    a = inputs.a.unflatten(1, (inputs.layout.heads, -1))
    return a[..., :1].expand_as(a).flatten(1)


without_decay = changed(a_log=lambda inputs: inputs.a_log - 100)
RECURRENCE_FAULTS: dict[str, Compute] = {
    "decay is left out": without_decay,
    "decay is left out in decode steps": only_in_decode_steps(without_decay, recur),
    "the bias of dt is left out": changed(dt_bias=lambda inputs: inputs.dt_bias * 0),
    "queries and keys are exchanged": changed(layout=exchanged),
    "heads have the keys of other heads": changed(x=with_rolled_keys),
    "matrices are updated twice in decode steps": only_in_decode_steps(twice(recur), recur),
    "matrices are not read": without_state(recur),
    "matrices are rounded": in_bfloat16,
}
OP_FAULTS: dict[str, tuple[str, Any, Compute]] = {
    **{name: ("qwen3_5_text", recurrence, compute) for name, compute in RECURRENCE_FAULTS.items()},
    **{f"{name} in Mamba-2": ("bamba", recurrence, compute) for name, compute in RECURRENCE_FAULTS.items()},
    **{f"{name} in KDA": ("kimi_linear", recurrence, compute) for name, compute in RECURRENCE_FAULTS.items()},
    "decays are those of the first channel": ("kimi_linear", recurrence, changed(a=by_head)),
    "beta is left out": ("qwen3_5_text", recurrence, changed(b=lambda inputs: inputs.b + 1000)),
    "d is left out": ("bamba", recurrence, changed(d=lambda inputs: inputs.d * 0)),
    "decay is left out in Mamba 1": ("jamba", selective_scan, scan_without_decay),
    "B and C are exchanged in Mamba 1": ("jamba", selective_scan, scan_with_b_and_c_exchanged),
    "states are updated twice in decode steps of Mamba 1": (
        "jamba", selective_scan, only_in_decode_steps(twice(scan), scan)
    ),
    "states are not read in Mamba 1": ("jamba", selective_scan, scan_without_state),
    "the convolution is off by one tap": ("qwen3_5_text", causal_conv, one_tap_late),
    "the convolution's state is off by one token": ("qwen3_5_text", causal_conv, one_token_late),
    "the convolution's state is shifted twice": (
        "qwen3_5_text", causal_conv, only_in_decode_steps(twice(conv), conv)
    ),
    "the convolution's state is not read": ("qwen3_5_text", causal_conv, without_state(conv)),
}  # fmt: skip

# What runs with --long only: slots have the faults of test_state_faults.py, and both recurrences share their code.
LONG_FAULTS = {
    "a chunk ends in the slot of a neighbour", "a chunk uses the number of its sequence in the step",
    "the number of a row is its slot", "all rows use the scratch slot", "decay is left out in Mamba-2",
    "the bias of dt is left out in Mamba-2", "heads have the keys of other heads in Mamba-2",
    "matrices are not read in Mamba-2", *(f"{name} in KDA" for name in RECURRENCE_FAULTS),
}  # fmt: skip


def each_fault(faults: Iterable[str]) -> pytest.MarkDecorator:
    marked = [pytest.param(fault, marks=pytest.mark.long if fault in LONG_FAULTS else ()) for fault in faults]
    return pytest.mark.parametrize("fault", marked)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_passes_without_a_fault(
    models: dict[str, str], cache_dir: str, references: dict[str, list[Any]], family: str
) -> None:
    check(models[family], cache_dir, lambda metadata: metadata, references[family])


@each_fault(FAULTS)
def test_a_fault_of_slots_is_found(
    models: dict[str, str], cache_dir: str, references: dict[str, list[Any]], fault: str
) -> None:
    with pytest.raises(CompileError, match="failed its parity check"):
        check(models["qwen3_5_text"], cache_dir, FAULTS[fault], references["qwen3_5_text"])


@each_fault(OP_FAULTS)
def test_a_fault_of_an_op_is_found(
    models: dict[str, str], cache_dir: str, references: dict[str, list[Any]], fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    family, module, compute = OP_FAULTS[fault]
    monkeypatch.setattr(module, "compute_plainly", compute)
    with pytest.raises(CompileError, match="failed its parity check"):
        check(models[family], cache_dir, lambda metadata: metadata, references[family])
