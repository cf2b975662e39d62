"""Saves, restores and copies what layers keep in the slot of a sequence.

A step is not repeatable where layers update their state in place. Everything that runs a step again uses slots of no
request, except log-probabilities of prompts, which compute a chunk of a request again (`compute_prompt_logprobs`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike

from torch import Tensor


class SlotStates:
    """`tensors`: those of all layers that keep state in slots, each [slots, ...]; none for most models."""

    def __init__(self, tensors: ListLike[Tensor]) -> None:
        self.tensors = tensors

    def save(self, slot: int) -> list[Tensor]:
        return [tensor[slot].clone() for tensor in self.tensors]

    def copy(self, slots: Iterable[tuple[int, int]]) -> None:
        """Copy the contents of slots, as (source, target), on the device in the order of its steps."""
        for source, target in slots:
            for tensor in self.tensors:
                tensor[target].copy_(tensor[source])

    def restore(self, slot: int, saved: ListLike[Tensor]) -> None:
        for tensor, value in zip(self.tensors, saved, strict=True):
            tensor[slot].copy_(value)
