"""Mixed steps that are bounded by their predicted time, and long prompts that share their steps with others.

The random traces run in the fake engine of test_scheduler.py, which checks each step. By hand, more of them:

    python -m tests.engine.test_scheduler_costs 10000
"""

from __future__ import annotations

import math
import random
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcdeploy.engine.blocks import BlockAllocator
from tcdeploy.engine.scheduler import LONG_PROMPT_STEPS, Scheduler, SchedulerConfig
from tcdeploy.engine.sequence import SamplingParams, Sequence
from tcdeploy.engine.step_costs import StepCosts, StepPredictor
from tests.engine.test_scheduler import Arrival, FakeEngine, check_end, make_scheduler, read, request, run, running

COSTS = StepCosts(((16, 4.0), (64, 16.0)), ((1, 3.0), (4, 4.0)), (16, 32, 48, 64), min_chunk_tokens=4)


def make_mixed(target_ms: float = 12.0, costs: StepCosts | None = COSTS, **changes: Any) -> Scheduler:
    values = {"max_rows": 8, "prefill_tokens": 64, "max_prefill_sequences": 4, "mixed_steps": True, **changes}
    config = SchedulerConfig(**values, itl_target_ms=target_ms)
    return Scheduler(config, BlockAllocator(1001, 4), StepPredictor(costs) if costs else None)


def chunk_sizes(scheduler: Scheduler) -> dict[int, int]:
    """Tokens of each prompt in the next step; its tokens are read at once."""
    step = scheduler.schedule()
    assert step is not None
    read(*step.decode, *(chunk.sequence for chunk in step.chunks))
    return {chunk.sequence.request_id: chunk.stop - chunk.start for chunk in step.chunks}


@pytest.mark.parametrize(("target_ms", "tokens"), [(1e3, 64), (12.0, 48), (11.9, 32), (1.0, 16)])
def test_a_mixed_step_has_the_largest_size_that_meets_the_target(target_ms: float, tokens: int) -> None:
    scheduler = make_mixed(target_ms)
    running(scheduler, 5)
    scheduler.submit(request(70, first=1))
    assert chunk_sizes(scheduler) == {1: tokens - 1}


def test_if_no_sequence_decodes_a_step_has_all_tokens() -> None:
    scheduler = make_mixed(1.0)
    scheduler.submit(request(70, first=1))
    assert chunk_sizes(scheduler) == {1: 64}


def test_the_budget_follows_the_correction() -> None:
    scheduler = make_mixed()
    running(scheduler, 5)
    scheduler.submit(request(100, first=1))
    assert scheduler.predictor is not None
    scheduler.predictor.corrections["mixed"] = 2.0
    assert chunk_sizes(scheduler) == {1: 15}


def test_a_long_prompt_shares_its_steps_and_gets_what_the_others_leave() -> None:
    scheduler = make_mixed()
    scheduler.submit(request(400, first=1))
    scheduler.submit(request(10, first=2))
    scheduler.submit(request(50, first=3))
    assert chunk_sizes(scheduler) == {1: 32, 2: 10, 3: 22}
    assert [sequence.request_id for sequence in scheduler.prefilling] == [1, 3]
    assert chunk_sizes(scheduler) == {1: 24, 3: 23}, "one of 48 tokens is a decode row"
    assert chunk_sizes(scheduler) == {1: 42, 3: 5}
    assert chunk_sizes(scheduler) == {1: 30}, "with two decode rows, 48 tokens would take 13 ms"


def test_only_two_prompts_are_computed_in_part() -> None:
    scheduler = make_mixed()
    for first in (1, 2, 3):
        scheduler.submit(request(400, first=first))
    steps = [chunk_sizes(scheduler) for _ in range(3)]
    assert steps == [{1: 32, 2: 32}] * 3
    assert (len(scheduler.prefilling), len(scheduler.waiting)) == (2, 1)


def test_a_prompt_that_needs_few_steps_is_not_split_for_others() -> None:
    scheduler = make_mixed()
    scheduler.submit(request(64 * LONG_PROMPT_STEPS, first=1))
    scheduler.submit(request(10, first=2))
    assert [chunk_sizes(scheduler) for _ in range(5)] == [{1: 64}] * 4 + [{2: 10}]


def test_a_long_prompt_has_whole_steps_if_only_one_prompt_fits_in_a_step_or_steps_are_not_mixed() -> None:
    for changes in ({"max_prefill_sequences": 1}, {"mixed_steps": False}):
        scheduler = make_mixed(**changes)
        scheduler.submit(request(400, first=1))
        scheduler.submit(request(10, first=2))
        assert chunk_sizes(scheduler) == {1: 64}


def partly_computed() -> tuple[Scheduler, list[Sequence]]:
    """Two prompts of which a part is computed, and one that waits."""
    scheduler = make_mixed()
    sequences = [request(400, first=first) for first in (1, 2, 3)]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.schedule()
    assert scheduler.prefilling == sequences[:2]
    return scheduler, sequences


@pytest.mark.parametrize("number", [0, 1])
def test_after_an_abort_of_a_partly_computed_prompt_the_other_continues(number: int) -> None:
    scheduler, sequences = partly_computed()
    scheduler.abort(sequences[number])
    assert sequences[number].blocks == []
    assert chunk_sizes(scheduler) == {2 - number: 32, 3: 32}
    for sequence in sequences:
        scheduler.abort(sequence)
    scheduler.allocator.check_idle()


def test_after_a_failed_step_both_partly_computed_prompts_wait_in_their_order() -> None:
    scheduler, sequences = partly_computed()
    scheduler.requeue_all()
    assert list(scheduler.waiting) == sequences and scheduler.prefilling == []
    assert chunk_sizes(scheduler) == {1: 32, 2: 32}


def test_the_second_of_two_partly_computed_prompts_is_preempted_first() -> None:
    scheduler = make_mixed()
    [decoding] = running(scheduler, 4, new=60)
    sequences = [request(400, first=first) for first in (1, 2)]
    for sequence in sequences:
        scheduler.submit(sequence)
    chunk_sizes(scheduler)
    assert scheduler.prefilling == sequences
    scheduler.allocator.allocate(scheduler.allocator.num_allocatable)
    while scheduler.prefilling == sequences:
        chunk_sizes(scheduler)
    assert scheduler.prefilling == sequences[:1] and list(scheduler.waiting) == sequences[1:]
    assert decoding in scheduler.running


def max_wait_steps(head_tokens: int, other_tokens: list[int], min_budget: int) -> int:
    """Steps until the first chunk of a prompt behind others, if each has `min_budget` or more tokens for prompts.

    Rows and blocks are free, and at least two prompts fit in a step. While the head is long, each step completes one of
    the prompts in between or computes half of `min_budget` of their tokens. So does a step after the head has ended,
    because one of them is then the head. In any other step the head is not long: a step has at least 1 in
    LONG_PROMPT_STEPS of the tokens that it still needs. Such steps divide its tokens by 4/3 until one step ends it.
    """
    steps = sum(-(-tokens // (min_budget // 2)) for tokens in other_tokens)
    ratio = LONG_PROMPT_STEPS / (LONG_PROMPT_STEPS - 1)
    head_steps = 1 + math.ceil(math.log(max(1.0, head_tokens / min_budget), ratio)) if head_tokens else 0
    return steps + head_steps + 1


class TimedEngine(FakeEngine):
    """Checks, if `min_budget` is set, that no prompt waits longer than `max_wait_steps` for its first chunk."""

    min_budget = 0

    def __init__(self, scheduler: Scheduler, **values: Any) -> None:
        super().__init__(scheduler, **values)
        self.number = 0
        self.latest_start: dict[Sequence, int] = {}  # the last step in which a waiting prompt may start
        self.longest_wait = 0

    def submit(self, sequence: Sequence) -> None:
        ahead = [*self.scheduler.prefilling, *self.scheduler.waiting]
        tokens = [len(other.token_ids) - other.num_computed_tokens for other in ahead]
        if self.min_budget:
            head = tokens[0] if tokens else 0
            self.latest_start[sequence] = self.number + max_wait_steps(head, tokens[1:], self.min_budget)
        super().submit(sequence)

    def step(self) -> bool:
        self.number += 1
        launched = super().step()
        for sequence, latest in list(self.latest_start.items()):
            if sequence not in self.scheduler.waiting:
                del self.latest_start[sequence]
            assert self.number <= latest
        return launched


def random_costs(source: random.Random, largest: int, max_rows: int) -> StepCosts:
    measured = sorted({largest, *(source.randint(1, largest) for _ in range(source.randint(0, 4)))})
    sizes = {*measured, *range(source.randint(1, 8), largest, source.randint(1, 16))}
    rows = sorted({max_rows, *(source.randint(1, max_rows) for _ in range(3))})
    times = [source.uniform(1.0, 20.0) for _ in [*measured, *rows]]
    if source.random() < 0.7:  # larger steps take longer
        times = sorted(times[: len(measured)]) + sorted(times[len(measured) :])
    prefill_ms = tuple(zip(measured, times, strict=False))
    decode_ms = tuple(zip(rows, times[len(measured) :], strict=True))
    return StepCosts(prefill_ms, decode_ms, tuple(sorted(sizes)), source.randint(2, 12))


def random_arrivals(source: random.Random, has_aborts: bool) -> list[Arrival]:
    arrivals = []
    for _ in range(source.randint(2, 9)):
        length = source.randint(60, 160) if source.random() < 0.3 else source.randint(1, 20)
        shared = source.randint(0, 1)
        prompt = [shared] * min(length, 8) + [source.randint(0, 3) for _ in range(length - 8)]
        step = source.randint(0, 25)
        aborted_at = step + source.randint(0, 20) if has_aborts and source.random() < 0.2 else None
        arrivals.append(Arrival(step, prompt, SamplingParams(max_new_tokens=source.randint(1, 20)), aborted_at))
    return arrivals


def run_trace(seed: int) -> bool:
    """One random trace; returns whether rows and blocks were scarce. Every other trace checks the waiting times."""
    source = random.Random(seed)
    is_scarce = source.random() < 0.5
    arrivals = random_arrivals(source, has_aborts=is_scarce)
    max_rows = source.randint(1, 5) if is_scarce else len(arrivals)
    tokens = source.randint(1, 40) if is_scarce else source.randint(2 * max_rows + 2, 2 * max_rows + 40)
    longest = max(len(arrival.prompt) + arrival.params.max_new_tokens for arrival in arrivals)
    block_size = source.randint(1, 8)
    blocks = -(-longest // block_size) + source.randint(0, 12) if is_scarce else 2000
    config = SchedulerConfig(
        max_rows, tokens, source.randint(1 if is_scarce else 2, 6), source.randint(1, 4), mixed_steps=True,
        itl_target_ms=source.choice([0.1, source.uniform(2.0, 30.0), 1e6]),
    )  # fmt: skip
    costs = random_costs(source, tokens, max_rows)
    engine = TimedEngine(
        Scheduler(config, BlockAllocator(1 + blocks, block_size), StepPredictor(costs)), noise=random.Random(seed)
    )
    if not is_scarce:
        engine.min_budget = min(costs.min_chunk_tokens, tokens - max_rows)
    check_end(engine, run(engine, arrivals, lag=source.randint(0, 2)), arrivals)
    return is_scarce


def campaign(traces: int, first_seed: int = 0) -> int:
    """Run random traces; returns in how many of them rows or blocks were scarce. A failure names its seed."""
    scarce = 0
    for seed in range(first_seed, first_seed + traces):
        try:
            scarce += run_trace(seed)
        except BaseException as error:
            error.add_note(f"trace {seed}")
            raise
    return scarce


def test_random_traces_meet_the_target_in_order_and_start_in_bounded_time() -> None:
    assert 50 < campaign(300) < 250


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(1_000_000))
def test_traces_of_new_seeds_in_each_run(seed: int) -> None:
    run_trace(seed)


def test_a_long_prompt_delays_a_short_one_by_few_steps() -> None:
    """8,000 tokens in chunks of 15; without sharing, the short prompt would wait for 500 steps."""
    scheduler = make_scheduler(blocks=4000, config=make_mixed(1.0).config)
    scheduler.predictor = StepPredictor(COSTS)
    running(scheduler, 5)
    scheduler.submit(request(8000, first=1))
    chunk_sizes(scheduler)
    scheduler.submit(request(14, first=2))
    assert chunk_sizes(scheduler) == {1: 8, 2: 7}
    assert max_wait_steps(8000, [], 15) < 25


if __name__ == "__main__":
    started, number = time.perf_counter(), int(sys.argv[1])
    print(f"{number} traces, {campaign(number)} with scarce rows or blocks: {time.perf_counter() - started:.0f} s")
