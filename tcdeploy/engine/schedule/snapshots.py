"""Keeps copies of state slots at the ends of prefixes, for prompts with the same prefix. Does not import torch.

A snapshot belongs to a registered block (blocks.py): it is the state after the last token of that block. It has a slot
of its own, after those of sequences. It is dropped when its block is evicted, or when it is the least recently used
snapshot and a new one needs a slot.

A slot is reserved when the step that fills it is scheduled. The snapshot is added, and can be found, when the next step
is scheduled. Steps run in order, so that step and all later ones read a complete copy. Each step reads snapshots before
it writes any, so a dropped snapshot that the same step still reads is not overwritten too early.
"""

from __future__ import annotations

from collections import OrderedDict

from tcdeploy.engine.schedule.slots import SCRATCH_SLOT


class SnapshotCache:
    """Owns `count` slots from `first_slot` on. With a count of 0, no snapshot is kept."""

    def __init__(self, first_slot: int = SCRATCH_SLOT + 1, count: int = 0) -> None:
        self._slots = range(first_slot, first_slot + count)
        self._free = list(self._slots)
        self._reserved: set[int] = set()
        self._by_node: OrderedDict[int, int] = OrderedDict()  # node id -> slot, least recently used first

    @property
    def capacity(self) -> int:
        return len(self._slots)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._by_node

    def use(self, node_id: int) -> int:
        """The slot of a node's snapshot, which becomes the most recently used one."""
        self._by_node.move_to_end(node_id)
        return self._by_node[node_id]

    def reserve(self) -> int | None:
        """A slot for a new snapshot; None if no slot can be freed.

        Drops the least recently used snapshot if no slot is free.
        """
        if not self._free and self._by_node:
            self.discard(next(iter(self._by_node)))
        if not self._free:
            return None
        slot = self._free.pop()
        self._reserved.add(slot)
        return slot

    def add(self, node_id: int | None, slot: int) -> None:
        """Keep a reserved slot as the snapshot of a node; free it if the node is gone (None) or has a snapshot.

        Has no effect if `clear` was called after the reservation, because it has freed the slot.
        """
        if slot not in self._reserved:
            return
        self._reserved.remove(slot)
        if node_id is None or node_id in self._by_node:
            self._free.append(slot)
        else:
            self._by_node[node_id] = slot

    def discard(self, node_id: int) -> None:
        """Drop the snapshot of a node, if it has one."""
        slot = self._by_node.pop(node_id, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Drop all snapshots, including those of the step in flight."""
        self._free = list(self._slots)
        self._reserved.clear()
        self._by_node.clear()
