"""Keeps copies of state slots at the ends of prefixes, for prompts with the same prefix. Does not import torch.

A snapshot belongs to a registered block (blocks.py): it is the state after the last token of that block. It lies in a
slot of its own, beside those of sequences. It is dropped with its block, or when it is the least recently used one and
another prefix needs its slot.

A slot is reserved when a step that fills it is scheduled. It can be found once it is added, when the next step is
scheduled: steps run in order, so that step and all later ones read a complete copy. In one step, snapshots are read
before any of them is written.
"""

from __future__ import annotations

from collections import OrderedDict

from tcdeploy.engine.schedule.slots import SCRATCH_SLOT


class SnapshotCache:
    """Owns `count` slots from `first_slot` on. Without any, nothing is kept."""

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
        """A slot for a new snapshot, of which the least recently used one may be dropped; None if there is no slot."""
        if not self._free and self._by_node:
            self.discard(next(iter(self._by_node)))
        if not self._free:
            return None
        slot = self._free.pop()
        self._reserved.add(slot)
        return slot

    def add(self, node_id: int | None, slot: int) -> None:
        """Keep a reserved slot as the snapshot of a node; free it if the node is gone (None) or has one.

        Has no effect after `clear`: the state is that of dropped prefixes.
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
        """Drop all snapshots, those of the step in flight included."""
        self._free = list(self._slots)
        self._reserved.clear()
        self._by_node.clear()
