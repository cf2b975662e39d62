"""Every block is free, evictable or in use, and a prefix cache hit holds exactly the tokens looked up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tcdeploy.engine.schedule.blocks import PADDING_BLOCK, BlockAllocator
from tests.block_checks import assert_consistent, assert_idle


class Allocation(RuleBasedStateMachine):
    """Sequences allocate any number of blocks and release them in any order. `owned` is the expected state."""

    @initialize(blocks=st.integers(1, 40))
    def start(self, blocks: int) -> None:
        self.allocator = BlockAllocator(blocks, block_size=16)
        self.blocks = blocks
        self.owned: list[list[int]] = []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.allocator.num_allocatable))
        blocks = self.allocator.allocate(count)
        assert len(blocks) == count
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.allocator.release(blocks)
        assert blocks == [], "release clears the owner's list"

    @rule(more=st.integers(1, 5))
    def allocate_too_many(self, more: int) -> None:
        with pytest.raises(AssertionError):
            self.allocator.allocate(self.allocator.num_allocatable + more)

    @precondition(lambda self: self.allocator.num_allocatable < self.allocator.capacity)
    @rule(data=st.data())
    def release_with_a_free_block(self, data: st.DataObject) -> None:
        """A list with one block that is already free is refused, and none of it is freed."""
        owned = [block for blocks in self.owned for block in blocks]
        free = sorted(set(range(1, self.blocks)) - set(owned))
        if free:
            mixed = [data.draw(st.sampled_from(owned)), data.draw(st.sampled_from(free))]
            with pytest.raises(AssertionError):
                self.allocator.release(mixed)
            assert len(mixed) == 2

    @invariant()
    def every_block_has_one_owner(self) -> None:
        owned = [block for blocks in self.owned for block in blocks]
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(1, self.blocks))
        assert PADDING_BLOCK not in owned
        assert self.allocator.num_allocatable == self.allocator.capacity - len(owned)
        assert_consistent(self.allocator)


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=60, stateful_step_count=40)


def test_all_blocks_but_the_padding_block_can_be_allocated_once() -> None:
    allocator = BlockAllocator(10, block_size=16)
    assert (allocator.capacity, allocator.num_allocatable) == (9, 9)
    assert sorted(allocator.allocate(9)) == list(range(1, 10))
    assert allocator.num_allocatable == 0
    with pytest.raises(AssertionError):
        allocator.allocate(1)


def test_an_allocator_of_one_block_has_only_the_padding_block() -> None:
    allocator = BlockAllocator(1, block_size=16)
    assert (allocator.capacity, allocator.num_allocatable, allocator.allocate(0)) == (0, 0, [])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_partly_filled_block_counts_as_a_block(tokens: int, blocks: int) -> None:
    assert BlockAllocator(10, block_size=16).blocks_for(tokens) == blocks


def test_the_padding_block_cannot_be_released() -> None:
    allocator = BlockAllocator(10, block_size=16)
    blocks = allocator.allocate(2)
    with pytest.raises(AssertionError):
        allocator.release([*blocks, PADDING_BLOCK])
    assert allocator.num_allocatable == 7


def test_a_block_cannot_be_released_twice() -> None:
    allocator = BlockAllocator(10, block_size=16)
    blocks = allocator.allocate(3)
    released = list(blocks)
    allocator.release(blocks)
    with pytest.raises(AssertionError):
        allocator.release(released)
    assert allocator.num_allocatable == 9


def test_a_block_cannot_be_listed_twice_in_one_release() -> None:
    """It would get two owners, and both would write their keys into it."""
    allocator = BlockAllocator(10, block_size=16)
    [block] = allocator.allocate(1)
    with pytest.raises(AssertionError):
        allocator.release([block, block])
    assert allocator.num_allocatable == 8


@pytest.mark.parametrize("foreign", [10, 999, -1])
def test_a_block_outside_the_allocator_cannot_be_released(foreign: int) -> None:
    """It would be allocated later, and its owner would write outside the cache."""
    allocator = BlockAllocator(10, block_size=16)
    allocator.allocate(9)
    with pytest.raises(AssertionError):
        allocator.release([foreign])
    assert allocator.num_allocatable == 0


BLOCK = 4  # tokens per block in the tests below


def tokens(*blocks: int) -> list[int]:
    """Token ids of full blocks, each filled with one number."""
    return [number for number in blocks for _ in range(BLOCK)]


def registered(allocator: BlockAllocator, token_ids: list[int]) -> list[int]:
    """Allocate and register a sequence of these tokens; returns its blocks, still in use."""
    shared = allocator.match(token_ids)
    blocks = shared + allocator.allocate(allocator.blocks_for(len(token_ids)) - len(shared))
    allocator.register(token_ids, blocks, len(token_ids))
    return blocks


def matched_blocks(allocator: BlockAllocator, token_ids: list[int]) -> list[int]:
    """The result of `match` for these tokens and one more, released again."""
    blocks = allocator.match([*token_ids, -1])
    matched = list(blocks)
    allocator.release(blocks)
    return matched


def test_the_longest_registered_prefix_in_full_blocks_is_matched() -> None:
    allocator = BlockAllocator(20, BLOCK)
    blocks = registered(allocator, [*tokens(7, 8, 9), 1, 2])
    assert matched_blocks(allocator, tokens(7, 8, 9)) == blocks[:3]
    assert matched_blocks(allocator, tokens(7, 8, 3)) == blocks[:2]
    assert matched_blocks(allocator, tokens(7)) == blocks[:1]
    assert matched_blocks(allocator, [7] * 3) == []
    assert matched_blocks(allocator, tokens(8, 9)) == [], "the same tokens after another prefix have other keys"


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 2)])
def test_at_least_one_token_is_left_to_compute(length: int, blocks: int) -> None:
    allocator = BlockAllocator(20, BLOCK)
    registered(allocator, tokens(7, 8))
    assert len(allocator.match([*tokens(7, 8), *tokens(9)[:1] * 5][:length])) == blocks


def test_only_full_blocks_of_written_tokens_are_registered() -> None:
    allocator = BlockAllocator(20, BLOCK)
    blocks = allocator.allocate(3)
    allocator.register(tokens(7, 8, 9), blocks, 2 * BLOCK - 1)
    assert matched_blocks(allocator, tokens(7, 8, 9)) == blocks[:1]
    allocator.register(tokens(7, 8, 9), blocks, 2 * BLOCK)
    assert matched_blocks(allocator, tokens(7, 8, 9)) == blocks[:2]


def test_a_shared_block_is_free_when_both_references_are_released() -> None:
    allocator = BlockAllocator(4, BLOCK)
    first = registered(allocator, tokens(7, 8))
    second = allocator.match(tokens(7, 8, 9))
    assert second == first
    allocator.release(first)
    assert allocator.num_allocatable == 1
    with pytest.raises(AssertionError):
        allocator.allocate(2)
    allocator.release(second)
    assert allocator.num_allocatable == 3
    assert_idle(allocator)


def test_a_block_without_references_is_matched_until_it_is_evicted() -> None:
    allocator = BlockAllocator(4, BLOCK)
    blocks = registered(allocator, tokens(7, 8))
    registered_blocks = list(blocks)
    allocator.release(blocks)
    assert allocator.num_allocatable == 3
    assert matched_blocks(allocator, tokens(7, 8)) == registered_blocks
    assert sorted(allocator.allocate(3)) == [1, 2, 3]
    assert matched_blocks(allocator, tokens(7, 8)) == []
    assert_consistent(allocator)


def test_free_blocks_are_allocated_before_any_block_is_evicted() -> None:
    allocator = BlockAllocator(5, BLOCK)
    allocator.release(registered(allocator, tokens(7, 8)))
    allocator.allocate(2)
    assert len(matched_blocks(allocator, tokens(7, 8))) == 2


def test_a_prefix_is_evicted_from_its_last_block() -> None:
    allocator = BlockAllocator(4, BLOCK)
    first, second, third = blocks = registered(allocator, tokens(7, 8, 9))
    allocator.release(blocks)
    assert allocator.allocate(1) == [third]
    assert matched_blocks(allocator, tokens(7, 8, 9)) == [first, second]
    assert allocator.allocate(1) == [second]
    assert matched_blocks(allocator, tokens(7, 8, 9)) == [first]


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    allocator = BlockAllocator(5, BLOCK)
    allocator.release(registered(allocator, tokens(1, 2)))
    allocator.release(registered(allocator, tokens(3, 4)))
    assert len(matched_blocks(allocator, tokens(1, 2))) == 2, (
        "used again, so the other prefix is now the least recently used"
    )
    allocator.allocate(2)
    assert (len(matched_blocks(allocator, tokens(1, 2))), len(matched_blocks(allocator, tokens(3, 4)))) == (2, 0)


def test_a_block_in_use_is_never_evicted() -> None:
    allocator = BlockAllocator(4, BLOCK)
    allocator.release(registered(allocator, tokens(7, 8)))
    in_use = allocator.match(tokens(7, 8, 9))
    assert allocator.num_allocatable == 1
    assert set(allocator.allocate(1)).isdisjoint(in_use)
    assert matched_blocks(allocator, tokens(7, 8)) == in_use


def test_registering_again_changes_nothing() -> None:
    allocator = BlockAllocator(20, BLOCK)
    blocks = registered(allocator, tokens(7, 8))
    allocator.register(tokens(7, 8), blocks, 2 * BLOCK)
    assert matched_blocks(allocator, tokens(7, 8)) == blocks
    allocator.release(blocks)
    assert_idle(allocator)


def test_a_duplicate_block_is_not_registered_and_its_children_belong_to_the_first() -> None:
    """Two sequences with one prefix are admitted in one step; the second is longer than the first."""
    allocator = BlockAllocator(20, BLOCK)
    first = registered(allocator, tokens(7, 8))
    second = allocator.allocate(3)
    allocator.register(tokens(7, 8, 9), second, 3 * BLOCK)
    assert matched_blocks(allocator, tokens(7, 8, 9)) == [*first, second[2]]
    child = second[2]
    allocator.release(second)
    allocator.allocate(16)
    assert matched_blocks(allocator, tokens(7, 8, 9)) == [*first, child], (
        "the duplicates were free at once, and nothing was evicted"
    )
    assert_consistent(allocator)


def orphan() -> tuple[BlockAllocator, list[int]]:
    """A block in use whose parent node, registered by another sequence, is evicted."""
    allocator = BlockAllocator(4, BLOCK)
    first = registered(allocator, tokens(7))
    blocks = allocator.allocate(2)
    allocator.register(tokens(7, 8), blocks, 2 * BLOCK)
    assert matched_blocks(allocator, tokens(7, 8)) == [*first, blocks[1]]
    allocator.release(first)
    allocator.release(allocator.allocate(1))
    return allocator, blocks


def test_a_block_whose_parent_was_evicted_is_not_matched_and_does_not_leak() -> None:
    allocator, blocks = orphan()
    allocator.release(registered(allocator, [*tokens(7)]))
    assert len(matched_blocks(allocator, tokens(7, 8))) == 1, "a new node with the same content is not its parent"
    allocator.release(blocks)
    assert_idle(allocator)
    assert sorted(allocator.allocate(3)) == [1, 2, 3]
    assert_consistent(allocator)


def test_a_block_whose_parent_was_evicted_is_matched_after_its_owner_registers_again() -> None:
    allocator, blocks = orphan()
    allocator.register(tokens(7, 8), blocks, 2 * BLOCK)
    assert matched_blocks(allocator, tokens(7, 8)) == blocks
    allocator.release(blocks)
    assert_idle(allocator)


def test_after_a_reset_no_prefix_is_matched_and_its_blocks_are_free() -> None:
    allocator = BlockAllocator(6, BLOCK)
    allocator.release(registered(allocator, tokens(1, 2)))
    in_use = registered(allocator, tokens(3, 4))
    allocator.reset_prefix_cache()
    assert_consistent(allocator)
    assert (
        matched_blocks(allocator, tokens(1, 2)),
        matched_blocks(allocator, tokens(3, 4)),
        allocator.num_allocatable,
    ) == (
        [],
        [],
        3,
    )
    allocator.release(in_use)
    assert_idle(allocator)
    assert (matched_blocks(allocator, tokens(3, 4)), allocator.num_allocatable) == ([], 5)


def test_a_block_in_use_without_a_sequence_is_a_leak() -> None:
    allocator = BlockAllocator(4, BLOCK)
    allocator.allocate(1)
    assert_consistent(allocator)
    with pytest.raises(AssertionError, match="have leaked"):
        assert_idle(allocator)


def test_blocks_without_references_cannot_be_registered() -> None:
    allocator = BlockAllocator(4, BLOCK)
    with pytest.raises(AssertionError, match="not in use"):
        allocator.register(tokens(7), [1], BLOCK)


class Prefixes(RuleBasedStateMachine):
    """Sequences over two token ids, so that prefixes coincide. `content` is the prefix written into each block."""

    @initialize(blocks=st.integers(2, 14))
    def start(self, blocks: int) -> None:
        self.allocator = BlockAllocator(blocks, block_size=2)
        self.content: dict[int, tuple[int, ...]] = {}
        self.live: list[tuple[list[int], list[int]]] = []

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=14), data=st.data())
    def add_sequence(self, token_ids: list[int], data: st.DataObject) -> None:
        blocks = self.allocator.match(token_ids)
        assert len(blocks) * 2 < len(token_ids)
        for number, block in enumerate(blocks):
            assert self.content[block] == tuple(token_ids[: 2 * number + 2])
        missing = self.allocator.blocks_for(len(token_ids)) - len(blocks)
        if missing > self.allocator.num_allocatable:
            self.allocator.release(blocks)
            return
        for block in self.allocator.allocate(missing):
            blocks.append(block)
            self.content[block] = tuple(token_ids[: 2 * len(blocks)])
        self.live.append((token_ids, blocks))
        self._register(token_ids, blocks, data)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        self._register(*data.draw(st.sampled_from(self.live)), data)

    def _register(self, token_ids: list[int], blocks: list[int], data: st.DataObject) -> None:
        written = data.draw(st.integers(0, len(token_ids)))
        self.allocator.register(token_ids, blocks, written)
        matched = self.allocator.match([*token_ids[:written], 2])
        assert len(matched) == written // 2, "every registered block is matched"
        self.allocator.release(matched)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish_sequence(self, data: st.DataObject) -> None:
        _, blocks = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.release(blocks)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.allocator.reset_prefix_cache()

    @invariant()
    def blocks_in_use_are_those_of_live_sequences(self) -> None:
        assert_consistent(self.allocator)
        in_use = {block for _, blocks in self.live for block in blocks}
        assert self.allocator.num_allocatable == self.allocator.capacity - len(in_use)
        for token_ids, blocks in self.live:
            for number, block in enumerate(blocks):
                assert self.content[block] == tuple(token_ids[: 2 * number + 2])

    def teardown(self) -> None:
        for _, blocks in getattr(self, "live", []):
            self.allocator.release(blocks)
        if hasattr(self, "allocator"):
            assert_idle(self.allocator)


TestPrefixes = Prefixes.TestCase
TestPrefixes.settings = settings(max_examples=60, stateful_step_count=40)


def test_adapters_share_no_prefix() -> None:
    allocator = BlockAllocator(20, BLOCK)
    token_ids = [*tokens(7, 8), 1]
    for adapter_id in (0, 1, 2):
        assert allocator.match(token_ids, adapter_id) == []
        blocks = allocator.allocate(2)
        allocator.register(token_ids, blocks, 2 * BLOCK, adapter_id)
        assert allocator.match(token_ids, adapter_id) == blocks
    assert_consistent(allocator)


def test_without_reuse_no_block_is_registered() -> None:
    allocator = BlockAllocator(20, BLOCK, reuses_prefixes=False)
    blocks = allocator.allocate(2)
    allocator.register([*tokens(7, 8), 1], blocks, 2 * BLOCK)
    allocator.release(blocks)
    assert allocator.match([*tokens(7, 8), 1]) == [] and not allocator._evictable
    assert_idle(allocator)
