"""The order of steps, and that no step reads a cache slot before it is written.

The first half tests the rules one by one. The second half runs random traffic through a fake engine that reads its
tokens one step late, like the real one. Its cache is a dict from each slot to the whole prefix whose key it holds, so
a block that is shared wrongly, allocated twice or freed too early shows up as a wrong prefix.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.scheduler import (
    LOOKAHEAD_BLOCKS,
    Scheduler,
    SchedulerConfig,
    SchedulerStats,
)
from tcdeploy.engine.schedule.sequence import SamplingParams, SchedulerOutput, Sequence
from tcdeploy.engine.schedule.slots import SCRATCH_SLOT
from tcdeploy.engine.schedule.step_costs import StepCosts, StepPredictor
from tcdeploy.engine.schedule.step_size import SMALLEST_STEP_FACTOR, target_factor
from tcdeploy.planning.attention import ITL_TARGET_DECODE_STEPS
from tests.block_checks import assert_consistent, assert_idle

BLOCK = 4
ROOMY = SchedulerConfig(max_rows=4, prefill_tokens=16, max_prefill_sequences=3)


def make_scheduler(blocks: int = 100, config: SchedulerConfig = ROOMY, **changes: Any) -> Scheduler:
    return Scheduler(config._replace(**changes), BlockAllocator(blocks + 1, BLOCK))


def request(length: int, new: int = 100, first: int = 0, **params: Any) -> Sequence:
    """`length` prompt tokens, different from those of any request with another `first`."""
    prompt = [first * 1000 + position for position in range(length)]
    return Sequence(first, prompt, length, SamplingParams(max_tokens=new, **params))


def submitted(scheduler: Scheduler, *lengths: int, new: int = 100) -> list[Sequence]:
    sequences = [request(length, new, first) for first, length in enumerate(lengths)]
    for sequence in sequences:
        scheduler.submit(sequence)
    return sequences


def chunks(step: SchedulerOutput | None) -> list[tuple[int, int, int]]:
    assert step is not None and not step.decode
    return [(chunk.sequence.request_id, chunk.start, chunk.stop) for chunk in step.chunks]


def rows(step: SchedulerOutput | None) -> list[int]:
    assert step is not None and not step.chunks
    return [sequence.request_id for sequence in step.decode]


def read(*sequences: Sequence, token_id: int = 1) -> None:
    """Receive all tokens in flight."""
    for sequence in sequences:
        while sequence.num_in_flight:
            sequence.receive(token_id)


def running(scheduler: Scheduler, *lengths: int, new: int = 100) -> list[Sequence]:
    """Sequences whose prompts are prefilled and whose tokens are read."""
    sequences = submitted(scheduler, *lengths, new=new)
    for _ in range(1000):
        if len(scheduler.running) == len(sequences):
            return sequences
        scheduler.schedule()
        read(*sequences)
    raise AssertionError("livelock")


def test_without_work_there_is_no_step() -> None:
    scheduler = make_scheduler()
    assert (scheduler.schedule(), scheduler.has_work) == (None, False)


def test_prompts_are_packed_in_order_of_arrival_and_the_last_is_split_when_the_step_is_full() -> None:
    scheduler = make_scheduler()
    submitted(scheduler, 5, 6, 10)
    assert chunks(scheduler.schedule()) == [(0, 0, 5), (1, 0, 6), (2, 0, 5)]
    assert chunks(scheduler.schedule()) == [(2, 5, 10)]


def test_a_step_has_at_most_max_prefill_sequences_chunks() -> None:
    scheduler = make_scheduler()
    submitted(scheduler, 2, 2, 2, 2)
    assert chunks(scheduler.schedule()) == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    assert chunks(scheduler.schedule()) == [(3, 0, 2)]


def test_a_long_prompt_continues_before_the_next_starts_and_shares_its_last_step() -> None:
    scheduler = make_scheduler()
    submitted(scheduler, 36, 3)
    steps = [chunks(scheduler.schedule()) for _ in range(3)]
    assert steps == [[(0, 0, 16)], [(0, 16, 32)], [(0, 32, 36), (1, 0, 3)]]


def test_only_the_last_chunk_samples_and_moves_the_sequence_to_a_row() -> None:
    scheduler = make_scheduler()
    [sequence] = submitted(scheduler, 20)
    scheduler.schedule()
    assert (scheduler.prefilling, scheduler.running) == ([sequence], [])
    assert (sequence.num_computed_tokens, sequence.num_in_flight, len(sequence.blocks)) == (16, 0, 5)
    scheduler.schedule()
    assert (scheduler.prefilling, scheduler.running) == ([], [sequence])
    assert (sequence.num_computed_tokens, sequence.num_in_flight) == (20, 1)


def test_a_prompt_is_registered_after_its_step_is_launched() -> None:
    """Registering earlier would delay the launch. The next sequence to be admitted finds the prompt."""
    scheduler = make_scheduler()
    first, second = request(9, first=7), request(9, first=7)
    scheduler.submit(first)
    scheduler.schedule()
    assert scheduler.allocator.match(first.token_ids) == []
    scheduler.submit(second)
    assert chunks(scheduler.schedule()) == [(7, 8, 9)]
    assert second.prefix_hit_tokens == 8 and second.blocks[:2] == first.blocks[:2]


def test_a_prompt_aborted_after_its_step_is_registered_once_and_holds_no_block() -> None:
    scheduler = make_scheduler()
    first = request(9, first=7)
    scheduler.submit(first)
    scheduler.schedule()
    scheduler.abort(first)
    assert scheduler.schedule() is None
    assert_idle(scheduler.allocator)
    assert len(scheduler.allocator.match(first.token_ids)) == 2


def test_a_decode_step_feeds_every_row_whether_its_last_token_is_read_or_not() -> None:
    scheduler = make_scheduler()
    first, second = submitted(scheduler, 5, 8)
    scheduler.schedule()
    assert rows(scheduler.schedule()) == [0, 1]
    assert [(s.num_computed_tokens, s.num_in_flight, s.length) for s in (first, second)] == [(6, 2, 7), (9, 2, 10)]
    read(first, second)
    scheduler.schedule()
    assert [(s.num_computed_tokens, s.num_in_flight, s.length) for s in (first, second)] == [(7, 1, 8), (10, 1, 11)]


def test_no_more_sequences_are_admitted_than_there_are_rows() -> None:
    scheduler = make_scheduler(max_rows=2)
    first, _, _ = submitted(scheduler, 2, 2, 2)
    assert chunks(scheduler.schedule()) == [(0, 0, 2), (1, 0, 2)]
    assert rows(scheduler.schedule()) == [0, 1]
    scheduler.abort(first)
    assert chunks(scheduler.schedule()) == [(2, 0, 2)]


def test_a_partly_prefilled_prompt_counts_against_the_rows() -> None:
    scheduler = make_scheduler(max_rows=2, max_consecutive_prefills=1)
    running(scheduler, 2)
    for first in (1, 2):
        scheduler.submit(request(20, first=first))
    scheduler.schedule()
    scheduler.schedule()
    assert len(scheduler.running) + len(scheduler.prefilling) == 2 and len(scheduler.waiting) == 1


def test_a_mixed_step_decodes_every_row_and_gives_the_rest_of_its_tokens_to_prompts() -> None:
    scheduler = make_scheduler(mixed_steps=True, max_rows=10)
    first, second = running(scheduler, 3, 4)
    prompts = [request(12, first=5), request(9, first=6)]
    for sequence in prompts:
        scheduler.submit(sequence)
    step = scheduler.schedule()
    assert step is not None and step.decode == (first, second)
    assert [(chunk.sequence, chunk.start, chunk.stop) for chunk in step.chunks] == [
        (prompts[0], 0, 12),
        (prompts[1], 0, 2),
    ]
    assert scheduler.running == [first, second, prompts[0]]
    read(first, second, prompts[0])
    step = scheduler.schedule()
    assert step is not None and step.decode == (first, second, prompts[0])
    assert [(chunk.start, chunk.stop) for chunk in step.chunks] == [(2, 9)]


def test_a_prompt_that_exceeds_a_step_size_by_little_is_split_if_two_steps_are_faster() -> None:
    """Steps of 512 and 128 tokens take 12 + 8 ms. One step is padded to 2,048 and takes 44 ms, as for 1,900 tokens."""
    costs = StepCosts(((128, 8.0), (512, 12.0), (2048, 44.0)), ((1, 5.0), (32, 6.0)))
    config = SchedulerConfig(8, 2048, max_prefill_sequences=4, mixed_steps=True, itl_target_ms=100.0)
    scheduler = Scheduler(config, BlockAllocator(2000, BLOCK), StepPredictor(costs, lambda rows: (128, 512, 2048)))
    [first] = running(scheduler, 3)
    scheduler.submit(request(512, first=5))
    step = scheduler.schedule()
    assert step is not None and [(start, stop) for _, start, stop in step.chunks] == [(0, 511)]
    read(first)
    step = scheduler.schedule()
    assert step is not None and [(start, stop) for _, start, stop in step.chunks] == [(511, 512)]
    scheduler.submit(request(1900, first=6))
    read(*scheduler.running)
    step = scheduler.schedule()
    assert step is not None and [(start, stop) for _, start, stop in step.chunks] == [(0, 1900)]


def test_a_step_without_running_sequences_or_without_prompts_is_not_mixed() -> None:
    scheduler = make_scheduler(mixed_steps=True)
    submitted(scheduler, 5, 8)
    assert chunks(scheduler.schedule()) == [(0, 0, 5), (1, 0, 8)]
    assert rows(scheduler.schedule()) == [0, 1]


def test_steps_are_not_mixed_if_rows_would_take_more_than_half_of_the_tokens() -> None:
    """Otherwise as many rows as tokens would leave no room for prompts, for as long as they run."""
    scheduler = make_scheduler(mixed_steps=True, max_rows=10, prefill_tokens=8, max_prefill_sequences=8)
    running(scheduler, *[2] * 5)
    scheduler.submit(request(20, first=7))
    assert chunks(scheduler.schedule()) == [(7, 0, 8)]


def test_running_sequences_decode_after_max_consecutive_prefills() -> None:
    scheduler = make_scheduler(max_consecutive_prefills=2, max_rows=10, max_prefill_sequences=1)
    submitted(scheduler, *[2] * 6)
    kinds = ["prefill" if step.chunks else "decode" for step in (scheduler.schedule() for _ in range(8)) if step]
    assert kinds == "prefill prefill decode prefill prefill decode prefill prefill".split()


def test_prefill_continues_while_no_sequence_is_running() -> None:
    scheduler = make_scheduler(max_consecutive_prefills=1)
    submitted(scheduler, 48)
    assert [chunks(scheduler.schedule())[0][1] for _ in range(3)] == [0, 16, 32]


def test_admission_allocates_blocks_for_the_whole_prompt() -> None:
    scheduler = make_scheduler(blocks=6)
    [sequence] = submitted(scheduler, 21, new=3)
    scheduler.schedule()
    assert (len(sequence.blocks), scheduler.allocator.num_allocatable) == (6, 0)


def test_admission_leaves_one_free_block_per_admitted_sequence() -> None:
    for blocks, admitted in ((5, False), (6, True)):
        scheduler = make_scheduler(blocks=blocks)
        running(scheduler, 5, new=4)
        second = request(9, first=1, new=4)
        scheduler.submit(second)
        scheduler.schedule()
        assert bool(second.blocks) == admitted


def test_a_sequence_that_cannot_be_admitted_is_not_overtaken() -> None:
    scheduler = make_scheduler(blocks=10)
    running(scheduler, 20, new=4)
    large, small = request(30, first=1, new=4), request(1, first=2, new=4)
    scheduler.submit(large)
    scheduler.submit(small)
    assert rows(scheduler.schedule()) == [0]
    assert list(scheduler.waiting) == [large, small]


def with_group(sequence: Sequence, group: int) -> Sequence:
    sequence.group_id = group
    return sequence


def drain(scheduler: Scheduler, steps: int) -> None:
    """Run steps and read their tokens. Finished sequences leave."""
    for _ in range(steps):
        step = scheduler.schedule()
        assert step is not None
        read(*(chunk.sequence for chunk in step.chunks), *step.decode)


def test_a_request_with_many_choices_gives_a_row_to_each_later_request_and_keeps_one() -> None:
    scheduler = make_scheduler()
    choices = [with_group(request(3, first=first), 1) for first in range(20)]
    for sequence in choices:
        scheduler.submit(sequence)
    drain(scheduler, 4)
    assert scheduler.running == choices[:4], "alone, it has all rows"
    others = [with_group(request(3, first=100 + number), 100 + number) for number in range(5)]
    for number, sequence in enumerate(others[:3]):
        scheduler.submit(sequence)
        drain(scheduler, 3)
        assert sequence in scheduler.running and scheduler.preemptions == number + 1
    assert set(scheduler.running) == {choices[0], *others[:3]}
    for sequence in others[3:]:
        scheduler.submit(sequence)
    drain(scheduler, 5)
    assert set(scheduler.running) == {choices[0], *others[:3]}, "each group has one row, and the fourth has to wait"


def test_a_free_row_goes_to_the_group_with_the_fewest_rows_and_no_group_starves() -> None:
    scheduler = make_scheduler(max_rows=2)
    choices = [with_group(request(3, new=3, first=first), 1) for first in range(6)]
    for sequence in choices:
        scheduler.submit(sequence)
    finished: list[int | None] = []
    for number in range(60):
        scheduler.submit(with_group(request(3, new=3, first=100 + number), 100 + number))
        for _ in range(3):
            before = list(scheduler.running)
            drain(scheduler, 1)
            finished += [sequence.group_id for sequence in before if sequence.finish_reason]
    assert finished.count(1) >= 6, "all six choices ended among later requests"
    assert max(len(choice.token_ids) for choice in choices) == 6


def test_a_sequence_is_released_when_its_last_token_is_sampled_but_not_read() -> None:
    scheduler = make_scheduler()
    first, second = submitted(scheduler, 5, 5, new=2)
    second.params = SamplingParams(max_tokens=3)
    scheduler.schedule()
    scheduler.schedule()
    assert first.has_sampled_last_token and first.num_in_flight == 2
    assert rows(scheduler.schedule()) == [1]
    assert (first.blocks, first.finish_reason) == ([], "")
    read(first)
    assert first.finish_reason == "length"
    scheduler.finish(first)
    assert scheduler.running == [second]


def test_a_sequence_of_one_new_token_never_decodes() -> None:
    scheduler = make_scheduler()
    submitted(scheduler, 5, new=1)
    scheduler.schedule()
    assert (scheduler.schedule(), scheduler.has_work) == (None, False)
    assert_idle(scheduler.allocator)


def test_the_last_row_fills_the_gap_of_a_released_row() -> None:
    scheduler = make_scheduler()
    first, second, third = running(scheduler, 2, 2, 2)
    scheduler.abort(first)
    assert rows(scheduler.schedule()) == [2, 1]
    scheduler.abort(second)
    assert rows(scheduler.schedule()) == [2]
    assert scheduler.running == [third]


def test_rows_released_together_leave_no_gap() -> None:
    scheduler = make_scheduler(max_rows=6, max_prefill_sequences=6)
    submitted(scheduler, 2, 2, 2, 2, 2)
    for first, sequence in enumerate(scheduler.waiting):
        sequence.params = SamplingParams(max_tokens=1 if first in (1, 4) else 9)
    scheduler.schedule()
    assert rows(scheduler.schedule()) == [0, 3, 2]


def test_finishing_twice_releases_blocks_once() -> None:
    scheduler = make_scheduler()
    [sequence] = running(scheduler, 5)
    sequence.finish_reason = "stop"
    scheduler.finish(sequence)
    scheduler.finish(sequence)
    assert (scheduler.has_work, sequence.blocks) == (False, [])
    assert_idle(scheduler.allocator)


def test_finish_requires_a_finish_reason() -> None:
    scheduler = make_scheduler()
    [sequence] = running(scheduler, 5)
    with pytest.raises(AssertionError):
        scheduler.finish(sequence)


def test_a_sequence_with_a_finish_reason_is_not_decoded_before_finish_is_called() -> None:
    scheduler = make_scheduler()
    first, _ = running(scheduler, 5, 5)
    first.finish_reason = "stop"
    assert rows(scheduler.schedule()) == [1]


@pytest.mark.parametrize("steps", [0, 1, 2, 3], ids=["waiting", "partly prefilled", "prefilled", "decoded"])
def test_an_abort_removes_a_sequence_in_any_state(steps: int) -> None:
    scheduler = make_scheduler()
    [sequence] = submitted(scheduler, 20)
    for _ in range(steps):
        scheduler.schedule()
    scheduler.abort(sequence)
    scheduler.abort(sequence)
    assert (sequence.finish_reason, sequence.blocks, scheduler.has_work) == ("abort", [], False)
    assert_idle(scheduler.allocator)
    assert scheduler.schedule() is None


def test_an_abort_keeps_an_earlier_finish_reason() -> None:
    scheduler = make_scheduler()
    [sequence] = running(scheduler, 5)
    sequence.finish_reason = "stop"
    scheduler.abort(sequence)
    assert (sequence.finish_reason, scheduler.has_work) == ("stop", False)


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    first, again = request(11), request(11)
    scheduler.submit(first)
    scheduler.schedule()
    scheduler.submit(again)
    assert chunks(scheduler.schedule()) == [(0, 8, 11)]
    assert (again.prefix_hit_tokens, again.blocks[:2]) == (8, first.blocks[:2])
    assert again.blocks[2] != first.blocks[2]


def test_cached_tokens_of_the_prompt_are_those_of_the_first_admission() -> None:
    """After a preemption a sequence finds its own tokens in the cache, which no client has sent before."""
    scheduler = make_scheduler()
    [sequence] = running(scheduler, 11)
    scheduler.requeue_admitted()
    scheduler.schedule()
    assert (sequence.prefix_hit_tokens, sequence.cached_prompt_tokens) == (8, 0)
    again = request(11)
    scheduler.submit(again)
    scheduler.schedule()
    assert (again.prefix_hit_tokens, again.cached_prompt_tokens) == (8, 8)


def test_blocks_are_matched_only_by_steps_after_the_one_that_writes_them() -> None:
    """All chunks of a step are one launch, so they cannot read each other's keys."""
    scheduler = make_scheduler(prefill_tokens=100)
    first, duplicate, later = request(11), request(11), request(11)
    scheduler.submit(first)
    scheduler.submit(duplicate)
    scheduler.schedule()
    assert duplicate.prefix_hit_tokens == 0 and set(first.blocks).isdisjoint(duplicate.blocks)
    scheduler.submit(later)
    scheduler.schedule()
    assert later.blocks[:2] == first.blocks[:2]


def test_only_launched_chunks_of_a_prompt_are_matched() -> None:
    scheduler = make_scheduler()
    first = request(40)
    scheduler.submit(first)
    scheduler.schedule()
    scheduler.abort(first)
    again = request(40)
    scheduler.submit(again)
    assert chunks(scheduler.schedule()) == [(0, 16, 32)]


@pytest.mark.parametrize("has_unread_token", [False, True])
def test_the_next_turn_of_a_chat_matches_the_previous_answer(has_unread_token: bool) -> None:
    """New tokens are matched too, if the host has read them and their keys are written."""
    scheduler = make_scheduler()
    [sequence] = running(scheduler, 6)
    for _ in range(6):
        scheduler.schedule()
        read(sequence)
    if has_unread_token:
        scheduler.schedule()
    assert len(sequence.token_ids) == 13 and sequence.num_computed_tokens == 12 + has_unread_token
    scheduler.abort(sequence)
    following = Sequence(1, [*sequence.token_ids, 5, 5, 5, 5], 17, SamplingParams())
    scheduler.submit(following)
    assert chunks(scheduler.schedule()) == [(1, 12, 17)]


def test_rows_get_lookahead_blocks_together_while_enough_are_free() -> None:
    scheduler = make_scheduler(blocks=100)
    first, second = running(scheduler, 4, 5)
    scheduler.schedule()
    assert [len(s.blocks) for s in (first, second)] == [2 + LOOKAHEAD_BLOCKS, 2 + LOOKAHEAD_BLOCKS]


def test_lookahead_stops_at_the_last_block_that_a_row_can_fill() -> None:
    scheduler = make_scheduler(blocks=100)
    [sequence] = running(scheduler, 4, new=9)
    scheduler.schedule()
    assert len(sequence.blocks) == 3, "the cache holds 4 prompt tokens and 8 of the 9 new ones"


def test_without_spare_blocks_a_row_gets_only_the_block_it_needs() -> None:
    scheduler = make_scheduler(blocks=3 * LOOKAHEAD_BLOCKS)
    first, second = running(scheduler, 4, 5, new=50)
    scheduler.schedule()
    assert [len(s.blocks) for s in (first, second)] == [2, 2]


def test_no_lookahead_while_a_queued_sequence_waits_for_blocks() -> None:
    scheduler = make_scheduler(blocks=60, max_consecutive_prefills=1)
    [sequence] = running(scheduler, 4, new=50)
    scheduler.submit(request(236, new=4, first=1))
    assert rows(scheduler.schedule()) == [0]
    assert len(sequence.blocks) == 2


def test_unused_lookahead_blocks_are_freed_before_any_preemption() -> None:
    scheduler = make_scheduler(blocks=24)
    [first] = running(scheduler, 4, new=60)
    scheduler.schedule()
    assert len(first.blocks) == 2 + LOOKAHEAD_BLOCKS
    second = request(52, new=8, first=1)
    scheduler.submit(second)
    while len(second.blocks) < 15:
        assert len(first.blocks) == 2 + LOOKAHEAD_BLOCKS
        scheduler.schedule()
        read(first, second)
    assert len(first.blocks) == scheduler.allocator.blocks_for(first.num_computed_tokens) < 2 + LOOKAHEAD_BLOCKS
    assert scheduler.preemptions == 0


def test_a_row_that_drops_lookahead_keeps_the_block_of_its_next_token() -> None:
    """Otherwise it would allocate others in the same call, and its block table would change at equal length."""
    scheduler = make_scheduler(blocks=40)
    [first] = running(scheduler, 4)
    while first.length < 9:
        scheduler.schedule()
        read(first)
    scheduler.submit(second := request(8, first=1))
    scheduler.schedule()
    read(first, second)
    assert (first.length, second.length) == (9, 9)
    scheduler.allocator.allocate(scheduler.allocator.num_allocatable)
    blocks_before = list(first.blocks)
    assert rows(scheduler.schedule()) == [0, 1]
    assert first.blocks == blocks_before[:3] and len(second.blocks) == 3


def full_cache() -> tuple[Scheduler, list[Sequence]]:
    """Three rows with one full block each and too few blocks for their next tokens; all tokens read."""
    scheduler = make_scheduler(blocks=5, max_rows=3)
    sequences = [request(4, 12, first) for first in range(3)]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.schedule()
    read(*sequences)
    return scheduler, sequences


def test_the_last_admitted_sequence_is_preempted_when_blocks_run_out() -> None:
    scheduler, [first, second, third] = full_cache()
    assert rows(scheduler.schedule()) == [0, 1]
    assert (third.blocks, third.num_computed_tokens, third.preemptions, scheduler.preemptions) == ([], 0, 1, 1)
    assert list(scheduler.waiting) == [third]
    assert (first.preemptions, second.preemptions) == (0, 0)


def test_preemption_follows_the_order_of_admission_not_of_rows() -> None:
    scheduler, [first, second, third] = full_cache()
    scheduler.abort(first)
    assert scheduler.running == [third, second]
    scheduler.allocator.allocate(2)
    assert rows(scheduler.schedule()) == [1]
    assert list(scheduler.waiting) == [third]


def test_a_preempted_sequence_is_first_in_the_queue_and_matches_its_own_prefix() -> None:
    scheduler, [first, second, third] = full_cache()
    scheduler.submit(request(1, 4, first=3))
    scheduler.schedule()
    assert [sequence.request_id for sequence in scheduler.waiting] == [2, 3]
    scheduler.abort(first)
    scheduler.abort(second)
    assert chunks(scheduler.schedule()) == [(2, 4, 5), (3, 0, 1)]
    assert (third.prefix_hit_tokens, third.num_computed_tokens, third.num_in_flight) == (4, 5, 1)


def test_sequences_preempted_together_keep_their_order() -> None:
    scheduler = make_scheduler(blocks=8, max_rows=4, max_prefill_sequences=4, prefill_tokens=64)
    sequences = [request(length, 12, first) for first, length in enumerate((8, 4, 4, 4))]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.schedule()
    read(*sequences)
    while scheduler.preemptions < 2:
        scheduler.schedule()
        read(*sequences)
    ids = [sequence.request_id for sequence in scheduler.waiting]
    assert ids == sorted(ids) and len(ids) >= 2


def test_a_preempted_sequence_is_admitted_only_after_its_tokens_are_read() -> None:
    scheduler, [first, second, third] = full_cache()
    third.num_in_flight = 1  # as if one more had been sampled
    third.token_ids.pop()
    assert rows(scheduler.schedule()) == [0, 1]
    assert third.preemptions == 1
    scheduler.abort(first)
    scheduler.abort(second)
    assert scheduler.schedule() is None and scheduler.has_work
    third.receive(1)
    assert chunks(scheduler.schedule()) == [(2, 4, 5)]


def test_finishing_a_preempted_sequence_removes_it_from_the_queue() -> None:
    scheduler, [_, _, third] = full_cache()
    scheduler.schedule()
    third.finish_reason = "stop"
    scheduler.finish(third)
    assert third not in scheduler.waiting


def test_a_partly_prefilled_prompt_is_preempted_before_running_sequences() -> None:
    scheduler = make_scheduler(blocks=8)
    running(scheduler, 4, new=20)
    second = request(20, 4, first=1)
    scheduler.submit(second)
    scheduler.schedule()
    assert scheduler.prefilling == [second]
    scheduler.allocator.allocate(scheduler.allocator.num_allocatable)
    scheduler.config = scheduler.config._replace(max_consecutive_prefills=1)
    assert rows(scheduler.schedule()) == [0]
    assert (scheduler.prefilling, list(scheduler.waiting), second.num_computed_tokens) == ([], [second], 0)


def test_submit_asserts_that_the_caller_checked_the_size() -> None:
    scheduler = make_scheduler(blocks=3)
    with pytest.raises(AssertionError, match="caller"):
        scheduler.submit(request(4, 10))
    scheduler.submit(request(4, 9))


def test_stats_count_sequences_and_used_blocks() -> None:
    scheduler = make_scheduler(max_rows=2)
    assert scheduler.stats == SchedulerStats(0, 0, 0, 0, 0)
    submitted(scheduler, 5, 20, 3)
    scheduler.schedule()
    assert scheduler.stats == SchedulerStats(waiting=1, prefilling=1, running=1, used_blocks=7, preemptions=0)


# Random traffic


def next_token(prefix: tuple[int, ...]) -> int:
    """The fake model: a token from 0 to 4 that depends on every token before it."""
    return hash(prefix) % 5  # tuples of ints have the same hash in every process


def answer(prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens of plain generation, without an engine."""
    tokens = tuple(prompt)
    for _ in range(params.max_tokens):
        tokens += (next_token(tokens),)
        if tokens[-1] in params.stop_token_ids:
            break
    return list(tokens)


@dataclass
class FakeEngine:
    """Launches at once, reads tokens late, and checks every slot that a step reads or writes."""

    scheduler: Scheduler
    keys: dict[int, tuple[int, ...]] = field(default_factory=dict)  # slot -> the prefix whose key it holds
    sampled: dict[Sequence, list[int]] = field(default_factory=dict)  # tokens on the device, prompt included
    progress: dict[Sequence, tuple[int, int]] = field(default_factory=dict)  # (preemptions, next position)
    hits: Counter[Sequence] = field(default_factory=Counter)  # prefix hits of earlier admissions
    unread: deque[list[tuple[Sequence, int]]] = field(default_factory=deque)
    states: dict[int, list[int]] = field(default_factory=dict)  # state slot -> the tokens that its state is made of
    tables: dict[Sequence, list[int]] = field(default_factory=dict)  # uploaded at decode steps, of rows kept since
    prefills_in_a_row: int = 0
    noise: random.Random | None = None  # of the measured times of steps, with step costs

    def submit(self, sequence: Sequence) -> None:
        self.sampled[sequence] = list(sequence.token_ids)
        self.scheduler.submit(sequence)

    def step(self) -> bool:
        """Schedule and launch one step; False if nothing can run."""
        ran_before = {s for s in self.scheduler.running if not s.has_sampled_last_token and not s.finish_reason}
        waiting_before = list(self.scheduler.waiting)
        computed_before = {sequence: sequence.num_computed_tokens for sequence in self.sampled}
        step = self.scheduler.schedule()
        self.check_owners()
        self.check_admissions(waiting_before)
        if step is None:
            return False
        assert step.chunks or step.decode
        self.check_turns(step, ran_before)
        self.check_time(step, computed_before)
        for source, target in step.restores:
            self.states[target] = self.states[source]
        for sequence, start, _ in step.chunks:
            self.check_keys(sequence, start)  # written by earlier steps
        sampled = self.decode(step) if step.decode else []
        sampled += self.prefill(step) if step.chunks else []
        for source, target in step.snapshots:
            self.states[target] = self.states[source]
        if step.decode:
            self.tables = {sequence: list(sequence.blocks) for sequence in self.scheduler.running}
        self.unread.append(sampled)
        return True

    def check_turns(self, step: SchedulerOutput, ran_before: set[Sequence]) -> None:
        config = self.scheduler.config
        if step.chunks and step.decode:
            assert config.mixed_steps and 2 * len(step.decode) <= config.prefill_tokens
        if config.mixed_steps and 2 * len(ran_before) <= config.prefill_tokens:
            decoded = set(step.decode)
            assert all(sequence in decoded or sequence not in self.admitted() for sequence in ran_before)
        elif step.chunks and ran_before:
            assert self.prefills_in_a_row < config.max_consecutive_prefills
        self.prefills_in_a_row = self.prefills_in_a_row + 1 if step.chunks and not step.decode else 0

    def check_admissions(self, waiting_before: list[Sequence]) -> None:
        """Without groups, sequences are admitted in the order of the queue. At most two prompts are partly computed.

        More are if prompts are split for snapshots.
        """
        keeps_state = self.scheduler.allocator.snapshots.capacity
        assert len(self.scheduler.prefilling) <= (self.scheduler.config.max_prefill_sequences if keeps_state else 2)
        if all(sequence.group_id is None for sequence in self.sampled):
            admitted = set(self.admitted())
            newly_admitted = [sequence for sequence in waiting_before if sequence in admitted]
            assert newly_admitted == waiting_before[: len(newly_admitted)]

    def check_time(self, step: SchedulerOutput, computed_before: dict[Sequence, int]) -> None:
        """A mixed step meets the target, or takes at most SMALLEST_STEP_FACTOR times as long as the smallest size.

        The prediction assumes that the prefix of all chunks is that of the first prompt. The scheduler does not know
        which tokens of a waiting prompt are in the prefix cache. With `noise`, measured times differ from predictions.
        """
        config, predictor, rows = self.scheduler.config, self.scheduler.predictor, len(step.decode)
        if predictor is None:
            return
        if step.decode and step.chunks:
            known_prefix = computed_before[step.chunks[0].sequence]
            decode_ms = predictor.estimate(rows, rows, step.row_context).predicted_ms
            prompts = sum(sequence not in step.decode and not sequence.finish_reason for sequence in computed_before)
            default_target_ms = ITL_TARGET_DECODE_STEPS * decode_ms * target_factor(prompts, rows)
            target_ms = config.itl_target_ms or default_target_ms
            sizes = predictor.step_sizes(rows)
            least = min((size for size in sizes if size >= rows + config.min_chunk_tokens), default=sizes[-1])
            ms, least_ms = (
                predictor.estimate(
                    size, rows, step.row_context, (size - rows) * known_prefix, known_prefix
                ).predicted_ms
                for size in (step.num_tokens, least)
            )
            limit_ms = max(target_ms, SMALLEST_STEP_FACTOR * least_ms)
            assert ms <= limit_ms * (1 + 1e-9) or step.num_tokens <= least
        estimate = predictor.estimate(step.num_tokens, rows, step.row_context, step.prefix_pairs, step.prefix)
        if self.noise is not None:
            predictor.observe(estimate, estimate.table_ms * self.noise.uniform(0.2, 3.0))

    def prefill(self, step: SchedulerOutput) -> list[tuple[Sequence, int]]:
        config = self.scheduler.config
        self.keep_tables_of_rows()
        assert len(step.chunks) <= config.max_prefill_sequences
        assert len(step.decode) + sum(stop - start for _, start, stop in step.chunks) <= config.prefill_tokens
        for sequence, start, _ in step.chunks:
            self.check_start(sequence, start)
        for sequence, start, stop in step.chunks:
            assert start < stop <= len(sequence.token_ids), "the host feeds tokens that it has read"
            self.write(sequence, start, stop)
        for sequence, _, stop in step.chunks:
            self.check_keys(sequence, stop)
        return [(s, self.sample(s, stop)) for s, _, stop in step.chunks if stop == len(s.token_ids)]

    def decode(self, step: SchedulerOutput) -> list[tuple[Sequence, int]]:
        assert list(step.decode) == self.scheduler.running[: len(step.decode)]
        assert set(self.scheduler.running[len(step.decode) :]) <= {chunk.sequence for chunk in step.chunks}
        assert len(step.decode) <= self.scheduler.config.max_rows
        self.check_tables(step.decode)
        for sequence in step.decode:
            position = sequence.num_computed_tokens - 1
            assert self.progress[sequence] == (sequence.preemptions, position)
            assert position == sequence.length - 2, "the position of the last token of the previous step"
            self.write(sequence, position, position + 1)
        for sequence in step.decode:
            self.check_keys(sequence, sequence.num_computed_tokens)
        return [(sequence, self.sample(sequence, sequence.num_computed_tokens)) for sequence in step.decode]

    def check_start(self, sequence: Sequence, start: int) -> None:
        """A chunk starts where the last one ended or, after an admission, behind the prefix cache hit."""
        preemptions, position = self.progress.get(sequence, (-1, 0))
        if preemptions != sequence.preemptions:
            position = sequence.prefix_hit_tokens - self.hits[sequence]
            self.hits[sequence] = sequence.prefix_hit_tokens
        assert start == position
        self.progress[sequence] = (sequence.preemptions, start)

    def keep_tables_of_rows(self) -> None:
        """Each step assigns the rows (engine/step/rows.py). A sequence without a row loses its table."""
        running = set(self.scheduler.running)
        self.tables = {sequence: table for sequence, table in self.tables.items() if sequence in running}

    def check_tables(self, decode: tuple[Sequence, ...]) -> None:
        """A sequence that has kept its row has the same blocks as at the last decode step if it has as many."""
        self.keep_tables_of_rows()
        for sequence in decode:
            table = self.tables.get(sequence)
            assert table is None or len(table) != len(sequence.blocks) or table == sequence.blocks

    def write(self, sequence: Sequence, start: int, stop: int) -> None:
        tokens, block_size, owners = self.sampled[sequence], self.scheduler.allocator.block_size, self.owners()
        for position in range(start, stop):
            block = sequence.blocks[position // block_size]
            assert owners[block] == 1, "a block with two owners is never written"
            self.keys[block * block_size + position % block_size] = tuple(tokens[: position + 1])
        if self.scheduler.config.has_slots:
            assert sequence.slot != SCRATCH_SLOT
            assert start == 0 or self.states[sequence.slot] == tokens[:start], "a state is continued where it ended"
            self.states[sequence.slot] = tokens[:stop]
        self.progress[sequence] = (sequence.preemptions, stop)

    def check_keys(self, sequence: Sequence, stop: int) -> None:
        tokens, block_size = self.sampled[sequence], self.scheduler.allocator.block_size
        for position in range(stop):
            slot = sequence.blocks[position // block_size] * block_size + position % block_size
            assert self.keys.get(slot) == tuple(tokens[: position + 1])

    def sample(self, sequence: Sequence, stop: int) -> int:
        tokens = self.sampled[sequence]
        assert len(tokens) == stop, "each token is sampled once"
        assert len(tokens) < sequence.prompt_length + sequence.params.max_tokens
        tokens.append(next_token(tuple(tokens)))
        return tokens[-1]

    def collect(self, leave: int) -> None:
        """Read all steps but the last `leave`."""
        while len(self.unread) > leave:
            for sequence, token_id in self.unread.popleft():
                if sequence.finish_reason:
                    continue
                sequence.receive(token_id)
                if sequence.finish_reason:
                    self.scheduler.finish(sequence)

    def admitted(self) -> list[Sequence]:
        return self.scheduler.running + self.scheduler.prefilling

    def owners(self) -> Counter[int]:
        return Counter(block for sequence in self.admitted() for block in sequence.blocks)

    def check_owners(self) -> None:
        """Owners of a shared block have the same prefix in it, and only owned blocks are in use."""
        allocator, places = self.scheduler.allocator, {}
        assert_consistent(allocator)
        for sequence in self.admitted():
            longest = sequence.prompt_length + sequence.params.max_tokens
            assert len(sequence.blocks) <= allocator.blocks_for(longest)
            for number, block in enumerate(sequence.blocks):
                prefix = tuple(sequence.token_ids[: (number + 1) * allocator.block_size])
                assert places.setdefault(block, prefix if block not in places else None) == prefix
        shared = [block for block, owners in self.owners().items() if owners > 1]
        assert all(len(places[block]) % allocator.block_size == 0 for block in shared)
        assert self.scheduler.stats.used_blocks == len(places)
        assert not any(sequence.blocks for sequence in self.sampled if sequence not in self.admitted())


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams
    aborted_at: int | None
    group: int | None = None


def run(
    engine: FakeEngine, arrivals: list[Arrival], drains: Container[int] = (), resets: Container[int] = (), lag: int = 1
) -> list[Sequence]:
    """Run all requests to their end, reading tokens `lag` steps late.

    The host reads everything at the steps in `drains`, and resets the prefix cache at the steps in `resets`.
    """
    sequences = [Sequence(i, list(a.prompt), len(a.prompt), a.params, a.group) for i, a in enumerate(arrivals)]
    for number in range(10_000):
        for sequence, arrival in zip(sequences, arrivals, strict=True):
            if arrival.step == number:
                engine.submit(sequence)
            if arrival.aborted_at == number and sequence in engine.sampled:
                engine.scheduler.abort(sequence)
        if number in resets:
            engine.scheduler.allocator.reset_prefix_cache()
        launched = engine.step()
        assert launched or engine.unread or not engine.scheduler.has_work, "stuck"
        engine.collect(leave=lag if launched and number not in drains else 0)
        if not engine.scheduler.has_work and len(engine.sampled) == len(sequences):
            engine.collect(leave=0)
            return sequences
    raise AssertionError("livelock")


def check_end(engine: FakeEngine, sequences: list[Sequence], arrivals: list[Arrival]) -> None:
    for sequence, arrival in zip(sequences, arrivals, strict=True):
        expected = answer(arrival.prompt, arrival.params)
        if sequence.finish_reason == "abort":
            assert sequence.token_ids == expected[: len(sequence.token_ids)]
        else:
            stopped = expected[-1] in arrival.params.stop_token_ids
            assert (sequence.token_ids, sequence.finish_reason) == (expected, "stop" if stopped else "length")
            assert arrival.aborted_at is None or sequence.num_output_tokens
    assert_idle(engine.scheduler.allocator)
    assert engine.scheduler.allocator.num_allocatable == engine.scheduler.allocator.capacity
    assert engine.scheduler.slots.num_free == engine.scheduler.slots.capacity


@st.composite
def traffic(draw: st.DrawFn) -> list[Arrival]:
    """Prompts share prefixes, and some contain the answer of another request, like turns of a chat."""
    prefixes = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=2))
    texts = [answer(prefix, SamplingParams(max_tokens=24)) for prefix in prefixes]
    arrivals = []
    for _ in range(draw(st.integers(3, 12))):
        text = draw(st.sampled_from(texts))
        prompt = text[: draw(st.integers(1, len(text)))] + draw(st.lists(st.integers(0, 1), max_size=2))
        stops = draw(st.sampled_from([(), (), (3,)]))
        params = SamplingParams(max_tokens=draw(st.integers(1, 25)), stop_token_ids=stops)
        step = draw(st.integers(0, 15))
        group = draw(st.sampled_from([None, 1, 2]))
        arrivals.append(Arrival(step, prompt, params, draw(st.none() | st.integers(step, step + 30)), group))
    return arrivals


@settings(max_examples=200)
@given(
    arrivals=traffic(),
    block_size=st.integers(1, 4),
    spare_blocks=st.integers(0, 6) | st.sampled_from([12, 200]),
    lag=st.integers(0, 2),
    config=st.builds(
        SchedulerConfig, st.integers(1, 5), st.integers(1, 16), st.integers(1, 4), st.integers(1, 4), st.booleans()
    ),
    drains=st.sets(st.integers(0, 60)),
    resets=st.sets(st.integers(0, 60), max_size=2),
)
def test_random_traffic_reads_only_written_keys_and_gets_exactly_its_tokens(
    arrivals: list[Arrival],
    block_size: int,
    spare_blocks: int,
    lag: int,
    config: SchedulerConfig,
    drains: set[int],
    resets: set[int],
) -> None:
    longest = max(len(arrival.prompt) + arrival.params.max_tokens for arrival in arrivals)
    blocks = 1 + -(-longest // block_size) + spare_blocks
    allocator = BlockAllocator(blocks, block_size, reuses_prefixes=not config.has_slots)
    engine = FakeEngine(Scheduler(config, allocator))
    check_end(engine, run(engine, arrivals, drains, resets, lag), arrivals)


@pytest.mark.parametrize("mixed_steps", [False, True])
def test_all_requests_finish_despite_many_preemptions(mixed_steps: bool) -> None:
    """Twenty requests, each of which needs every block of the cache by its end."""
    arrivals = [Arrival(0, [i % 2, i, 7, i, 8, 9], SamplingParams(max_tokens=34), None) for i in range(20)]
    config = SchedulerConfig(20, 64, 20, mixed_steps=mixed_steps)
    engine = FakeEngine(Scheduler(config, BlockAllocator(1 + 10, BLOCK)))
    check_end(engine, run(engine, arrivals), arrivals)
    assert engine.scheduler.preemptions >= 20, "the test needs many preemptions"
    assert max(sequence.preemptions for sequence in engine.sampled) >= 2


def test_requests_with_one_long_prefix_are_mostly_cached() -> None:
    prefix = [i % 7 for i in range(64)]
    arrivals = [Arrival(3 * i, [*prefix, i], SamplingParams(max_tokens=5), None) for i in range(10)]
    engine = FakeEngine(Scheduler(SchedulerConfig(4, 32, 4), BlockAllocator(1 + 60, BLOCK)))
    check_end(engine, run(engine, arrivals), arrivals)
    assert sum(sequence.prefix_hit_tokens for sequence in engine.sampled) >= 8 * 64


def test_scheduling_is_deterministic() -> None:
    def steps() -> list[Any]:
        arrivals = [Arrival(i, [i % 3, i, 7, 8, 9], SamplingParams(max_tokens=30), None) for i in range(12)]
        engine = FakeEngine(Scheduler(SchedulerConfig(6, 8, 3, 2), BlockAllocator(1 + 12, BLOCK)))
        launched: list[Any] = []
        schedule = engine.scheduler.schedule

        def recorded() -> SchedulerOutput | None:
            step = schedule()
            if step is not None:
                launched.append([(s.request_id, start, stop) for s, start, stop in step.chunks])
                launched.append([(s.request_id, tuple(s.blocks)) for s in step.decode])
            return step

        engine.scheduler.schedule = recorded  # type: ignore[method-assign]
        run(engine, arrivals)
        return launched

    assert steps() == steps()
