"""Traces: their format, sessions, and errors with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bench.loads import ClientSession
from tcdeploy.bench.trace import read_trace
from tcdeploy.errors import UsageError

LINE = {"timestamp": 0, "input_length": 3, "output_length": 2}


def read(tmp_path: Path, *records: Any) -> list[ClientSession]:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return read_trace(str(path), seed=0)


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


def test_lines_with_hash_ids_have_milliseconds_and_share_blocks(tmp_path: Path) -> None:
    first, second = read(
        tmp_path,
        {"timestamp": 0, "input_length": 1000, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 2500, "input_length": 1500, "output_length": 2, "hash_ids": [1, 3, 4]},
    )
    assert (second[0].earliest, len(first[0].prompt), len(second[0].prompt)) == (2.5, 1000, 1500)
    assert first[0].prompt[:512] == second[0].prompt[:512]
    assert first[0].prompt[512:520] != second[0].prompt[512:520]


@pytest.mark.parametrize(
    ("record", "fact"),
    [
        ("{", "Expecting property name"),
        ("[1]", "not a JSON object"),
        ({**LINE, "priority": 1}, "unknown key 'priority'"),
        ({**LINE, "timestamp": "0"}, "timestamp is '0', expected a number"),
        ({"input_length": 1, "output_length": 1}, "timestamp is None"),
        ({**LINE, "timestamp": float("nan")}, "timestamp is nan"),
        ({**LINE, "output_length": 0}, "output_length is 0, expected an integer above 0"),
        ({**LINE, "input_length": 2.5}, "input_length is 2.5"),
        ({"timestamp": 0, "output_length": 1}, "input_length is None"),
        ({**LINE, "prompt": [1, 2]}, "input_length is 3, and prompt has 2 tokens"),
        ({**LINE, "prompt": ["a"]}, "prompt must be text"),
        ({**LINE, "prompt": ""}, "prompt must be text"),
        ({**LINE, "kind": 3}, "kind must be a string"),
        ({**LINE, "input_length": 513, "hash_ids": [1]}, "an id per 512 tokens"),
        ({**LINE, "hash_ids": [1], "session": "a"}, "excludes prompt and session"),
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
        read_trace(str(tmp_path / "none.jsonl"), seed=0)
