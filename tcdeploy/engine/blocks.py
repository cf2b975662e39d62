"""Hand out KV blocks, and find again those that already hold the keys of a prompt's beginning. No torch.

A block is in exactly one of three states: free, in use (with as many references as sequences hold it), or evictable:
nobody holds it, but its content is registered and may be asked for again, until the free list is empty and the least
recently used one goes.

Registered blocks form a tree. A node is found under (the id of its parent's node, the tokens of the block), so a key
names a whole prefix and costs one block's tokens. Hashing the prefix into one number, as others do, is as fast but
serves a stranger's keys on a collision; here there is nothing to collide. Ids are never used twice, so a node whose
parent was evicted is unreachable rather than wrong. It needs no search when the parent goes: it stays an evictable
block like any other, and goes when its turn comes.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from typing import NamedTuple

PADDING_BLOCK = 0  # nobody's: the free list never holds it
ROOT_NODE_ID = 0  # the node id that first blocks have as their parent


class Node(NamedTuple):
    """What a registered block holds: `tokens` after the prefix that node `parent` stands for."""

    node_id: int
    parent: int
    tokens: tuple[int, ...]


class BlockAllocator:
    """Blocks 1 to blocks - 1; block 0 is where padding writes. All operations are linear in the blocks they name."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity = blocks - 1
        self._free = deque(range(1, blocks))
        self._references: dict[int, int] = {}  # block in use -> how many sequences hold it
        # An ordered set, least recently used first; a dict would search its deleted front at every eviction.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._nodes: dict[int, Node] = {}  # registered block -> its node
        self._registry: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, tokens) -> block
        self._node_ids = itertools.count(ROOT_NODE_ID + 1)

    @property
    def free(self) -> int:
        """Blocks that can be taken: evictable ones are as good as free."""
        return len(self._free) + len(self._evictable)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        assert count <= self.free, "the caller asks first"
        taken = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def release(self, blocks: list[int]) -> None:
        """Drop one reference on each. The deepest go first into the queue for eviction: a chain loses its tail, and
        what is left of it can still be found from the root."""
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

    def match(self, token_ids: list[int]) -> list[int]:
        """The longest registered chain of full blocks, with a reference taken on each.

        It leaves at least the last token: its hidden state is what the next token is sampled from.
        """
        found: list[int] = []
        parent = ROOT_NODE_ID
        for number in range((len(token_ids) - 1) // self.block_size):
            block = self._registry.get((parent, self._block_tokens(token_ids, number)))
            if block is None:
                break
            found.append(block)
            parent = self._nodes[block].node_id
        for block in found:
            self._evictable.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1
        return found

    def register(self, token_ids: list[int], blocks: list[int], tokens: int) -> None:
        """Make the full blocks among the first `tokens` tokens findable. Their keys must be written, or launched."""
        parent = ROOT_NODE_ID
        for number, block in enumerate(blocks[: tokens // self.block_size]):
            parent = self._register_block(parent, block, token_ids, number)

    def reset_prefix_cache(self) -> None:
        """Forget every registered prefix; what is in use stays in use."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._nodes.clear()
        self._registry.clear()

    def check_idle(self) -> None:
        """To be called when no sequence is left: whatever is still in use has leaked."""
        assert not self._references, f"blocks {sorted(self._references)} are in use and nobody's"
        self.assert_consistent()

    def assert_consistent(self) -> None:
        """Every invariant of this class. Linear in all blocks: for tests, and for an idle engine."""
        held = [*self._free, *self._evictable, *self._references]
        assert sorted(held) == list(range(1, self.capacity + 1)), "every block is in exactly one state"
        assert all(references > 0 for references in self._references.values())
        assert self._nodes.keys().isdisjoint(self._free), "what is free is forgotten"
        assert self._nodes.keys() >= self._evictable.keys(), "what nobody can ask for again is free"
        assert {(node.parent, node.tokens): block for block, node in self._nodes.items()} == self._registry
        assert len(self._nodes) == len(self._registry), "no two blocks under one key"
        assert len({node.node_id for node in self._nodes.values()}) == len(self._nodes)
        assert all(node.parent < node.node_id for node in self._nodes.values())
        assert all(len(node.tokens) == self.block_size for node in self._nodes.values()), "only full blocks"

    def _register_block(self, parent: int, block: int, token_ids: list[int], number: int) -> int:
        """The id of the node for this content: ours, or that of the block that was there first."""
        assert block in self._references, f"block {block} is not in use"
        node = self._nodes.get(block)
        if node is not None and node.parent == parent:
            return node.node_id  # the usual case of a second call, without a look at the tokens
        if node is not None:
            self._unregister(block)  # its parent was a twin of our block before it, and was evicted: find a new place
        tokens = self._block_tokens(token_ids, number)
        twin = self._registry.get((parent, tokens))
        if twin is not None:
            return self._nodes[twin].node_id
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
