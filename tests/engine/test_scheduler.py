"""What runs next, in which order, and that no key is ever read that was not written: against a device made of dicts.

The first half states the rules one by one. The second runs random traffic through a fake engine that reads its tokens
one step late, as the real one does. Its cache maps each slot to the whole prefix whose key stands there, so a block
that is shared wrongly, handed out twice or freed too early shows as a wrong prefix.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcdeploy.engine.blocks import BlockAllocator
from tcdeploy.engine.scheduler import LOOKAHEAD_BLOCKS, Scheduler, SchedulerConfig, SchedulerOutput, SchedulerStats
from tcdeploy.engine.sequence import SamplingParams, Sequence

BLOCK = 4
ROOMY = SchedulerConfig(max_rows=4, prefill_tokens=16, max_prefill_sequences=3)


def make(blocks: int = 100, limits: SchedulerConfig = ROOMY, **changes: Any) -> Scheduler:
    return Scheduler(limits._replace(**changes), BlockAllocator(blocks + 1, BLOCK))


def request(length: int, new: int = 100, first: int = 0, **asked: Any) -> Sequence:
    """`length` tokens that no other request has, unless it is given the same `first`."""
    prompt = [first * 1000 + position for position in range(length)]
    return Sequence(first, prompt, length, SamplingParams(max_new_tokens=new, **asked))


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
    """All that is in flight arrives."""
    for sequence in sequences:
        while sequence.in_flight:
            sequence.receive(token_id)


def running(scheduler: Scheduler, *lengths: int, new: int = 100) -> list[Sequence]:
    """Sequences whose prompts are in, with no token unread."""
    sequences = submitted(scheduler, *lengths, new=new)
    while len(scheduler.running) < len(sequences):
        scheduler.schedule()
        read(*sequences)
    return sequences


def test_nothing_to_do_is_no_step() -> None:
    scheduler = make()
    assert (scheduler.schedule(), scheduler.has_work) == (None, False)


def test_prompts_are_packed_in_the_order_they_came_and_the_last_is_cut_where_the_step_is_full() -> None:
    scheduler = make()
    submitted(scheduler, 5, 6, 10)
    assert chunks(scheduler.schedule()) == [(0, 0, 5), (1, 0, 6), (2, 0, 5)]
    assert chunks(scheduler.schedule()) == [(2, 5, 10)]


def test_a_step_has_no_more_chunks_than_it_may() -> None:
    scheduler = make()
    submitted(scheduler, 2, 2, 2, 2)
    assert chunks(scheduler.schedule()) == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    assert chunks(scheduler.schedule()) == [(3, 0, 2)]


def test_a_long_prompt_goes_on_before_the_next_begins_and_they_share_its_last_step() -> None:
    scheduler = make()
    submitted(scheduler, 36, 3)
    steps = [chunks(scheduler.schedule()) for _ in range(3)]
    assert steps == [[(0, 0, 16)], [(0, 16, 32)], [(0, 32, 36), (1, 0, 3)]]


def test_only_the_last_chunk_samples_and_brings_the_sequence_into_a_row() -> None:
    scheduler = make()
    [sequence] = submitted(scheduler, 20)
    scheduler.schedule()
    assert (scheduler.prefilling, scheduler.running) == ([sequence], [])
    assert (sequence.num_computed_tokens, sequence.in_flight, len(sequence.blocks)) == (16, 0, 5)
    scheduler.schedule()
    assert (scheduler.prefilling, scheduler.running) == ([], [sequence])
    assert (sequence.num_computed_tokens, sequence.in_flight) == (20, 1)


def test_a_prompt_is_registered_when_its_step_is_on_its_way() -> None:
    """Not before it is launched, which it would hold up; the next to be admitted finds it."""
    scheduler = make()
    first, second = request(9, first=7), request(9, first=7)
    scheduler.submit(first)
    scheduler.schedule()
    assert scheduler.allocator.match(first.token_ids) == []
    scheduler.submit(second)
    assert chunks(scheduler.schedule()) == [(7, 8, 9)]
    assert second.prefix_hit_tokens == 8 and second.blocks[:2] == first.blocks[:2]


def test_a_prompt_that_was_aborted_behind_its_step_is_registered_once_and_holds_nothing() -> None:
    scheduler = make()
    first = request(9, first=7)
    scheduler.submit(first)
    scheduler.schedule()
    scheduler.abort(first)
    assert scheduler.schedule() is None
    scheduler.allocator.check_idle()
    assert len(scheduler.allocator.match(first.token_ids)) == 2


def test_a_decode_step_feeds_every_row_its_last_token_read_or_not() -> None:
    scheduler = make()
    first, second = submitted(scheduler, 5, 8)
    scheduler.schedule()
    assert rows(scheduler.schedule()) == [0, 1]
    assert [(s.num_computed_tokens, s.in_flight, s.length) for s in (first, second)] == [(6, 2, 7), (9, 2, 10)]
    read(first, second)
    scheduler.schedule()
    assert [(s.num_computed_tokens, s.in_flight, s.length) for s in (first, second)] == [(7, 1, 8), (10, 1, 11)]


def test_no_more_sequences_are_admitted_than_there_are_rows() -> None:
    scheduler = make(max_rows=2)
    first, _, _ = submitted(scheduler, 2, 2, 2)
    assert chunks(scheduler.schedule()) == [(0, 0, 2), (1, 0, 2)]
    assert rows(scheduler.schedule()) == [0, 1]
    scheduler.abort(first)
    assert chunks(scheduler.schedule()) == [(2, 0, 2)]


def test_a_half_done_prompt_takes_a_row_too() -> None:
    scheduler = make(max_rows=2, max_consecutive_prefills=1)
    running(scheduler, 2)
    for first in (1, 2):
        scheduler.submit(request(20, first=first))
    scheduler.schedule()
    scheduler.schedule()
    assert len(scheduler.running) + len(scheduler.prefilling) == 2 and len(scheduler.waiting) == 1


def test_running_sequences_get_a_token_after_so_many_prefill_steps() -> None:
    scheduler = make(max_consecutive_prefills=2, max_rows=10, max_prefill_sequences=1)
    submitted(scheduler, *[2] * 6)
    kinds = ["prefill" if step.chunks else "decode" for step in (scheduler.schedule() for _ in range(8)) if step]
    assert kinds == "prefill prefill decode prefill prefill decode prefill prefill".split()


def test_prefill_steps_go_on_where_nothing_runs() -> None:
    scheduler = make(max_consecutive_prefills=1)
    submitted(scheduler, 48)
    assert [chunks(scheduler.schedule())[0][1] for _ in range(3)] == [0, 16, 32]


def test_a_prompt_takes_the_blocks_of_all_its_tokens_when_it_is_admitted() -> None:
    scheduler = make(blocks=6)
    [sequence] = submitted(scheduler, 21, new=3)
    scheduler.schedule()
    assert (len(sequence.blocks), scheduler.allocator.free) == (6, 0)


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    for blocks, admitted in ((5, False), (6, True)):
        scheduler = make(blocks=blocks)
        running(scheduler, 5, new=4)
        second = request(9, first=1, new=4)
        scheduler.submit(second)
        scheduler.schedule()
        assert bool(second.blocks) == admitted


def test_who_cannot_be_admitted_lets_nobody_pass() -> None:
    scheduler = make(blocks=10)
    running(scheduler, 20, new=4)
    large, small = request(30, first=1, new=4), request(1, first=2, new=4)
    scheduler.submit(large)
    scheduler.submit(small)
    assert rows(scheduler.schedule()) == [0]
    assert list(scheduler.waiting) == [large, small]


def test_an_exhausted_sequence_leaves_before_its_last_token_is_read() -> None:
    scheduler = make()
    first, second = submitted(scheduler, 5, 5, new=2)
    second.params = SamplingParams(max_new_tokens=3)
    scheduler.schedule()
    scheduler.schedule()
    assert first.has_sampled_last_token and first.in_flight == 2
    assert rows(scheduler.schedule()) == [1]
    assert (first.blocks, first.finish_reason) == ([], "")
    read(first)
    assert first.finish_reason == "length"
    scheduler.finish(first)
    assert scheduler.running == [second]


def test_a_sequence_of_one_new_token_never_decodes() -> None:
    scheduler = make()
    submitted(scheduler, 5, new=1)
    scheduler.schedule()
    assert (scheduler.schedule(), scheduler.has_work) == (None, False)
    scheduler.allocator.check_idle()


def test_the_last_row_moves_into_the_place_of_one_that_left() -> None:
    scheduler = make()
    first, second, third = running(scheduler, 2, 2, 2)
    scheduler.abort(first)
    assert rows(scheduler.schedule()) == [2, 1]
    scheduler.abort(second)
    assert rows(scheduler.schedule()) == [2]
    assert scheduler.running == [third]


def test_rows_that_leave_together_leave_no_gap() -> None:
    scheduler = make(max_rows=6, max_prefill_sequences=6)
    submitted(scheduler, 2, 2, 2, 2, 2)
    for first, sequence in enumerate(scheduler.waiting):
        sequence.params = SamplingParams(max_new_tokens=1 if first in (1, 4) else 9)
    scheduler.schedule()
    assert rows(scheduler.schedule()) == [0, 3, 2]


def test_a_sequence_that_finished_gives_its_blocks_back_once() -> None:
    scheduler = make()
    [sequence] = running(scheduler, 5)
    sequence.finish_reason = "stop"
    scheduler.finish(sequence)
    scheduler.finish(sequence)
    assert (scheduler.has_work, sequence.blocks) == (False, [])
    scheduler.allocator.check_idle()


def test_a_finish_is_of_a_sequence_that_has_ended() -> None:
    scheduler = make()
    [sequence] = running(scheduler, 5)
    with pytest.raises(AssertionError):
        scheduler.finish(sequence)


def test_a_sequence_that_has_ended_is_not_decoded_even_if_nobody_said_so() -> None:
    scheduler = make()
    first, _ = running(scheduler, 5, 5)
    first.finish_reason = "stop"
    assert rows(scheduler.schedule()) == [1]


@pytest.mark.parametrize("steps", [0, 1, 2, 3], ids=["waiting", "half done", "prefilled", "decoded"])
def test_an_abort_takes_a_sequence_from_wherever_it_is(steps: int) -> None:
    scheduler = make()
    [sequence] = submitted(scheduler, 20)
    for _ in range(steps):
        scheduler.schedule()
    scheduler.abort(sequence)
    scheduler.abort(sequence)
    assert (sequence.finish_reason, sequence.blocks, scheduler.has_work) == ("abort", [], False)
    scheduler.allocator.check_idle()
    assert scheduler.schedule() is None


def test_an_abort_does_not_rewrite_how_a_sequence_ended() -> None:
    scheduler = make()
    [sequence] = running(scheduler, 5)
    sequence.finish_reason = "stop"
    scheduler.abort(sequence)
    assert (sequence.finish_reason, scheduler.has_work) == ("stop", False)


def test_a_known_beginning_is_not_computed_again() -> None:
    scheduler = make()
    first, again = request(11), request(11)
    scheduler.submit(first)
    scheduler.schedule()
    scheduler.submit(again)
    assert chunks(scheduler.schedule()) == [(0, 8, 11)]
    assert (again.prefix_hit_tokens, again.blocks[:2]) == (8, first.blocks[:2])
    assert again.blocks[2] != first.blocks[2]


def test_what_a_step_writes_is_found_only_by_later_steps() -> None:
    """All chunks of one step are one launch: its rows may not count on each other's keys."""
    scheduler = make(prefill_tokens=100)
    first, twin, later = request(11), request(11), request(11)
    scheduler.submit(first)
    scheduler.submit(twin)
    scheduler.schedule()
    assert twin.prefix_hit_tokens == 0 and set(first.blocks).isdisjoint(twin.blocks)
    scheduler.submit(later)
    scheduler.schedule()
    assert later.blocks[:2] == first.blocks[:2]


def test_only_what_was_launched_of_a_prompt_can_be_found() -> None:
    scheduler = make()
    first = request(40)
    scheduler.submit(first)
    scheduler.schedule()
    scheduler.abort(first)
    again = request(40)
    scheduler.submit(again)
    assert chunks(scheduler.schedule()) == [(0, 16, 32)]


@pytest.mark.parametrize("late", [False, True])
def test_an_answer_is_found_by_the_next_turn_of_its_chat(late: bool) -> None:
    """Keys of the answer too, as far as the host knows its tokens and the device has their keys."""
    scheduler = make()
    [sequence] = running(scheduler, 6)
    for _ in range(6):
        scheduler.schedule()
        read(sequence)
    if late:
        scheduler.schedule()
    assert len(sequence.token_ids) == 13 and sequence.num_computed_tokens == 12 + late
    scheduler.abort(sequence)
    following = Sequence(1, [*sequence.token_ids, 5, 5, 5, 5], 17, SamplingParams())
    scheduler.submit(following)
    assert chunks(scheduler.schedule()) == [(1, 12, 17)]


def test_where_blocks_are_plentiful_rows_get_some_ahead_together() -> None:
    scheduler = make(blocks=100)
    first, second = running(scheduler, 4, 5)
    scheduler.schedule()
    assert [len(s.blocks) for s in (first, second)] == [2 + LOOKAHEAD_BLOCKS, 2 + LOOKAHEAD_BLOCKS]


def test_no_row_gets_a_block_that_it_can_never_fill() -> None:
    scheduler = make(blocks=100)
    [sequence] = running(scheduler, 4, new=9)
    scheduler.schedule()
    assert len(sequence.blocks) == 3, "4 prompt tokens and 8 of the 9 new ones have keys"


def test_where_blocks_are_scarce_a_row_gets_only_the_one_it_needs() -> None:
    scheduler = make(blocks=3 * LOOKAHEAD_BLOCKS)
    first, second = running(scheduler, 4, 5, new=50)
    scheduler.schedule()
    assert [len(s.blocks) for s in (first, second)] == [2, 2]


def test_nobody_looks_ahead_while_another_waits_for_blocks() -> None:
    scheduler = make(blocks=60, max_consecutive_prefills=1)
    [sequence] = running(scheduler, 4, new=50)
    scheduler.submit(request(236, new=4, first=1))
    assert rows(scheduler.schedule()) == [0]
    assert len(sequence.blocks) == 2


def test_unused_blocks_ahead_go_before_any_sequence_does() -> None:
    scheduler = make(blocks=24)
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


def test_a_row_that_drops_blocks_keeps_those_of_its_next_token() -> None:
    """Else it would take others for them in the same call, and its block table would change unseen."""
    scheduler = make(blocks=40)
    [first] = running(scheduler, 4)
    while first.length < 9:
        scheduler.schedule()
        read(first)
    scheduler.submit(second := request(8, first=1))
    scheduler.schedule()
    read(first, second)
    assert (first.length, second.length) == (9, 9)
    scheduler.allocator.allocate(scheduler.allocator.free)
    before = list(first.blocks)
    assert rows(scheduler.schedule()) == [0, 1]
    assert first.blocks == before[:3] and len(second.blocks) == 3


def crowded() -> tuple[Scheduler, list[Sequence]]:
    """Three rows of one full block each and no block left for their next tokens, all tokens read."""
    scheduler = make(blocks=5, max_rows=3)
    sequences = [request(4, 12, first) for first in range(3)]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.schedule()
    read(*sequences)
    return scheduler, sequences


def test_the_sequence_admitted_last_is_sent_back_when_no_block_is_left() -> None:
    scheduler, [first, second, third] = crowded()
    assert rows(scheduler.schedule()) == [0, 1]
    assert (third.blocks, third.num_computed_tokens, third.preemptions, scheduler.preemptions) == ([], 0, 1, 1)
    assert list(scheduler.waiting) == [third]
    assert (first.preemptions, second.preemptions) == (0, 0)


def test_admission_decides_who_came_last_not_the_row() -> None:
    scheduler, [first, second, third] = crowded()
    scheduler.abort(first)
    assert scheduler.running == [third, second]
    scheduler.allocator.allocate(2)
    assert rows(scheduler.schedule()) == [1]
    assert list(scheduler.waiting) == [third]


def test_who_was_sent_back_comes_before_those_who_wait_and_finds_its_keys() -> None:
    scheduler, [first, second, third] = crowded()
    scheduler.submit(request(1, 4, first=3))
    scheduler.schedule()
    assert [sequence.request_id for sequence in scheduler.waiting] == [2, 3]
    scheduler.abort(first)
    scheduler.abort(second)
    assert chunks(scheduler.schedule()) == [(2, 4, 5), (3, 0, 1)]
    assert (third.prefix_hit_tokens, third.num_computed_tokens, third.in_flight) == (4, 5, 1)


def test_those_sent_back_together_keep_their_order() -> None:
    scheduler = make(blocks=8, max_rows=4, max_prefill_sequences=4, prefill_tokens=64)
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


def test_who_was_sent_back_returns_only_when_its_tokens_are_read() -> None:
    scheduler, [first, second, third] = crowded()
    third.in_flight = 1  # as if one more had been sampled
    third.token_ids.pop()
    assert rows(scheduler.schedule()) == [0, 1]
    assert third.preemptions == 1
    scheduler.abort(first)
    scheduler.abort(second)
    assert scheduler.schedule() is None and scheduler.has_work
    third.receive(1)
    assert chunks(scheduler.schedule()) == [(2, 4, 5)]


def test_a_stop_that_is_read_after_a_sequence_was_sent_back_takes_it_from_the_queue() -> None:
    scheduler, [_, _, third] = crowded()
    scheduler.schedule()
    third.finish_reason = "stop"
    scheduler.finish(third)
    assert third not in scheduler.waiting


def test_a_half_done_prompt_is_sent_back_before_what_runs() -> None:
    scheduler = make(blocks=8)
    running(scheduler, 4, new=20)
    second = request(20, 4, first=1)
    scheduler.submit(second)
    scheduler.schedule()
    assert scheduler.prefilling == [second]
    scheduler.allocator.allocate(scheduler.allocator.free)
    scheduler.limits = scheduler.limits._replace(max_consecutive_prefills=1)
    assert rows(scheduler.schedule()) == [0]
    assert (scheduler.prefilling, list(scheduler.waiting), second.num_computed_tokens) == ([], [second], 0)


def test_a_request_that_never_fits_is_not_the_schedulers_to_refuse() -> None:
    scheduler = make(blocks=3)
    with pytest.raises(AssertionError, match="caller"):
        scheduler.submit(request(4, 10))
    scheduler.submit(request(4, 9))


def test_the_load_is_counted() -> None:
    scheduler = make(max_rows=2)
    assert scheduler.stats == SchedulerStats(0, 0, 0, 0, 0)
    submitted(scheduler, 5, 20, 3)
    scheduler.schedule()
    assert scheduler.stats == SchedulerStats(waiting=1, prefilling=1, running=1, used_blocks=7, preemptions=0)


# Random traffic


def next_token(prefix: tuple[int, ...]) -> int:
    """The fake model: 0 to 4, and a wrong token anywhere before changes it."""
    return hash(prefix) % 5  # tuples of whole numbers hash alike in every process


def answer(prompt: list[int], params: SamplingParams) -> list[int]:
    """What generation without any engine gives."""
    tokens = tuple(prompt)
    for _ in range(params.max_new_tokens):
        tokens += (next_token(tokens),)
        if tokens[-1] in params.stop_token_ids:
            break
    return list(tokens)


@dataclass
class FakeEngine:
    """Launches at once, reads late, and looks at every slot that a step would read or write."""

    scheduler: Scheduler
    keys: dict[int, tuple[int, ...]] = field(default_factory=dict)  # slot -> the prefix whose key it holds
    sampled: dict[Sequence, list[int]] = field(default_factory=dict)  # the device's tokens, prompt included
    progress: dict[Sequence, tuple[int, int]] = field(default_factory=dict)  # (preemptions, next position)
    hits: Counter[Sequence] = field(default_factory=Counter)  # prefix hits of the starts before
    unread: deque[list[tuple[Sequence, int]]] = field(default_factory=deque)
    tables: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # of the decode step before
    prefills_in_a_row: int = 0

    def submit(self, sequence: Sequence) -> None:
        self.sampled[sequence] = list(sequence.token_ids)
        self.scheduler.submit(sequence)

    def step(self) -> bool:
        """Schedule and launch one; False where nothing can run."""
        ran_before = {s for s in self.scheduler.running if not s.has_sampled_last_token and not s.finish_reason}
        step = self.scheduler.schedule()
        self.check_owners()
        if step is None:
            return False
        assert bool(step.chunks) != bool(step.decode)
        self.check_turns(step, bool(ran_before))
        self.unread.append(self.prefill(step) if step.chunks else self.decode(step))
        return True

    def check_turns(self, step: SchedulerOutput, something_ran: bool) -> None:
        if step.chunks and something_ran:
            assert self.prefills_in_a_row < self.scheduler.limits.max_consecutive_prefills
        self.prefills_in_a_row = self.prefills_in_a_row + 1 if step.chunks else 0

    def prefill(self, step: SchedulerOutput) -> list[tuple[Sequence, int]]:
        limits = self.scheduler.limits
        assert len(step.chunks) <= limits.max_prefill_sequences
        assert sum(chunk.stop - chunk.start for chunk in step.chunks) <= limits.prefill_tokens
        for sequence, start, _ in step.chunks:
            self.check_start(sequence, start)
            self.check_keys(sequence, start)  # written by steps before this one
        for sequence, start, stop in step.chunks:
            assert start < stop <= len(sequence.token_ids), "the host feeds what it knows"
            self.write(sequence, start, stop)
        for sequence, _, stop in step.chunks:
            self.check_keys(sequence, stop)
        return [(s, self.sample(s, stop)) for s, _, stop in step.chunks if stop == len(s.token_ids)]

    def decode(self, step: SchedulerOutput) -> list[tuple[Sequence, int]]:
        assert list(step.decode) == self.scheduler.running
        assert len(step.decode) <= self.scheduler.limits.max_rows
        self.check_tables(step.decode)
        for sequence in step.decode:
            position = sequence.num_computed_tokens - 1
            assert self.progress[sequence] == (sequence.preemptions, position)
            assert position == sequence.length - 2, "the token sampled last, before this step's"
            self.write(sequence, position, position + 1)
        for sequence in step.decode:
            self.check_keys(sequence, sequence.num_computed_tokens)
        return [(sequence, self.sample(sequence, sequence.num_computed_tokens)) for sequence in step.decode]

    def check_start(self, sequence: Sequence, start: int) -> None:
        """Where the chunk before ended; after a (re)start, behind what the prefix cache gave."""
        preemptions, position = self.progress.get(sequence, (-1, 0))
        if preemptions != sequence.preemptions:
            position = sequence.prefix_hit_tokens - self.hits[sequence]
            self.hits[sequence] = sequence.prefix_hit_tokens
        assert start == position
        self.progress[sequence] = (sequence.preemptions, start)

    def check_tables(self, decode: tuple[Sequence, ...]) -> None:
        """Sequence and number of blocks tell whether a row's table is still that of the decode step before."""
        for (before, table), sequence in zip(self.tables, decode, strict=False):
            if before is sequence and len(table) == len(sequence.blocks):
                assert table == sequence.blocks
        self.tables = [(sequence, list(sequence.blocks)) for sequence in decode]

    def write(self, sequence: Sequence, start: int, stop: int) -> None:
        tokens, block_size = self.sampled[sequence], self.scheduler.allocator.block_size
        for position in range(start, stop):
            block = sequence.blocks[position // block_size]
            assert self.owners()[block] == 1, "nobody writes where another reads"
            self.keys[block * block_size + position % block_size] = tuple(tokens[: position + 1])
        self.progress[sequence] = (sequence.preemptions, stop)

    def check_keys(self, sequence: Sequence, stop: int) -> None:
        tokens, block_size = self.sampled[sequence], self.scheduler.allocator.block_size
        for position in range(stop):
            slot = sequence.blocks[position // block_size] * block_size + position % block_size
            assert self.keys.get(slot) == tuple(tokens[: position + 1])

    def sample(self, sequence: Sequence, stop: int) -> int:
        tokens = self.sampled[sequence]
        assert len(tokens) == stop, "each token is sampled once"
        assert len(tokens) < sequence.prompt_length + sequence.params.max_new_tokens
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

    def living(self) -> list[Sequence]:
        return self.scheduler.running + self.scheduler.prefilling

    def owners(self) -> Counter[int]:
        return Counter(block for sequence in self.living() for block in sequence.blocks)

    def check_owners(self) -> None:
        """A block of two owners is the same full block of the same prefix; what nobody owns is not in use."""
        allocator, places = self.scheduler.allocator, {}
        allocator.assert_consistent()
        for sequence in self.living():
            longest = sequence.prompt_length + sequence.params.max_new_tokens
            assert len(sequence.blocks) <= allocator.blocks_for(longest)
            for number, block in enumerate(sequence.blocks):
                prefix = tuple(sequence.token_ids[: (number + 1) * allocator.block_size])
                assert places.setdefault(block, prefix if block not in places else None) == prefix
        shared = [block for block, owners in self.owners().items() if owners > 1]
        assert all(len(places[block]) % allocator.block_size == 0 for block in shared)
        assert self.scheduler.stats.used_blocks == len(places)
        assert not any(sequence.blocks for sequence in self.sampled if sequence not in self.living())


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams
    aborted_at: int | None


def run(
    engine: FakeEngine, arrivals: list[Arrival], drains: Container[int] = (), resets: Container[int] = (), lag: int = 1
) -> list[Sequence]:
    """All requests from start to end, read `lag` steps late. At the steps in `drains` the host reads everything, and
    at those in `resets` all prefixes are forgotten."""
    sequences = [Sequence(i, list(a.prompt), len(a.prompt), a.params) for i, a in enumerate(arrivals)]
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
    raise AssertionError("it never ends")


def check_end(engine: FakeEngine, sequences: list[Sequence], arrivals: list[Arrival]) -> None:
    for sequence, arrival in zip(sequences, arrivals, strict=True):
        expected = answer(arrival.prompt, arrival.params)
        if sequence.finish_reason == "abort":
            assert sequence.token_ids == expected[: len(sequence.token_ids)]
        else:
            stopped = expected[-1] in arrival.params.stop_token_ids
            assert (sequence.token_ids, sequence.finish_reason) == (expected, "stop" if stopped else "length")
            assert arrival.aborted_at is None or sequence.num_output_tokens
    engine.scheduler.allocator.check_idle()
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


@st.composite
def traffic(draw: st.DrawFn) -> list[Arrival]:
    """Prompts begin alike, and some hold what another's answer will be, as the turns of a chat do."""
    starts = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=2))
    stories = [answer(start, SamplingParams(max_new_tokens=24)) for start in starts]
    arrivals = []
    for _ in range(draw(st.integers(3, 12))):
        story = draw(st.sampled_from(stories))
        prompt = story[: draw(st.integers(1, len(story)))] + draw(st.lists(st.integers(0, 1), max_size=2))
        stops = draw(st.sampled_from([(), (), (3,)]))
        params = SamplingParams(max_new_tokens=draw(st.integers(1, 25)), stop_token_ids=stops)
        at = draw(st.integers(0, 15))
        arrivals.append(Arrival(at, prompt, params, draw(st.none() | st.integers(at, at + 30))))
    return arrivals


@settings(max_examples=300, deadline=None)
@given(
    arrivals=traffic(),
    block_size=st.integers(1, 4),
    spare_blocks=st.integers(0, 6) | st.sampled_from([12, 200]),
    lag=st.integers(0, 2),
    limits=st.builds(SchedulerConfig, st.integers(1, 5), st.integers(1, 16), st.integers(1, 4), st.integers(1, 4)),
    drains=st.sets(st.integers(0, 60)),
    resets=st.sets(st.integers(0, 60), max_size=2),
)
def test_random_traffic_reads_only_keys_that_were_written_and_gets_exactly_its_tokens(
    arrivals: list[Arrival],
    block_size: int,
    spare_blocks: int,
    lag: int,
    limits: SchedulerConfig,
    drains: set[int],
    resets: set[int],
) -> None:
    most = max(len(arrival.prompt) + arrival.params.max_new_tokens for arrival in arrivals)
    engine = FakeEngine(Scheduler(limits, BlockAllocator(1 + -(-most // block_size) + spare_blocks, block_size)))
    check_end(engine, run(engine, arrivals, drains, resets, lag), arrivals)


def test_with_far_too_few_blocks_all_requests_finish_sent_back_many_times() -> None:
    """Twenty requests, each of which needs all the blocks there are by its end."""
    arrivals = [Arrival(0, [i % 2, i, 7, i, 8, 9], SamplingParams(max_new_tokens=34), None) for i in range(20)]
    engine = FakeEngine(Scheduler(SchedulerConfig(20, 64, 20), BlockAllocator(1 + 10, BLOCK)))
    check_end(engine, run(engine, arrivals), arrivals)
    assert engine.scheduler.preemptions >= 20, "or this shows nothing"
    assert max(sequence.preemptions for sequence in engine.sampled) >= 2


def test_traffic_of_one_long_beginning_is_mostly_found() -> None:
    beginning = [i % 7 for i in range(64)]
    arrivals = [Arrival(3 * i, [*beginning, i], SamplingParams(max_new_tokens=5), None) for i in range(10)]
    engine = FakeEngine(Scheduler(SchedulerConfig(4, 32, 4), BlockAllocator(1 + 60, BLOCK)))
    check_end(engine, run(engine, arrivals), arrivals)
    assert sum(sequence.prefix_hit_tokens for sequence in engine.sampled) >= 8 * 64


def test_the_same_traffic_is_scheduled_the_same_way_twice() -> None:
    def steps() -> list[Any]:
        arrivals = [Arrival(i, [i % 3, i, 7, 8, 9], SamplingParams(max_new_tokens=30), None) for i in range(12)]
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
