"""The parity check finds faults of state in slots. The model has no attention: nothing else carries a prompt on.

Faults are planted in steps that run uncompiled, in half a second each. With --long, the model without a fault is
compiled too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.errors import CompileError
from tcdeploy.kernels.attention.metadata import AttentionMetadata
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.prepare import prepare
from tests.conftest import reset_programs
from tests.parity.planted_faults import Target, change_metadata, planted
from tests.running_sum import SUMS_ONLY, register, save_model, unregister

Change = Callable[[AttentionMetadata], AttentionMetadata]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    register()
    yield save_model(tmp_path_factory.mktemp("model"), SUMS_ONLY)
    unregister()


def of_chunks(change: Callable[[Any], dict[str, Tensor]]) -> Change:
    """Changes the tensors of prompts that `change` returns."""

    def changed(metadata: AttentionMetadata) -> AttentionMetadata:
        prefill = metadata.prefill
        return metadata if prefill is None else metadata._replace(prefill=prefill._replace(**change(prefill)))

    return changed


def of_row_slots(change: Callable[[Tensor], Tensor], only_mixed: bool = False) -> Change:
    """Changes the slots of decode rows."""

    def changed(metadata: AttentionMetadata) -> AttentionMetadata:
        decode = metadata.decode
        if decode is None or decode.slots is None or (only_mixed and metadata.prefill is None):
            return metadata
        return metadata._replace(decode=decode._replace(slots=change(decode.slots)))

    return changed


def token_counts(prefill: Any) -> Tensor:
    counts: Tensor = prefill.cu_seqlens_q.diff()
    return counts


def row_numbers(slots: Tensor) -> Tensor:
    return torch.arange(len(slots), dtype=torch.int32).clamp(max=4)


def neighbours(slots: Tensor) -> Tensor:
    return torch.where(slots > 1, slots - 1, slots)


def never_new(prefill: Any) -> dict[str, Tensor]:
    return {"seq_lens": prefill.seq_lens + (prefill.seq_lens > 0).int()}


def always_new(prefill: Any) -> dict[str, Tensor]:
    return {"seq_lens": torch.where(prefill.seq_lens > 0, token_counts(prefill), 0).int()}


FAULTS: dict[str, Change] = {
    "a slot is not reset": of_chunks(never_new),
    "state is not carried over the border of a chunk": of_chunks(always_new),
    "a chunk ends in the slot of a neighbour": of_chunks(lambda prefill: {"slots": neighbours(prefill.slots)}),
    "a chunk uses the number of its sequence in the step": of_chunks(
        lambda prefill: {"slots": row_numbers(prefill.slots)}
    ),
    "the number of a row is its slot": of_row_slots(row_numbers),
    "the number of a row is its slot in mixed steps": of_row_slots(row_numbers, only_mixed=True),
    "a row uses the slot of a neighbour": of_row_slots(neighbours),
    "all rows use the scratch slot": of_row_slots(torch.zeros_like),
}


@pytest.fixture(scope="module")
def references() -> list[Any]:
    """The prompts and the reference of the first check, which are the same in all checks of a model."""
    return []


def check(model: str, cache_dir: str, change: Change, references: list[Any], compiles: bool = False) -> None:
    def plant(target: Target) -> None:
        change_metadata(target, change)

    reset_programs()
    settings = {
        "model": model, "buckets": (32,), "batch_sizes": (4,), "programs": "jit", "cache_dir": cache_dir,
        "mode": "default",
    }  # fmt: skip
    mode = contextlib.nullcontext() if compiles else torch.compiler.set_stance("force_eager")
    with planted(plant, references), mode:
        prepare(build_recipe(settings, environ={}), needs_model=True)


# engine/test_slot_state.py compiles this model, which then passes the check.
@pytest.mark.parametrize("compiles", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_model_passes_without_a_fault(model: str, cache_dir: str, references: list[Any], compiles: bool) -> None:
    check(model, cache_dir, lambda metadata: metadata, references, compiles)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_state_is_found(model: str, cache_dir: str, references: list[Any], fault: str) -> None:
    with pytest.raises(CompileError, match="failed its parity check"):
        check(model, cache_dir, FAULTS[fault], references)
