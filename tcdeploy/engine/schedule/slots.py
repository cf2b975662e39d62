"""Allocates state slots, in which layers keep state of fixed size for each sequence. Does not import torch.

A slot belongs to a sequence from its admission to its release. Rows move while a sequence runs, so a slot is not its
row's number. A slot is not cleared: a sequence starts from the initial value at its first token, whatever is in it.
"""

from __future__ import annotations

SCRATCH_SLOT = 0  # padding writes here; also the slot of every sequence if no layer keeps state in slots


class SlotAllocator:
    """Owns slots 1 to num_slots - 1. Without slots, every sequence has the scratch slot."""

    def __init__(self, num_slots: int) -> None:
        self.capacity = max(num_slots - 1, 0)
        # The last released slot is used first, and the highest at the beginning: a slot that is mistaken for a row's
        # number changes results.
        self._free = list(range(1, num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A free slot, which must exist; the scratch slot if no layer keeps state in slots."""
        return self._free.pop() if self.capacity else SCRATCH_SLOT

    def release(self, slot: int) -> None:
        if slot != SCRATCH_SLOT:
            assert slot not in self._free, f"slot {slot} is not in use"
            self._free.append(slot)
