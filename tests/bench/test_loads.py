"""What a load consists of, before anything is sent; the format of traces, and errors with file and line."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bench.loads import ClientSession, make_load
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.errors import UsageError


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


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    sessions = prompts(load(requests=6, shared_prefix=50))
    assert {len(prompt) for prompt in sessions} == {70}
    assert len({tuple(prompt[:50]) for prompt in sessions}) == 1
    assert len({tuple(prompt[50:]) for prompt in sessions}) == 6


def test_without_spread_all_lengths_are_nominal() -> None:
    [[request]] = load(requests=1)
    assert (len(request.prompt), request.output_length) == (20, 5)


def test_lengths_are_uniform_within_the_spread_and_independent() -> None:
    requests = [request for [request] in load(requests=5000, input_length=64, output_length=32, length_spread=0.5)]
    inputs, outputs = [len(request.prompt) for request in requests], [request.output_length for request in requests]
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (32, 96, 16, 48)
    assert statistics.fmean(inputs) == pytest.approx(64, rel=0.01)
    assert statistics.pstdev(inputs) == pytest.approx(64 / math.sqrt(12), rel=0.03)
    assert abs(statistics.correlation(inputs, outputs)) < 0.05


def test_a_length_is_at_least_one_token() -> None:
    sessions = load(requests=50, input_length=1, output_length=1, length_spread=0.9)
    assert {(len(request.prompt), request.output_length) for [request] in sessions} == {(1, 1)}


LINE = {"timestamp": 0, "input_length": 3, "output_length": 2}


def read(tmp_path: Path, *records: Any) -> list[ClientSession]:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return make_load(ServeSettings(trace=str(path)))


def test_times_count_from_the_earliest_request_and_lines_may_be_in_any_order(tmp_path: Path) -> None:
    sessions = read(tmp_path, {**LINE, "timestamp": 1007.5}, "", {**LINE, "timestamp": 1000, "kind": "chat"})
    assert [(session[0].earliest, session[0].kind) for session in sessions] == [(0.0, "chat"), (7.5, "")]
    assert sessions[0][0].prompt != sessions[1][0].prompt and len(sessions[0][0].prompt) == 3


def test_random_prompts_of_a_session_continue_each_other(tmp_path: Path) -> None:
    turns = [{**LINE, "timestamp": time, "input_length": 10 * time, "session": "a"} for time in (3, 1, 2)]
    [session] = read(tmp_path, *turns)
    assert [(request.earliest, len(request.prompt)) for request in session] == [(0.0, 10), (1.0, 20), (2.0, 30)]
    assert all(session[2].prompt[: len(request.prompt)] == request.prompt for request in session)


def test_a_prompt_is_text_or_token_ids(tmp_path: Path) -> None:
    text, ids = read(
        tmp_path,
        {"timestamp": 0, "output_length": 2, "prompt": "hello"},
        {"timestamp": 1, "output_length": 2, "input_length": 3, "prompt": [0, 7, 8]},
    )
    assert (text[0].prompt, ids[0].prompt) == ("hello", [0, 7, 8])


@pytest.mark.parametrize(
    ("record", "fact"),
    [
        ("{", "Invalid JSON"),
        ("[1]", "Input should be an object"),
        ({**LINE, "priority": 1}, "priority: Extra inputs are not permitted"),
        ({**LINE, "timestamp": "0"}, "timestamp: Input should be a valid number"),
        ({"input_length": 1, "output_length": 1}, "timestamp: Field required"),
        ({**LINE, "timestamp": float("nan")}, "timestamp: Input should be a finite number"),
        ({**LINE, "timestamp": True}, "timestamp: Input should be a valid number"),
        ({**LINE, "output_length": 0}, "output_length: Input should be greater than 0"),
        ({**LINE, "output_length": True}, "output_length: Input should be a valid integer"),
        ({**LINE, "input_length": 2.5}, "input_length: Input should be a valid integer"),
        ({"timestamp": 0, "output_length": 1}, "input_length: Field required"),
        ({**LINE, "prompt": ["a"]}, "prompt: Input should be"),
        ({**LINE, "prompt": [-1]}, "prompt: Input should be"),
        ({**LINE, "prompt": ""}, "prompt: "),
        ({**LINE, "prompt": []}, "prompt: "),
        ({**LINE, "kind": 3}, "kind: Input should be a valid string"),
        ({**LINE, "session": 1.5}, "session: Input should be a valid string"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, record: Any, fact: str) -> None:
    with pytest.raises(UsageError, match=r"trace.jsonl, line 2: ") as raised:
        read(tmp_path, LINE, record)
    assert fact in raised.value.message and raised.value.hint


def test_a_trace_that_is_empty_or_unreadable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no requests"):
        read(tmp_path, "", " ")
    with pytest.raises(UsageError, match="cannot be read"):
        make_load(ServeSettings(trace=str(tmp_path / "none.jsonl")))
