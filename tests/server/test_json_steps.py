"""The stepwise JSON parser: equal to pydantic_core's on every document, short steps, and limits."""

from __future__ import annotations

import gc
import json
import random
import weakref
from typing import Any

import pytest
from pydantic_core import from_json

from tcdeploy.server.http import json_steps
from tcdeploy.server.http.json_steps import (
    MAX_DEPTH,
    MAX_VALUES,
    STEP_WORK,
    STRING_PIECE_BYTES,
    Integers,
    JsonLimitError,
    JsonLimits,
    JsonSteps,
)

NO_LIMITS = JsonLimits(1 << 30, 1 << 30)
STRINGS = ["", "a", "caf\u00e9", "\u6f22\u5b57" * 5, "\U0001f469" * 3, 'quote" and \\ back', "\n\t\x00\x1f", "x" * 3000]
# A unit of work is at most 256 bytes. The last call of a step may exceed the budget by up to three string pieces.
STEP_LIMIT_BYTES = STEP_WORK * 256 + 3 * STRING_PIECE_BYTES


def parse(body: bytes, limits: JsonLimits = NO_LIMITS) -> Any:
    steps = JsonSteps(body, limits)
    while not steps.step():
        pass
    return steps.value


def outcome(parser: Any, body: bytes) -> Any:
    try:
        return repr(parser(body))  # NaN is not equal to itself; True equals 1
    except ValueError:
        return "not JSON"


def random_document(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(9 if depth < 5 else 7)
    if kind == 7:
        return [random_document(source, depth + 1) for _ in range(source.randrange(6))]
    if kind == 8:
        return {source.choice(STRINGS): random_document(source, depth + 1) for _ in range(source.randrange(6))}
    number = source.choice([source.randrange(-9, 99), source.randrange(-(2**80), 2**80), source.uniform(-1e9, 1e9)])
    numbers = [source.randrange(-5, 50_000) for _ in range(source.randrange(40))]
    mixed = [*numbers[:5], source.choice(["a", True, None, 1.5])]
    return [number, source.choice(STRINGS), True, None, numbers, mixed, [numbers, []]][kind]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every string longer than a few bytes is parsed in several pieces."""
    monkeypatch.setattr(json_steps, "STRING_PIECE_BYTES", 13)


@pytest.mark.usefixtures("small_pieces")
def test_random_documents_and_their_mutations_are_parsed_as_by_pydantic() -> None:
    source = random.Random(19)
    valid = 0
    for number in range(2000):
        text = json.dumps(
            random_document(source), ensure_ascii=source.random() < 0.5, indent=source.choice([None, None, 1])
        )
        body = bytearray(text.encode())
        for _ in range(source.choice([0, 1, 3])):
            at = source.randrange(len(body) + 1)
            edit = source.choice([b",", b"]", b"}", b'"', b"\\", b":", b"1", b"-", b"\xff", b"\\ud800", b" ", b"NaN"])
            body[at : at + source.randrange(3)] = edit
        expected = outcome(from_json, bytes(body))
        assert outcome(parse, bytes(body)) == expected, (number, bytes(body))
        valid += expected != "not JSON"
    assert 700 < valid < 1700


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "body",
    [
        b'"' + b"\\ud83d\\ude00" * 40 + b'"', b'"' + b"\\u0041" * 40 + b'"', b'"' + b"\\ud800" * 9 + b'"', b'"\\ud800',
        b'"' + "\u6f22".encode() * 40 + b'"', b'"' + b"\\\\" * 41 + b'"', b'"' + b"\\" * 41 + b'"', b'"' + b"\x80" * 40,
        b'"abc', b'"abc\\', b'"a\nb"', b"", b" ", b"nul", b"truefalse", b"01", b"[01,2]", b"[1,]", b"[,1]", b"{,}",
        b'{"a"}', b'{"a":}', b'{"a":1,}', b'{"a":1,"a":2}', b"[1 2]", b"[1]]", b"]", b"}", b"[}", b"{]", b'{1:2}',
        b"[1, 2 , 3\n,4]", b"[1,2,true]", b"[true,1,2]", b"[1,2,[3,4],5]", b"1e999", b"-", b"--1", b"Infinity",
        b"9" * 4300, b"9" * 4301, b"\xef\xbb\xbf{}", b"'a'", b"[1e5,2]", b"/**/1",
    ],
    ids=lambda body: repr(body[:16]),
)  # fmt: skip
def test_special_documents_are_parsed_as_by_pydantic(body: bytes) -> None:
    assert outcome(parse, body) == outcome(from_json, body)


def test_a_list_of_integers_is_marked() -> None:
    document = parse(b'{"a": [1, 2, 3], "b": [[1, 2], [3, 4]], "c": [1, 2, "x"], "d": [1, 2, true], "e": []}')
    assert type(document["a"]) is Integers and [type(row) for row in document["b"]] == [Integers, Integers]
    assert [type(document[name]) for name in "cde"] == [list, list, list]
    assert document["c"] == [1, 2, "x"] and type(parse(b"[5, 6]")) is Integers


@pytest.mark.parametrize(
    ("body", "message", "field"),
    [
        (b'{"n": 1, "prompt": [' + b"1," * 100 + b"1]}", "prompt: a list has more than 99 integers", "prompt"),
        (b'{"prompt": "' + b"\\u0041" * 3000 + b'"}', "prompt: a text has more than 2000 characters", "prompt"),
        (b'{"prompt": ' + b"[" * 200, f"more than {MAX_DEPTH} nested lists and objects", "prompt"),
        (b"[" + b"[]," * MAX_VALUES + b"[]]", f"more than {MAX_VALUES} keys and values", None),
        (b"{" + b'"k":1,' * MAX_VALUES + b'"k":1}', f"more than {MAX_VALUES} keys and values", "k"),
    ],
)
def test_a_body_over_a_limit_is_refused_before_it_is_read_to_its_end(body: bytes, message: str, field: str) -> None:
    with pytest.raises(JsonLimitError, match=message) as error:
        parse(body + b"this is not JSON", JsonLimits(2000, 99))
    assert error.value.field == field


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "' + b"a" * (8 << 20) + b'"}', b'{"prompt": "' + "\u6f22".encode() * (2 << 20) + b'"}',
        b'{"prompt": "' + b"\\u0041" * 1_300_000 + b'"}', b'{"prompt": [' + b"100000," * 1_100_000 + b"1]}",
        b'{"prompt": [' + b"9" * 4299 + (b"," + b"9" * 4299) * 1900 + b"]}", b" " * (8 << 20),
        b'{"prompt": [' + b"[1,2,3,4]," * 7_000 + b"[1,2]]}", b'{"a": ' + b" " * (8 << 20) + b"}",
    ],
    ids=["text", "unicode", "escapes", "token ids", "large integers", "spaces", "lists", "spaces inside"],
)  # fmt: skip
def test_a_step_reads_a_bounded_part_of_the_body(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts bytes and calls, not seconds: a large allocation alone can take 40 ms on a busy machine."""
    parsed: list[int] = []  # the bytes of each call to from_json in this step

    def counting_from_json(part: bytes | bytearray) -> Any:
        parsed.append(len(part))
        return from_json(part)

    monkeypatch.setattr(json_steps, "from_json", counting_from_json)
    steps, is_complete, num_steps, position = JsonSteps(body, NO_LIMITS), False, 0, 0
    while not is_complete:
        parsed.clear()
        try:
            is_complete = steps.step()
        except ValueError:
            assert body.strip() == b"" or body.endswith(b" }"), "the others are JSON"
            break
        assert sum(parsed) < STEP_LIMIT_BYTES and len(parsed) <= STEP_WORK
        assert steps._reader.position - position < STEP_LIMIT_BYTES
        num_steps, position = num_steps + 1, steps._reader.position
    assert num_steps > 20


def test_a_parser_is_freed_without_garbage_collection() -> None:
    """A cycle would keep 24,000 containers until a collection, which then blocks the event loop."""
    steps = JsonSteps(b"[" + b"{}," * 100, NO_LIMITS)
    with pytest.raises(ValueError, match="unexpected end"):
        while True:
            steps.step()
    reference = weakref.ref(steps)
    gc.disable()
    try:
        del steps
        assert reference() is None
    finally:
        gc.enable()
