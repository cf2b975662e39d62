"""Checks of a block allocator."""

from __future__ import annotations

from tcdeploy.engine.schedule.blocks import BlockAllocator


def assert_idle(allocator: BlockAllocator) -> None:
    """Assert that no block is in use: with no open sequence, a block in use is a leak."""
    assert not allocator._references, f"blocks {sorted(allocator._references)} have leaked"
    assert_consistent(allocator)


def assert_consistent(allocator: BlockAllocator) -> None:
    """Assert every invariant of the class. Linear in the size of the cache."""
    blocks = [*allocator._free, *allocator._evictable, *allocator._references]
    assert sorted(blocks) == list(range(1, allocator.capacity + 1)), "every block is in exactly one state"
    assert all(references > 0 for references in allocator._references.values())
    assert allocator._nodes.keys().isdisjoint(allocator._free), "free blocks are not registered"
    assert allocator._nodes.keys() >= allocator._evictable.keys(), "unregistered blocks without references are free"
    assert {(node.parent, node.tokens): block for block, node in allocator._nodes.items()} == allocator._registry
    assert len(allocator._nodes) == len(allocator._registry), "one block per key"
    assert len({node.node_id for node in allocator._nodes.values()}) == len(allocator._nodes)
    assert all(node.parent < node.node_id for node in allocator._nodes.values())
    assert all(len(node.tokens) == allocator.block_size for node in allocator._nodes.values()), "only full blocks"
