"""Every block has one owner at a time, and block 0 none, whatever is taken and given back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tcdeploy.engine.blocks import PADDING_BLOCK, BlockAllocator


class Allocation(RuleBasedStateMachine):
    """Sequences come with any number of blocks and go in any order; `owned` is what the allocator should know."""

    @initialize(blocks=st.integers(1, 40))
    def start(self, blocks: int) -> None:
        self.allocator = BlockAllocator(blocks, block_size=16)
        self.blocks = blocks
        self.owned: list[list[int]] = []

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.allocator.free))
        taken = self.allocator.take(count)
        assert len(taken) == count
        self.owned.append(taken)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        blocks = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.allocator.give_back(blocks)
        assert blocks == [], "the owner must not keep what it gave back"

    @rule(more=st.integers(1, 5))
    def take_too_many(self, more: int) -> None:
        with pytest.raises(AssertionError):
            self.allocator.take(self.allocator.free + more)

    @precondition(lambda self: self.allocator.free < self.allocator.capacity)
    @rule(data=st.data())
    def give_back_with_a_free_one(self, data: st.DataObject) -> None:
        """A list that holds one block that is free already is refused, and nothing of it is freed."""
        owned = [block for blocks in self.owned for block in blocks]
        free = sorted(set(range(1, self.blocks)) - set(owned))
        if free:
            mixed = [data.draw(st.sampled_from(owned)), data.draw(st.sampled_from(free))]
            with pytest.raises(AssertionError):
                self.allocator.give_back(mixed)
            assert len(mixed) == 2

    @invariant()
    def every_block_has_one_owner(self) -> None:
        owned = [block for blocks in self.owned for block in blocks]
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(1, self.blocks))
        assert PADDING_BLOCK not in owned
        assert self.allocator.free == self.allocator.capacity - len(owned)


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_all_blocks_but_the_padding_s_can_be_taken_once() -> None:
    allocator = BlockAllocator(10, block_size=16)
    assert (allocator.capacity, allocator.free) == (9, 9)
    assert sorted(allocator.take(9)) == list(range(1, 10))
    assert allocator.free == 0
    with pytest.raises(AssertionError):
        allocator.take(1)


def test_an_allocator_of_one_block_has_only_the_padding_s() -> None:
    allocator = BlockAllocator(1, block_size=16)
    assert (allocator.capacity, allocator.free, allocator.take(0)) == (0, 0, [])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_started_block_is_a_needed_block(tokens: int, blocks: int) -> None:
    assert BlockAllocator(10, block_size=16).needed(tokens) == blocks


def test_the_padding_block_cannot_be_given_back() -> None:
    allocator = BlockAllocator(10, block_size=16)
    taken = allocator.take(2)
    with pytest.raises(AssertionError):
        allocator.give_back([*taken, PADDING_BLOCK])
    assert allocator.free == 7


def test_a_block_cannot_be_given_back_twice() -> None:
    allocator = BlockAllocator(10, block_size=16)
    taken = allocator.take(3)
    again = list(taken)
    allocator.give_back(taken)
    with pytest.raises(AssertionError):
        allocator.give_back(again)
    assert allocator.free == 9


def test_a_block_cannot_stand_twice_in_what_is_given_back() -> None:
    """It would come to two owners: both would write their keys into it."""
    allocator = BlockAllocator(10, block_size=16)
    [block] = allocator.take(1)
    with pytest.raises(AssertionError):
        allocator.give_back([block, block])
    assert allocator.free == 8


@pytest.mark.parametrize("foreign", [10, 999, -1])
def test_a_block_that_the_allocator_does_not_have_cannot_be_given_back(foreign: int) -> None:
    """It would be handed out, and its owner would write outside the cache."""
    allocator = BlockAllocator(10, block_size=16)
    allocator.take(9)
    with pytest.raises(AssertionError):
        allocator.give_back([foreign])
    assert allocator.free == 0
