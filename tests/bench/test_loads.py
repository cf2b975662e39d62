"""What a load consists of, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from tcdeploy.bench.loads import ClientSession, make_load
from tcdeploy.bench.serve_settings import ServeSettings


def load(**settings: Any) -> list[ClientSession]:
    return make_load(ServeSettings(**{"url": "http://127.0.0.1:1", "input_length": 20, "output_length": 5, **settings}))


def prompts(sessions: list[ClientSession]) -> list[Any]:
    return [request.prompt for session in sessions for request in session]


def test_a_load_is_reproducible_from_its_seed_and_no_two_prompts_are_equal() -> None:
    assert load(requests=4) == load(requests=4) != load(requests=4, seed=1)
    assert len({tuple(prompt) for prompt in prompts(load(requests=50))}) == 50


def test_rates_of_a_sweep_differ_in_their_prompts_but_not_in_lengths_and_relative_arrivals() -> None:
    slow, fast = (load(requests=30, request_rate=rate, length_spread=0.5) for rate in (2.0, 8.0))
    assert [len(prompt) for prompt in prompts(slow)] == [len(prompt) for prompt in prompts(fast)]
    assert all(one != other for one, other in zip(prompts(slow), prompts(fast), strict=True))
    assert [session[0].earliest for session in slow] == pytest.approx([4 * session[0].earliest for session in fast])


def test_a_duration_sets_the_number_of_requests_at_each_rate() -> None:
    assert len(load(request_rate=3.0, duration=10)) == 30
    assert len(load(request_rate=0.01, duration=1)) == 1


def test_prompts_of_a_group_share_their_prefix_and_nothing_else() -> None:
    sessions = prompts(load(requests=6, shared_prefix=50, prefix_groups=3))
    assert {len(prompt) for prompt in sessions} == {70}
    assert [sessions[number][:50] == sessions[0][:50] for number in range(6)] == [True, False, False] * 2
    assert len({tuple(prompt[50:]) for prompt in sessions}) == 6


def test_each_turn_begins_with_the_previous_prompt_and_the_length_of_its_answer() -> None:
    [session, _] = load(requests=2, turns=3, shared_prefix=8)
    assert [len(request.prompt) for request in session] == [28, 28 + 25, 28 + 50]
    assert all(session[2].prompt[: len(request.prompt)] == request.prompt for request in session)
