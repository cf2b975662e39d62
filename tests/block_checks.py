"""Checks of a block allocator whose sequences have all ended."""

from __future__ import annotations

from tcdeploy.engine.schedule.blocks import BlockAllocator


def assert_idle(allocator: BlockAllocator) -> None:
    """Assert that no block is in use: with no open sequence, a block in use is a leak."""
    assert not allocator._references, f"blocks {sorted(allocator._references)} have leaked"
    allocator.assert_consistent()
