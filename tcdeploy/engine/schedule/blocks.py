"""Allocates KV blocks, and finds cached blocks that already hold a prompt's prefix. Does not import torch.

A block is in exactly one of three states: free; in use, with one reference per sequence that holds it; or evictable.
An evictable block has no reference but is registered in the prefix cache. It is reused for a prompt with the same
prefix, or evicted in LRU order once the free list is empty.

Registered blocks form a tree for each adapter, whose keys and values differ for equal tokens. The key of a node is (id
of the parent node, tokens of the block), so a key identifies a whole prefix and costs the tokens of one block.
Rejected: one hash per prefix, which is as fast, but on a collision one request would read the keys and values of
another. Node ids are never reused, so a node whose parent was evicted is unreachable rather than wrong, and evicting a
parent needs no search for its children.

If layers keep state in slots, a prefix can be reused only where a snapshot of that state was taken (snapshots.py).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from tcdeploy.engine.schedule.snapshots import SnapshotCache

PADDING_BLOCK = 0  # padding tokens of a prefill write here; never allocated


class Node(NamedTuple):
    """The content of a registered block: `tokens` after the prefix of node `parent`."""

    node_id: int
    parent: int
    tokens: tuple[int, ...]


class PrefixMatch(NamedTuple):
    """A cached prefix that a sequence starts from."""

    blocks: list[int]  # with one reference taken on each
    slot: int | None  # of the snapshot at its end; None without blocks, or if no layer keeps state in slots
    registered_tokens: int  # of the longest registered prefix, even without a snapshot; 0 if no layer keeps state


class BlockAllocator:
    """Owns blocks 1 to num_blocks - 1, or only `blocks`, which another allocator has allocated.

    `reuses_prefixes`: whether blocks are registered and found. `snapshots`: copies of the state at the ends of blocks.
    Allocating, releasing and matching are linear in the blocks involved.
    """

    def __init__(
        self, num_blocks: int, block_size: int, blocks: Iterable[int] | None = None, reuses_prefixes: bool = True,
        snapshots: SnapshotCache | None = None,
    ) -> None:  # fmt: skip
        self.block_size, self.reuses_prefixes = block_size, reuses_prefixes
        self.snapshots = snapshots or SnapshotCache()
        self._free = deque(range(PADDING_BLOCK + 1, num_blocks) if blocks is None else blocks)
        self.capacity = len(self._free)
        self._references: dict[int, int] = {}  # block in use -> number of sequences that hold it
        # An ordered set, least recently used first. A dict would scan its deleted entries at every eviction.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._nodes: dict[int, Node] = {}  # registered block -> its node
        self._registry: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, tokens) -> block
        self._node_ids = itertools.count(1)

    @property
    def num_allocatable(self) -> int:
        return len(self._free) + len(self._evictable)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        assert count <= self.num_allocatable, "the caller checks `num_allocatable` first"
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Drop one reference on each block and clear the list.

        The last block of a prefix is queued for eviction first, so that what remains can be found from the root.
        """
        assert len(set(blocks)) == len(blocks) and self._references.keys() >= set(blocks), f"{blocks} not all in use"
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                del self._references[block]
                if block in self._nodes:
                    self._evictable[block] = None
                else:
                    self._free.append(block)
        blocks.clear()

    def match(self, token_ids: list[int], adapter_id: int = 0) -> list[int]:
        """The longest registered prefix in full blocks, with one reference taken on each block.

        It never covers the last token, whose hidden state is needed to sample the next one.
        """
        matched = self._find(token_ids, len(token_ids) - 1, adapter_id)
        self._take(matched)
        return matched

    def match_snapshot(self, token_ids: list[int], adapter_id: int = 0) -> PrefixMatch:
        """As `match`, for the longest registered prefix that has a snapshot at its end."""
        found = self._find(token_ids, len(token_ids) - 1, adapter_id)
        registered_tokens = len(found) * self.block_size
        while found and self._nodes[found[-1]].node_id not in self.snapshots:
            found.pop()
        self._take(found)
        slot = self.snapshots.use(self._nodes[found[-1]].node_id) if found else None
        return PrefixMatch(found, slot, registered_tokens)

    def reserve_snapshot(self, token_ids: list[int], tokens: int, adapter_id: int = 0) -> int | None:
        """A slot for the state after `tokens` tokens, a multiple of the block size.

        None if that state has a snapshot already, or if no slot can be freed.
        """
        node_id = self._node_at(token_ids, tokens, adapter_id)
        return None if node_id is not None and node_id in self.snapshots else self.snapshots.reserve()

    def add_snapshot(self, slot: int, token_ids: list[int], tokens: int, adapter_id: int = 0) -> None:
        """Keep a reserved slot for the state after `tokens` tokens, or free it if their blocks are not registered."""
        self.snapshots.add(self._node_at(token_ids, tokens, adapter_id), slot)

    def register(self, token_ids: list[int], blocks: list[int], tokens: int, adapter_id: int = 0) -> None:
        """Add the full blocks of the first `tokens` tokens to the prefix cache. Their step must have been launched."""
        if not self.reuses_prefixes:
            return
        parent = _root(adapter_id)
        for number, block in enumerate(blocks[: tokens // self.block_size]):
            parent = self._register_block(parent, block, token_ids, number)

    def reset_prefix_cache(self) -> None:
        """Drop every registered prefix and snapshot. Blocks in use stay in use."""
        self.snapshots.clear()
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._nodes.clear()
        self._registry.clear()

    def _find(self, token_ids: list[int], tokens: int, adapter_id: int) -> list[int]:
        """The blocks of the longest registered prefix of the first `tokens` tokens, without references."""
        found: list[int] = []
        parent = _root(adapter_id)
        for number in range(tokens // self.block_size):
            block = self._registry.get((parent, self._block_tokens(token_ids, number)))
            if block is None:
                break
            found.append(block)
            parent = self._nodes[block].node_id
        return found

    def _node_at(self, token_ids: list[int], tokens: int, adapter_id: int) -> int | None:
        """The node that ends after `tokens` tokens, a multiple of the block size; None if it is not registered."""
        found = self._find(token_ids, tokens, adapter_id)
        return self._nodes[found[-1]].node_id if len(found) * self.block_size == tokens else None

    def _take(self, blocks: list[int]) -> None:
        for block in blocks:
            self._evictable.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1

    def _register_block(self, parent: int, block: int, token_ids: list[int], number: int) -> int:
        """The node id of this content: of `block`, or of the block that was registered for it first."""
        assert block in self._references, f"block {block} is not in use"
        node = self._nodes.get(block)
        if node is not None and node.parent == parent:
            return node.node_id  # already registered under this parent: a sequence registers its prefix repeatedly
        if node is not None:
            self._unregister(block)  # registered under a duplicate of the preceding block, which has been evicted since
        tokens = self._block_tokens(token_ids, number)
        duplicate = self._registry.get((parent, tokens))
        if duplicate is not None:
            return self._nodes[duplicate].node_id
        self._nodes[block] = node = Node(next(self._node_ids), parent, tokens)
        self._registry[parent, tokens] = block
        return node.node_id

    def _block_tokens(self, token_ids: list[int], number: int) -> tuple[int, ...]:
        return tuple(token_ids[number * self.block_size : (number + 1) * self.block_size])

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._unregister(block)
        return block

    def _unregister(self, block: int) -> None:
        node = self._nodes.pop(block)
        del self._registry[node.parent, node.tokens]
        self.snapshots.discard(node.node_id)


def _root(adapter_id: int) -> int:
    """The parent of the first block of every prefix. Node ids are positive."""
    return -adapter_id
