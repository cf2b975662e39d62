"""The parity check finds faults in the state of a model with gated delta nets and attention, and of their ops.

Faults are planted in steps that run uncompiled, as in test_state_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.errors import CompileError
from tcdeploy.kernels.state import causal_conv, gated_delta
from tcdeploy.kernels.state.sequences import Sequences
from tests.hybrid_models import save_model
from tests.parity.test_state_faults import FAULTS, check

Compute = Callable[..., Tensor]
delta, conv = gated_delta.compute_plainly, causal_conv.compute_plainly


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("qwen3_5_text", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def references() -> list[Any]:
    return []


def without_decay(qkv: Tensor, a: Tensor, *rest: Any) -> Tensor:
    return delta(qkv, a - 1000, *rest)


def without_decay_in_rows(qkv: Tensor, a: Tensor, *rest: Any) -> Tensor:
    sequences: Sequences = rest[-1]
    return delta(qkv, a - 1000 if sequences.starts is None else a, *rest)


def without_beta(qkv: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return delta(qkv, a, b + 1000, *rest)


def keys_as_queries(qkv: Tensor, *rest: Any) -> Tensor:
    """Queries and keys are exchanged."""
    keys = (qkv.shape[1] - rest[-2].shape[1] * rest[-2].shape[3]) // 2
    return delta(torch.cat([qkv[:, keys : 2 * keys], qkv[:, :keys], qkv[:, 2 * keys :]], dim=1), *rest)


def twice(compute: Compute) -> Compute:
    """Steps of decode rows are computed twice."""

    def computed(*args: Any) -> Tensor:
        if args[-1].starts is None:
            compute(*args)
        return compute(*args)

    return computed


def one_tap_late(x: Tensor, state: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return conv(x, state, weight.roll(1, dims=1), *rest)


def one_token_late(x: Tensor, state: Tensor, *rest: Any) -> Tensor:
    """The slot has the inputs of one token earlier: the newest one is missing."""
    before = state.clone()
    out = conv(x, state, *rest)
    changed = (state != before).flatten(1).any(1)
    state[changed] = state[changed].roll(1, dims=1)
    return out


def without_state(compute: Compute, position: int) -> Compute:
    """Rows and chunks start from zeros; `position` is that of the state in the arguments."""

    def computed(*args: Any) -> Tensor:
        saved = args[position].clone()
        args[position].zero_()
        out = compute(*args)
        untouched = args[position].flatten(1).eq(0).all(1)
        args[position][untouched] = saved[untouched]
        return out

    return computed


def in_bfloat16(*args: Any) -> Tensor:
    """The matrices are rounded to bfloat16 after each step."""
    out = delta(*args)
    args[5].copy_(args[5].bfloat16())
    return out


OP_FAULTS: dict[str, tuple[Any, Compute]] = {
    "decay is left out": (gated_delta, without_decay),
    "decay is left out in decode steps": (gated_delta, without_decay_in_rows),
    "beta is left out": (gated_delta, without_beta),
    "queries and keys are exchanged": (gated_delta, keys_as_queries),
    "matrices are updated twice": (gated_delta, twice(delta)),
    "matrices are not read": (gated_delta, without_state(delta, 5)),
    "matrices are rounded": (gated_delta, in_bfloat16),
    "the convolution is off by one tap": (causal_conv, one_tap_late),
    "the convolution's state is off by one token": (causal_conv, one_token_late),
    "the convolution's state is shifted twice": (causal_conv, twice(conv)),
    "the convolution's state is not read": (causal_conv, without_state(conv, 1)),
}


def test_the_model_passes_without_a_fault(model: str, cache_dir: str, references: list[Any]) -> None:
    check(model, cache_dir, lambda metadata: metadata, references)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_slots_is_found(model: str, cache_dir: str, references: list[Any], fault: str) -> None:
    with pytest.raises(CompileError, match="failed its parity check"):
        check(model, cache_dir, FAULTS[fault], references)


@pytest.mark.parametrize("fault", OP_FAULTS)
def test_a_fault_of_an_op_is_found(
    model: str, cache_dir: str, references: list[Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, compute = OP_FAULTS[fault]
    monkeypatch.setattr(module, "compute_plainly", compute)
    with pytest.raises(CompileError, match="failed its parity check"):
        check(model, cache_dir, lambda metadata: metadata, references)
