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

    def copy(self, slot_pairs: Iterable[tuple[int, int]]) -> None:
        """Copy the state of each (source, target) pair of slots on the device, in stream order with the steps."""
        for source, target in slot_pairs:
            for tensor in self.tensors:
                tensor[target].copy_(tensor[source])

    def restore(self, slot: int, saved: ListLike[Tensor]) -> None:
        for tensor, value in zip(self.tensors, saved, strict=True):
            tensor[slot].copy_(value)
