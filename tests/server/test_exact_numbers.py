"""Integers beyond 2^53 in bodies and in the arguments of calls arrive unchanged, whatever the format of the call."""

from __future__ import annotations

import asyncio
import json

import pytest

from tcdeploy.server.apis.anthropic.answer import _input
from tcdeploy.server.apis.openai.protocol import ChatRequest
from tcdeploy.server.http.json_steps import JsonLimits
from tcdeploy.server.http.request_parsing import LargeBodyParser, parse
from tcdeploy.server.output.parser import OutputCall, split_by_kind
from tcdeploy.server.output.tag_parser import TagParser
from tcdeploy.server.output.xml_calls import convert
from tcdeploy.text.tool_formats import TOOL_FORMATS

BIG = 12345678901234567890123
PARAMETERS = {"type": "object", "properties": {"id": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "note", "parameters": PARAMETERS}}
CALLS = {
    "hermes": f'<tool_call>{{"name": "note", "arguments": {{"id": {BIG}}}}}</tool_call>',
    "llama3_json": f'{{"name": "note", "parameters": {{"id": {BIG}}}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "note", "arguments": {{"id": {BIG}}}}}]',
    "qwen3_coder": f"<tool_call><function=note><parameter=id>{BIG}</parameter></function></tool_call>",
    "pythonic": f"[note(id={BIG})]",
}


@pytest.mark.parametrize("name", CALLS)
def test_an_integer_in_the_arguments_of_a_call_is_unchanged(name: str) -> None:
    parser = TagParser(TOOL_FORMATS[name], None, [TOOL], starts_in_reasoning=False, max_calls=None)
    [call] = split_by_kind([*parser.push(CALLS[name]), *parser.finish()]).calls
    assert json.loads(call.arguments) == {"id": BIG}
    assert _input(OutputCall(0, "i", "note", call.arguments)) == {"id": BIG}, "in Anthropic's API"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1234567890123456789.0", 1234567890123456789), ("1e23", 10**23), ("-9007199254740993.00", -9007199254740993)],
)
def test_an_integer_that_is_written_with_a_fraction_is_unchanged(text: str, value: int) -> None:
    assert convert(text, {"type": "integer"}) == value


def test_an_integer_in_a_schema_is_parsed_exactly_in_small_and_large_bodies() -> None:
    schema = {"enum": [BIG, -(2**63), 2**64]}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_object", "schema": schema},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
    }
    small = parse(ChatRequest, json.dumps(body).encode())
    large_body = json.dumps({**body, "user": "a" * 20_000}).encode()
    large = asyncio.run(LargeBodyParser().parse(ChatRequest, large_body, JsonLimits(string_chars=30_000, integers=100)))
    for request in (small, large):
        assert request.output_constraint is not None and request.output_constraint.value == schema
        assert request.usable_tools[0]["function"]["parameters"] == schema
