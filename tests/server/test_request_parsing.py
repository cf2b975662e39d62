"""Large bodies are validated as small ones are, with the same errors, and without blocking other tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.server.apis.openai.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tcdeploy.server.http import request_parsing
from tcdeploy.server.http.json_steps import Integers, JsonLimits, JsonSteps
from tcdeploy.server.http.request_parsing import SMALL_BODY_BYTES, LargeBodyParser, parse

LIMITS = JsonLimits(1 << 20, 1 << 17)
PADDING = "x" * SMALL_BODY_BYTES
USER = {"role": "user", "content": "a"}


def parse_large(request_type: Any, fields: Any) -> Any:
    return asyncio.run(LargeBodyParser().parse(request_type, json.dumps(fields).encode(), LIMITS))


def parse_and_count(request_type: Any, body: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Any]]:
    """Parse `body` beside another task. Counts calls, because seconds depend on what else the machine does.

    Returns the largest number of parser steps and validations between two steps of the other task, and the slices of
    messages that were validated.
    """
    calls, slices = [0], []  # calls between two steps of the other task
    step, list_adapter = JsonSteps.step, request_parsing._list_adapter

    def counting_step(steps: JsonSteps) -> bool:
        calls[-1] += 1
        return step(steps)

    def counting_adapter(request_type: Any, name: str) -> Any:
        def counting_validate(messages: list[Any], context: Any) -> Any:
            calls[-1] += 1
            slices.append(messages)
            return list_adapter(request_type, name).validate_python(messages, context=context)

        return SimpleNamespace(validate_python=counting_validate)

    monkeypatch.setattr(JsonSteps, "step", counting_step)
    monkeypatch.setattr(request_parsing, "_list_adapter", counting_adapter)

    async def other_task() -> None:
        while True:
            calls.append(0)
            await asyncio.sleep(0)

    async def run() -> None:
        other = asyncio.create_task(other_task())
        try:
            with contextlib.suppress(ApiError):
                await LargeBodyParser().parse(request_type, body, LIMITS)
        finally:
            other.cancel()

    asyncio.run(run())
    return max(calls), slices


def error_of(parser: Any, request_type: Any, fields: Any) -> Any:
    with pytest.raises(ApiError) as error:
        parser(request_type, fields)
    return error.value.body


def test_a_large_request_equals_a_small_one() -> None:
    parts = [{"type": "text", "text": f"part {number}"} for number in range(900)]
    messages = [USER, {"role": "user", "content": parts}, *[{**USER, "name": "n"}] * 700]
    for request_type, fields in (
        (ChatRequest, {"messages": messages, "temperature": 0.5, "unknown": [1, 2]}),
        (CompletionRequest, {"prompt": list(range(50_000)), "stop_token_ids": [1, 2]}),
        (CompletionRequest, {"prompt": [[1, 2, 3], [4, 5]], "user": PADDING}),
        (CompletionRequest, {"prompt": ["a", PADDING]}), (DetokenizeRequest, {"tokens": list(range(9000))}),
    ):  # fmt: skip
        assert parse_large(request_type, fields) == parse(request_type, json.dumps(fields).encode())
    assert type(parse_large(CompletionRequest, {"prompt": list(range(9000))}).prompt) is Integers


@pytest.mark.parametrize("request_type", [ChatRequest, TokenizeRequest])
@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "images are not supported"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "audio inputs are not supported"),
        ({"type": "video_url", "video_url": {"url": "http://x/v"}}, "videos are not supported"),
        ({"type": "file", "file": {"file_id": "f"}}, "files are not supported"),
        ({"type": "poem"}, "content parts of this type are not supported"),
    ],
)  # fmt: skip
def test_a_part_that_is_not_text_is_refused_with_its_kind(
    request_type: Any, padding: str, part: Any, reason: str
) -> None:
    messages = [USER, {"role": "user", "content": [{"type": "text", "text": f"a{padding}"}, part]}]
    parser = parse_large if padding else lambda kind, fields: parse(kind, json.dumps(fields).encode())
    error = error_of(parser, request_type, {"messages": messages})["error"]
    assert error["param"] == "messages[1].content[1]" and error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"messages.1.content: {reason} by this server")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER] * 700 + [{"role": 1}]}, {"messages": [USER] * 10 + [1]}, {"messages": [USER] * 4097},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1025}]}, {"messages": "a"}, {},
        {"messages": [USER], "logit_bias": {"5": "x"}}, {"messages": [USER], "n": 1.5}, [], "a",
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)  # fmt: skip
def test_an_error_in_a_large_request_is_that_of_a_small_one(fields: Any) -> None:
    def parse_small(request_type: Any, fields: Any) -> Any:
        return parse(request_type, json.dumps(fields).encode())

    assert error_of(parse_large, ChatRequest, fields) == error_of(parse_small, ChatRequest, fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature is -1; it must be 0 or more"),
        ({"temperature": "a" * 1000}, f'temperature is "{"a" * 79}; it must be a valid number'),
        ({"temperature": float("inf")}, "temperature is Infinity; it must be a finite number"),
        ({"temperature": 10**400}, f"temperature is 1{'0' * 79}; it must be a valid number"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be 1 or less"), ({"n": True}, "n is true; it must be a valid integer"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2; it must be 1 or more, or -1"),
        ({"stop": ["a", ""]}, "stop contains an empty string"), ({"stop": ""}, "stop contains an empty string"),
        ({"stop": ["a", {}]}, "stop.1 is an object; it must be a valid string"),
        ({"stop": ["a"] * 17}, "stop: List should have at most 16 items after validation, not 17"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5 is 101; it must be 100 or less"),
        ({"prompt": 5}, "prompt is 5; it must be a valid string, or a valid list"),
        ({"prompt": [1, "a"]}, 'prompt.1 is "a"; it must be a valid integer'),
        ({"prompt": [[1], []]}, "prompt.1: List should have at least 1 item after validation, not 0"),
        ({"stream_options": []}, "stream_options is a list; it must be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}},
         "response_format.json_schema.schema: Field required"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_an_error_names_the_place_the_value_and_the_limit(fields: dict[str, Any], message: str) -> None:
    """pydantic's names for the types of a union are not part of the place."""
    with pytest.raises(ApiError) as rejection:
        parse(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode())
    assert (rejection.value.message, rejection.value.param) == (message, next(iter(fields)))


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b'{"prompt": "a"' + b"".join(b',"k%d":1' % n for n in range(600_000)) + b"}", "k", "more than 24000 keys"),
        (b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}", "prompt", "more than 24000 keys and values"),
        (
            b'{"messages": [{"role": "user", "content": [' + b'{"type":"text","text":"a"},' * 200_000 + b"{}]}]}",
            "messages", "more than 24000 keys and values",
        ),
        (b'{"prompt": "a", "logit_bias": {' + b",".join(b'"k%d":"x"' % n for n in range(8_000)) + b"}}",
            "logit_bias", "there are 8000 logit biases; the limit is 512"),
        (b'{"prompt": "a"' + b"".join(b',"k%d":1' % n for n in range(2_000)) + b"}", None, "the body has 2001 fields"),
        (b'{"prompt": [' + b"1," * 1_500_000 + b"1]}", "prompt", "a list has more than 131072 integers"),
        (b'{"prompt": "' + b"\\u0041" * 1_300_000 + b'"}', "prompt", "a text has more than 1048576 characters"),
        (b'{"prompt": ' + b"[" * 100_000, "prompt", "more than 128 nested lists and objects"),
    ],
    ids=["keys", "lists", "parts", "biases", "fields", "ids", "escapes", "depth"],
)  # fmt: skip
def test_a_hostile_body_is_refused_and_other_tasks_run_between_its_steps(
    body: bytes, param: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_type = ChatRequest if param == "messages" else CompletionRequest
    with pytest.raises(ApiError, match=message) as error:
        asyncio.run(LargeBodyParser().parse(request_type, body, LIMITS))
    assert error.value.status == 400 and (error.value.param or "").startswith(param or "")
    most_calls, _ = parse_and_count(request_type, body, monkeypatch)
    assert most_calls == 1 and gc.isenabled()


@pytest.mark.parametrize(
    ("request_type", "fields", "param"),
    [
        (ChatRequest, {"messages": [USER, {"role": "user", "content": "a" * 70_000}]}, "messages"),
        (ChatRequest, {"messages": [{**USER, "content": [{"type": "text", "text": "a" * 70_000}]}]}, "messages"),
        (CompletionRequest, {"prompt": ["a", "a" * 70_000]}, "prompt"),
        (CompletionRequest, {"prompt": [[1], [1] * 70_000]}, "prompt"),
    ],
    ids=["message", "part", "text", "ids"],
)  # fmt: skip
def test_a_prompt_that_is_too_long_to_parse_is_beyond_the_context(request_type: Any, fields: Any, param: str) -> None:
    def parse_with_context(request_type: Any, fields: Any) -> Any:
        limits = JsonLimits(1 << 16, 4096, context=1024)
        return asyncio.run(LargeBodyParser().parse(request_type, json.dumps(fields).encode(), limits))

    error = error_of(parse_with_context, request_type, fields)["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert error["message"].startswith(
        "This model's maximum context length is 1024 tokens. "
        f"However, your {param} resulted in 4097 tokens or more. Please reduce the length of the {param}."
    )
    text = "prompt" if request_type is CompletionRequest else "messages"
    error = error_of(parse_with_context, TokenizeRequest, {text: fields[text]})["error"]
    assert error["code"] is None and "more than" in error["message"], "/tokenize is not limited by the context"
    error = error_of(parse_with_context, request_type, {"user": "a" * 70_000, **fields})["error"]
    assert (error["param"], error["code"]) == ("user", None)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 70_000}},
        {"image_url": {"detail": "low", "url": "A" * 70_000}, "type": "image_url"},
        {"type": "input_audio", "input_audio": {"format": "wav", "data": "A" * 70_000}},
        {"type": "file", "file": {"file_data": "A" * 70_000}},
    ],
    ids=lambda part: str(part)[:20],
)
def test_a_large_image_is_refused_as_an_image(part: Any) -> None:
    """Its data is longer than any text may be."""
    messages = [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]

    def parse_with_limits(limits: JsonLimits) -> Any:
        def parser(request_type: Any, fields: Any) -> Any:
            return asyncio.run(LargeBodyParser().parse(request_type, json.dumps(fields).encode(), limits))

        return error_of(parser, ChatRequest, {"messages": messages})

    error = parse_with_limits(JsonLimits(1 << 16, 4096, context=1024))
    assert error == parse_with_limits(LIMITS), "as for a small image"
    assert error["error"]["param"] == "messages[1].content[1]"


def test_other_tasks_run_between_slices_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "part"}] * 200}
    body = json.dumps({"messages": [USER] * 1000 + [parts] * 3}).encode()
    most_calls, slices = parse_and_count(ChatRequest, body, monkeypatch)
    assert most_calls == 2, "no other task runs between the last step of the parser and the first slice"
    assert [len(messages) for messages in slices] == [256, 256, 256, 232, 1, 1, 1]


def test_bodies_are_parsed_one_at_a_time() -> None:
    """Twenty large bodies do not make each turn of the event loop twenty times as long."""
    turns = 0

    async def run() -> None:
        nonlocal turns
        parser, body = LargeBodyParser(), json.dumps({"prompt": ["a"] * 1000, "user": PADDING}).encode()
        parsing = asyncio.gather(*(parser.parse(CompletionRequest, body, LIMITS) for _ in range(20)))
        while not parsing.done():
            await asyncio.sleep(0)
            turns += 1

    asyncio.run(run())
    assert turns > 20 * 4
