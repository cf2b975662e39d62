"""Snapshots of state slots: where they are taken, that they are found again, and that each planted fault is seen.

The fake engine of test_scheduler.py keeps in each slot the tokens that its state is made of, and copies slots as a step
says, so a state of another prefix shows up when a chunk continues it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.prefix_reuse import PrefixReuse, SlotCopies
from tcdeploy.engine.schedule.scheduler import Scheduler, SchedulerConfig
from tcdeploy.engine.schedule.sequence import SamplingParams, SchedulerOutput, Sequence
from tcdeploy.engine.schedule.snapshots import SnapshotCache
from tests.engine.test_scheduler import Arrival, FakeEngine, answer, check_end, run, traffic

BLOCK = 4
CONFIG = SchedulerConfig(
    max_rows=4, prefill_tokens=64, max_prefill_sequences=4, has_slots=True, min_snapshot_tokens=8,
    min_lone_snapshot_tokens=8,
)  # fmt: skip


def make_engine(
    config: SchedulerConfig = CONFIG, blocks: int = 200, snapshots: int = 3, block_size: int = BLOCK
) -> FakeEngine:
    cache = SnapshotCache(config.max_rows + 1, snapshots)
    return FakeEngine(Scheduler(config, BlockAllocator(blocks + 1, block_size, snapshots=cache)))


def check_slots(cache: SnapshotCache, reserved: int = 0) -> None:
    """Each slot is in exactly one state."""
    slots = [*cache._free, *cache._reserved, *cache._by_node.values()]
    assert sorted(slots) == list(cache._slots) and len(cache._reserved) == reserved


def tokens(length: int, first: int = 0) -> list[int]:
    return [1000 * first + position for position in range(length)]


def submit(engine: FakeEngine, prompt: list[int], new: int = 1, **params: Any) -> Sequence:
    sequence = Sequence(len(engine.sampled), list(prompt), len(prompt), SamplingParams(max_tokens=new, **params))
    engine.submit(sequence)
    return sequence


def finish(engine: FakeEngine) -> None:
    while engine.scheduler.has_work:
        engine.step()
        engine.collect(leave=0)
    engine.scheduler.schedule()
    check_slots(engine.scheduler.allocator.snapshots)


def cached(engine: FakeEngine, prompt: list[int], **params: Any) -> int:
    """Run a prompt to its end. Returns its tokens that were not computed."""
    sequence = submit(engine, prompt, **params)
    finish(engine)
    return sequence.cached_prompt_tokens


def scheduled(engine: FakeEngine) -> SchedulerOutput:
    """Launch the next step of the fake engine; returns it."""
    steps: list[Any] = []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: (steps.append(schedule()), steps[0])[1]  # type: ignore[method-assign]
    engine.step()
    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    return steps[0]


def test_a_prompt_is_split_at_its_last_block_border_and_found_again() -> None:
    engine, prompt = make_engine(), tokens(22)
    submit(engine, prompt)
    first, second = scheduled(engine), scheduled(engine)
    assert [(start, stop) for _, start, stop in first.chunks + second.chunks] == [(0, 20), (20, 22)]
    [(source, target)] = first.snapshots
    assert source in range(1, 5) and target in range(5, 8)
    assert not (first.restores or second.restores or second.snapshots)
    finish(engine)
    again = submit(engine, prompt)
    third = scheduled(engine)
    assert [(start, stop) for _, start, stop in third.chunks] == [(20, 22)]
    assert third.restores == ((target, source),) and not third.snapshots, "the slot that was released last is used"
    finish(engine)
    assert again.cached_prompt_tokens == again.prefix_hit_tokens == 20


def test_the_next_turn_of_a_chat_starts_from_the_last_prompt() -> None:
    engine = make_engine()
    assert cached(engine, tokens(22), new=6) == 0
    turn = [*tokens(22), *tokens(12, 1)]
    assert cached(engine, turn) == 20
    assert cached(engine, [*turn, *tokens(5, 2)]) == 32, "12 tokens further"


def test_the_prefix_of_two_prompts_is_kept_for_the_third() -> None:
    """Where the shared instructions end is known only when a second prompt has them."""
    engine, instructions = make_engine(), tokens(18)
    prompts = [[*instructions, *tokens(10, user)] for user in (1, 2, 3, 4)]
    assert [cached(engine, prompt) for prompt in prompts] == [0, 0, 16, 16]


def test_snapshots_are_far_apart() -> None:
    engine = make_engine()
    assert [cached(engine, tokens(8)) for _ in range(2)] == [0, 0], "the last border is at 4 tokens"
    assert [cached(engine, tokens(9, 1)) for _ in range(2)] == [0, 8]
    assert cached(engine, [*tokens(9, 1)[:8], *tokens(7, 2)]) == 8
    assert cached(engine, [*tokens(9, 1)[:8], *tokens(7, 2)]) == 8, "the border at 12 tokens is 4 tokens further"


def test_a_prompt_that_shares_nothing_is_split_only_if_it_is_long() -> None:
    engine = make_engine(CONFIG._replace(min_lone_snapshot_tokens=32))
    assert [cached(engine, tokens(22, 1)) for _ in range(3)] == [0, 0, 20], "the second one shows that it is repeated"
    assert [cached(engine, tokens(33, 2)) for _ in range(2)] == [0, 32]
    assert cached(engine, [*tokens(22, 1), *tokens(12, 3)]) == 20
    assert cached(engine, [*tokens(22, 1), *tokens(12, 3)]) == 32, "it shared 20 tokens"


def test_the_least_recently_used_snapshot_is_dropped() -> None:
    engine = make_engine(snapshots=2)
    assert [cached(engine, tokens(10, number)) for number in (1, 2, 1, 3, 1, 2)] == [0, 0, 8, 0, 8, 0]


def test_a_snapshot_is_dropped_with_its_block() -> None:
    engine = make_engine(blocks=8)
    cached(engine, tokens(10, 1))
    cache = engine.scheduler.allocator.snapshots
    assert len(cache._by_node) == 1
    cached(engine, tokens(31, 2)[:7], new=24)  # takes all blocks, and is too short for a snapshot
    assert not cache._by_node
    assert cached(engine, tokens(10, 1)) == 0


def test_equal_prompts_of_one_step_take_one_snapshot() -> None:
    engine = make_engine(CONFIG._replace(prefill_tokens=200))
    cached(engine, tokens(10, 5))
    sequences = [submit(engine, tokens(22), new=3) for _ in range(4)]
    step = scheduled(engine)
    assert len(step.chunks) == 4 and len(step.snapshots) == 1
    finish(engine)
    assert [sequence.cached_prompt_tokens for sequence in sequences] == [0] * 4
    assert cached(engine, tokens(10, 5)) == 8, "none was dropped"
    assert cached(engine, tokens(22)) == 20


def test_several_prompts_of_one_step_have_snapshots_and_restores() -> None:
    engine = make_engine(CONFIG._replace(prefill_tokens=200), snapshots=4)
    prompts = [tokens(20 + number, number) for number in range(4)]
    for number, prompt in enumerate(prompts):
        submit(engine, prompt, new=1 + number)
    assert len(scheduled(engine).snapshots) == 4
    finish(engine)
    sequences = [submit(engine, [*prompt, 7]) for prompt in reversed(prompts)]
    assert len(scheduled(engine).restores) == 4
    finish(engine)
    assert [sequence.cached_prompt_tokens for sequence in sequences] == [20, 20, 20, 16]


def test_prompts_with_log_probabilities_are_neither_split_nor_found() -> None:
    engine = make_engine()
    assert cached(engine, tokens(22), prompt_logprobs=0) == cached(engine, tokens(22), prompt_logprobs=0) == 0
    assert not engine.scheduler.allocator.snapshots._by_node
    assert [cached(engine, tokens(22)) for _ in range(2)] == [0, 20]
    assert cached(engine, tokens(22), prompt_logprobs=0) == 0


def test_an_aborted_prompt_leaves_the_snapshot_of_its_border() -> None:
    """The copy follows its step, so another sequence may already have the slot."""
    engine = make_engine()
    sequence = submit(engine, tokens(22))
    scheduled(engine)
    engine.scheduler.abort(sequence)
    submit(engine, tokens(30, 1))
    finish(engine)
    assert cached(engine, tokens(22)) == 20


@pytest.mark.parametrize("fails", [True, False])
def test_a_failed_step_and_a_reset_leave_no_snapshot(fails: bool) -> None:
    engine = make_engine()
    cached(engine, tokens(22))
    submit(engine, tokens(22, 1))
    assert scheduled(engine).snapshots
    engine.scheduler.requeue_all() if fails else engine.scheduler.allocator.reset_prefix_cache()
    cache = engine.scheduler.allocator.snapshots
    assert not cache._by_node and not cache._reserved
    engine.scheduler.prefixes.start_step()
    assert not cache._by_node, "of the step that failed, or ran before the reset"
    check_slots(cache)


def test_adapters_do_not_share_snapshots() -> None:
    allocator = BlockAllocator(50, BLOCK, snapshots=SnapshotCache(5, 2))
    for adapter in (0, 1):
        blocks = allocator.allocate(5)
        allocator.register(tokens(20), blocks, 20, adapter)
        slot = allocator.reserve_snapshot(tokens(20), 20, adapter)
        assert slot is not None, "of no other adapter"
        allocator.add_snapshot(slot, tokens(20), 20, adapter)
        assert allocator.reserve_snapshot(tokens(20), 20, adapter) is None
    slots = [allocator.match_snapshot(tokens(21), adapter).slot for adapter in (0, 1, 2)]
    assert None not in slots[:2] and slots[0] != slots[1] and slots[2] is None
    engine = make_engine()
    for adapter in (1, 1, 2):
        submit(engine, tokens(18)).adapter_id = adapter
    assert len(scheduled(engine).snapshots) == 2
    finish(engine)


def test_a_slot_that_is_not_needed_is_free_again() -> None:
    cache = SnapshotCache(5, 2)
    slots = [cache.reserve(), cache.reserve()]
    assert cache.reserve() is None and None not in slots, "both are reserved for a step in flight"
    for node_id, slot in zip((7, None), slots, strict=True):
        cache.add(node_id, slot or 0)
    check_slots(cache)
    cache.add(7, cache.reserve() or 0)  # the node has a snapshot already
    check_slots(cache)
    assert cache.use(7) == slots[0] and cache.reserve() == slots[1]
    assert cache.reserve() == slots[0] and 7 not in cache


def test_without_snapshots_prompts_are_not_split() -> None:
    engine = make_engine(snapshots=0)
    for _ in range(2):
        submit(engine, tokens(22))
        assert [(start, stop) for _, start, stop in scheduled(engine).chunks] == [(0, 22)]
        finish(engine)


@settings(max_examples=200)
@given(
    arrivals=traffic(),
    block_size=st.integers(1, 4),
    spare_blocks=st.integers(0, 6) | st.sampled_from([12, 200]),
    snapshots=st.integers(0, 4),
    lag=st.integers(0, 2),
    config=st.builds(
        SchedulerConfig, st.integers(1, 5), st.integers(1, 16), st.integers(1, 4), st.integers(1, 4), st.booleans(),
        has_slots=st.just(True), min_snapshot_tokens=st.integers(1, 6), min_lone_snapshot_tokens=st.integers(1, 12),
    ),
    drains=st.sets(st.integers(0, 60)),
    resets=st.sets(st.integers(0, 60), max_size=2),
)  # fmt: skip
def test_random_traffic_continues_only_states_of_its_own_prefix(
    arrivals: list[Arrival], block_size: int, spare_blocks: int, snapshots: int, lag: int, config: SchedulerConfig,
    drains: set[int], resets: set[int],
) -> None:  # fmt: skip
    longest = max(len(arrival.prompt) + arrival.params.max_tokens for arrival in arrivals)
    engine = make_engine(config, -(-longest // block_size) + spare_blocks, snapshots, block_size)
    check_end(engine, run(engine, arrivals, drains, resets, lag), arrivals)
    finish(engine)


def shared_traffic(seed: int) -> list[Arrival]:
    """Chats with common instructions, several of which continue; some are aborted."""
    source = random.Random(seed)
    texts = [[source.randrange(2) for _ in range(length)] for length in (30, 40, 50)]
    arrivals = []
    for number in range(40):
        text = source.choice(texts)
        prompt = text[: source.choice((14, 20, 30))] + [source.randrange(2) for _ in range(source.choice((1, 3, 20)))]
        if arrivals and source.random() < 0.4:  # the next turn
            earlier = source.choice(arrivals)
            prompt = answer(earlier.prompt, earlier.params) + [source.randrange(2) for _ in range(3)]
        aborted = number + source.randrange(8) if source.random() < 0.15 else None
        stops = source.choice(((), (3,)))
        params = SamplingParams(max_tokens=source.choice((1, 4, 25)), stop_token_ids=stops)
        arrivals.append(Arrival(number // 2, prompt, params, aborted))
    return arrivals


def run_shared(seed: int, snapshots: int = 3, **changes: Any) -> FakeEngine:
    arrivals = shared_traffic(seed)
    longest = max(len(arrival.prompt) + arrival.params.max_tokens for arrival in arrivals)
    engine = make_engine(CONFIG._replace(**changes), longest // BLOCK + 3, snapshots)
    check_end(engine, run(engine, arrivals), arrivals)
    return engine


@pytest.mark.parametrize("mixed_steps", [False, True])
def test_traffic_with_common_prefixes_has_hits(mixed_steps: bool) -> None:
    engines = [run_shared(seed, mixed_steps=mixed_steps) for seed in range(4)]
    assert all(sum(sequence.prefix_hit_tokens for sequence in engine.sampled) > 100 for engine in engines)
    assert sum(engine.scheduler.preemptions for engine in engines) > 0, "the test needs preemptions"


def change_copies(
    patch: pytest.MonkeyPatch, change: Callable[[SlotCopies], SlotCopies], name: str = "snapshots"
) -> None:
    """Change the copies of each step to snapshots or, with the name "restores", from snapshots."""
    copies = getattr(PrefixReuse, name).fget
    patch.setattr(PrefixReuse, name, property(lambda self: change(copies(self))))


def neighbours_slot(patch: pytest.MonkeyPatch) -> None:
    change_copies(patch, lambda copies: tuple((1 + source % 4, target) for source, target in copies))


def after_a_later_step(patch: pytest.MonkeyPatch) -> None:
    steps: list[SlotCopies] = [()]
    change_copies(patch, lambda copies: (steps.append(copies), steps.pop(0))[1])


def after_the_overrun_step(patch: pytest.MonkeyPatch) -> None:
    """The state of a sequence that ends is kept at the last border of its tokens."""
    finish = Scheduler.finish

    def keeping(self: Scheduler, sequence: Sequence) -> None:
        if sequence in self.running:
            border = len(sequence.token_ids) // self.allocator.block_size * self.allocator.block_size
            self.allocator.register(sequence.token_ids, sequence.blocks, border)
            slot = self.allocator.reserve_snapshot(sequence.token_ids, border)
            if slot is not None:
                self.allocator.add_snapshot(slot, sequence.token_ids, border)
                kept.append((sequence.slot, slot))
        finish(self, sequence)

    def with_kept(copies: SlotCopies) -> SlotCopies:
        copies, kept[:] = (*kept, *copies), []
        return copies

    kept: list[tuple[int, int]] = []
    patch.setattr(Scheduler, "finish", keeping)
    change_copies(patch, with_kept, "restores")


def one_block_too_far(patch: pytest.MonkeyPatch) -> None:
    add = BlockAllocator.add_snapshot
    patch.setattr(
        BlockAllocator, "add_snapshot",
        lambda self, slot, ids, tokens, adapter: add(self, slot, ids, tokens - self.block_size, adapter),
    )  # fmt: skip


def a_longer_match(patch: pytest.MonkeyPatch) -> None:
    """All registered blocks are used, with a snapshot of a border before their end."""
    match = BlockAllocator.match_snapshot

    def longer(self: BlockAllocator, ids: list[int], adapter: int = 0) -> Any:
        found = match(self, ids, adapter)
        if found.slot is not None:
            self.release(found.blocks)
            return found._replace(blocks=self.match(ids, adapter))
        return found

    patch.setattr(BlockAllocator, "match_snapshot", longer)


def evicted_and_rewritten(patch: pytest.MonkeyPatch) -> None:
    """The node of an evicted snapshot still refers to its slot."""

    reserve = SnapshotCache.reserve

    def keeping(self: SnapshotCache) -> int | None:
        if not self._free and self._by_node:
            self._free.append(self._by_node[next(iter(self._by_node))])
            self._by_node.move_to_end(next(iter(self._by_node)))
        return reserve(self)

    patch.setattr(SnapshotCache, "reserve", keeping)


def exchanged_in_one_step(patch: pytest.MonkeyPatch) -> None:
    def exchange(copies: SlotCopies) -> SlotCopies:
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        return tuple(zip(sources[1:] + sources[:1], targets, strict=True))

    change_copies(patch, exchange)


def not_restored(patch: pytest.MonkeyPatch) -> None:
    change_copies(patch, lambda _: (), "restores")


FAULTS = [
    neighbours_slot, after_a_later_step, after_the_overrun_step, one_block_too_far, a_longer_match,
    evicted_and_rewritten, exchanged_in_one_step, not_restored,
]  # fmt: skip


@pytest.mark.parametrize("mixed_steps", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], mixed_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError)) as caught:
        for seed in range(4):
            run_shared(seed, mixed_steps=mixed_steps)
    assert "a state is continued where it ended" in str(caught.value) or isinstance(caught.value, KeyError)
