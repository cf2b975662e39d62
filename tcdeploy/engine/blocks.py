"""Hand out KV blocks: a free list, and the invariant that nobody owns block 0. No torch."""

from __future__ import annotations

from collections import deque

PADDING_BLOCK = 0  # nobody's: the free list never holds it


class BlockAllocator:
    """Blocks 1 to blocks - 1, each with one owner at a time; block 0 is where padding writes."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity = blocks - 1
        self._free = deque(range(1, blocks))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        assert count <= self.free, "the caller asks first"
        taken = [self._free.popleft() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks) and self._used.issuperset(blocks), f"{blocks} are not all in use"
        self._used.difference_update(blocks)
        self._free.extend(blocks)
        blocks.clear()
