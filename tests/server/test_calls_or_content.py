"""Tools together with a format: an output is tool calls, or content that follows the format."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.output.calls_or_content import CallsOrContent, plain_calls
from tcdeploy.server.output.structured.schema_numbers import UnsupportedSchemaError
from tcdeploy.server.output.structured.structured_output import StructuredOutputBackend
from tcdeploy.server.output.tools import ToolSupport
from tcdeploy.text.tool_formats import TOOL_FORMATS
from tests.server import test_tag_parser as formats
from tests.server.conftest import ServerProcess
from tests.server.test_tag_parser import characters, harmony, read
from tests.server.test_tools import CLOCK, RESPONSE_TEMPLATE, WEATHER, chat, chat_request, load, make_model

QUOTED = 'Say <tool_call>{"name": "clock"}</tool_call>, [TOOL_CALLS] [clock(utc=True)] <function=clock></function>'
ANSWER = {
    "type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
CONTENT = json.dumps({"answer": QUOTED})
STRICT_CLOCK = {"type": "function", "function": {**CLOCK["function"], "strict": True}}
CLOSED_CLOCK = {  # without other arguments: a random number beyond float64 would make a call malformed
    "type": "function",
    "function": {
        "name": "clock", "strict": True,
        "parameters": {
            "type": "object", "properties": {"utc": {"type": "boolean"}}, "required": ["utc"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
CALLS = {  # of a tool that is strict
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {"utc": true}}\n</tool_call>',
    "llama3_json": '{"name": "clock", "parameters": {"utc": true}}',
    "mistral": '[TOOL_CALLS] [{"name": "clock", "arguments": {"utc": true}}]',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{"utc": true}<｜tool▁call▁end｜>',
    "qwen3_coder": "<tool_call>\n<function=clock>\n<parameter=utc>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "pythonic": "[clock(utc=True)]",
    "openai": '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"utc": true}',
}
EOS = 2


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("is_special", "thinks"), [(False, False), (True, True)], ids=["text", "tokens, reasoning"])
def test_the_grammar_of_each_format_allows_calls_and_content(
    tmp_path: Path, name: str, is_special: bool, thinks: bool
) -> None:
    tokenizer = load(formats.make_model(tmp_path / "model"))
    if is_special:
        reasoning = ["<think>", "</think>"] if thinks else []
        tokenizer.add_special_tokens({"additional_special_tokens": [*TOOL_FORMATS[name].delimiters, *reasoning]})
    tools = ToolSupport(tokenizer, "llama", name, "qwen3" if thinks else "none")
    request = chat_request(tools=[STRICT_CLOCK], response_format=FORMAT)
    prompt = "<|assistant|><think>\n" if thinks and name != "openai" else "<|assistant|>"
    lark = tools.calls_or_content_grammar(request, prompt, ANSWER)
    grammar = asyncio.run(StructuredOutputBackend(tokenizer, (EOS,)).compile_lark(lark, "tools"))

    def accepts(text: str) -> bool:
        matcher = grammar.start()
        statuses = [matcher.accept(token) for token in tokenizer(text, add_special_tokens=False).input_ids]
        return "error" not in statuses and "stop" in (statuses[-1], matcher.accept(EOS))

    plain = CONTENT if not is_special else '{"answer": "a"}'  # tokens cannot be part of JSON
    final = f"<|channel|>final<|message|>{plain}" if name == "openai" else plain
    start, reasoning_text = "", ""
    if thinks:
        start, reasoning_text = "Hm.</think>\n\n", "Hm."
        if name == "openai":
            start = harmony("analysis", "Hm.")
    for text, expected in ((CALLS[name], ("", [("clock", {"utc": True})])), (final, (plain, []))):
        assert accepts(start + text), text
        for pieces in ([start + text], characters(start + text)):
            parser = tools.output_parser(request, prompt).parser
            assert isinstance(parser, CallsOrContent)
            content, reasoning, calls = read(parser, pieces)
            assert (content, calls, reasoning, parser.num_malformed) == (*expected, reasoning_text, 0)
    for text in ("I look.", '{"other": 1}', f"{final} {CALLS[name]}", CALLS[name].replace("utc", "gmt")):
        assert not accepts(start + text) or "gmt" in text and TOOL_FORMATS[name].forced is None, text
    if not thinks:
        assert accepts(f"<think>Hm.</think>{final}") is False


def test_reasoning_is_optional_if_the_prompt_does_not_open_it(tmp_path: Path) -> None:
    tokenizer = load(formats.make_model(tmp_path / "model"))
    lark = ToolSupport(tokenizer, "llama").calls_or_content_grammar(chat_request(), "<|assistant|>", ANSWER)
    grammar = asyncio.run(StructuredOutputBackend(tokenizer, (EOS,)).compile_lark(lark, "tools"))
    for text in ('{"answer": "a"}', '<think>Hm <b> {</think>\n{"answer": "a"}'):
        matcher = grammar.start()
        assert [matcher.accept(token) for token in tokenizer(text, add_special_tokens=False).input_ids][-1] == "stop"


def test_an_object_that_names_a_tool_is_content_unless_it_is_a_call(tmp_path: Path) -> None:
    """Calls in Llama's JSON have no opening delimiter."""
    tools = ToolSupport(load(formats.make_model(tmp_path / "model")), "llama", "llama3_json", "none")
    request = chat_request(response_format={"type": "json_object"})
    for text in ('{"name": "clock", "age": 5}', '{"name": "Bob", "parameters": {}}', '{"name": "clo'):
        for pieces in ([text], characters(text)):
            parser = tools.output_parser(request, "").parser
            assert parser is not None and read(parser, pieces) == (text, "", [])


def test_a_format_without_a_fixed_opening_is_rejected_by_name(tmp_path: Path) -> None:
    field = {**RESPONSE_TEMPLATE["fields"]["tool_calls"], "open_pattern": r"<call:(?P<name>\w+)>"}  # type: ignore[index]
    template = {**RESPONSE_TEMPLATE, "fields": {"tool_calls": field, "content": {}}}
    tools = ToolSupport(load(make_model(tmp_path / "model", template)), "llama")
    with pytest.raises(ApiError, match="do not begin with a fixed text") as rejection:
        tools.calls_or_content_grammar(chat_request(guided_json=ANSWER), "<|assistant|>", ANSWER)
    assert rejection.value.param == "guided_json"


@pytest.mark.parametrize(
    "fields", [{"guided_regex": "a"}, {"guided_choice": ["a"]}, {"structured_outputs": {"grammar": "root ::= [a]"}}]
)
def test_only_json_may_be_combined_with_tools(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="cannot be combined with tools") as rejection:
        chat_request(**fields)
    assert rejection.value.param == next(iter(fields))


# With a real server


def token_id(server: ServerProcess, text: str) -> str:
    body = {"prompt": text, "add_special_tokens": False}
    return str(httpx.post(f"{server.address}/tokenize", json=body).json()["tokens"][0])


@pytest.mark.parametrize("tool_choice", ["auto", "required", "none"])
def test_each_choice_is_calls_or_follows_the_schema(tool_api_server: ServerProcess, tool_choice: str) -> None:
    schema = {"enum": ["yes", "no"]}
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, "temperature": 1.5,
        "n": 8, "tools": [CLOSED_CLOCK], "tool_choice": tool_choice, "seed": 3, "parallel_tool_calls": False,
        "logit_bias": {token_id(tool_api_server, "<"): 3 if tool_choice == "auto" else 0},
    }  # fmt: skip
    choices = chat(tool_api_server, **fields).choices
    num_calls = 0
    for choice in choices:
        if choice.message.tool_calls:
            [call] = choice.message.tool_calls
            assert choice.message.content is None
            assert choice.finish_reason in ("tool_calls", "length")  # a truncated call has incomplete arguments
            if choice.finish_reason == "tool_calls":
                assert isinstance(json.loads(call.function.arguments), dict)
            num_calls += 1
        elif choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
    assert num_calls == {"required": 8, "none": 0}.get(tool_choice, num_calls)
    assert tool_choice != "auto" or 0 < num_calls < 8, "the test needs outputs of both kinds"
    streamed = {index: {"content": "", "calls": []} for index in range(8)}
    for chunk in chat(tool_api_server, **fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index]["content"] += choice.delta.content or ""
            streamed[choice.index]["calls"] += [call.function.arguments for call in choice.delta.tool_calls or []]
    assert list(streamed.values()) == [
        {"content": choice.message.content or "",
         "calls": [call.function.arguments for call in choice.message.tool_calls or []]} for choice in choices
    ]  # fmt: skip


def test_responses_and_messages_accept_both(tool_api_server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    parameters = CLOCK["function"]["parameters"]  # type: ignore[index]
    body: dict[str, Any] = {
        "model": "builtin:tiny", "input": "What is a list?", "max_output_tokens": 200, "temperature": 0,
        "tools": [{"type": "function", "name": "clock", "parameters": parameters, "strict": True}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
    }  # fmt: skip
    response = httpx.post(f"{tool_api_server.address}/v1/responses", json=body, timeout=60)
    assert response.status_code == 200, response.text
    for item in response.json()["output"]:
        assert item["type"] == "function_call" or json.loads(item["content"][0]["text"]) == {"a": 1}
    body = {
        "model": "builtin:tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 200,
        "tools": [{"name": "clock", "input_schema": parameters}], "temperature": 0,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }  # fmt: skip
    response = httpx.post(f"{tool_api_server.address}/v1/messages", json=body, timeout=60)
    assert response.status_code == 200, response.text
    for block in response.json()["content"]:
        assert block["type"] == "tool_use" or json.loads(block["text"]) == {"a": 1}


def test_invalid_schemas_are_rejected_by_the_field_that_contains_them(tool_api_server: ServerProcess) -> None:
    strange = {"type": "strange"}
    bad = {"type": "function", "function": {"name": "bad", "parameters": strange, "strict": True}}
    for fields, param in (
        ({"tools": [bad], "response_format": FORMAT}, "tools"),
        ({"tools": [WEATHER], "extra_body": {"guided_json": strange}}, "guided_json"),
    ):
        with pytest.raises(openai.BadRequestError) as rejection:
            chat(tool_api_server, **fields)
        assert rejection.value.param == param


def test_a_reference_that_would_mean_the_call_itself_is_refused() -> None:
    parameters = {"type": "object", "properties": {"child": {"$ref": "#"}}}
    with pytest.raises(UnsupportedSchemaError, match="the reference '#' is not supported"):
        plain_calls([{"name": "clock", "parameters": parameters}])
    local = {"$defs": {"child": {"type": "integer"}}, "properties": {"child": {"$ref": "#/$defs/child"}}}
    assert "#/$defs/child" in plain_calls([{"name": "clock", "parameters": local}])


def test_the_properties_that_a_format_becomes_are_limited(tmp_path: Path) -> None:
    names = {"type": "object", "propertyNames": {"enum": [f"n{number}" for number in range(7500)]}}
    support = ToolSupport(load(make_model(tmp_path / "model")), "llama")
    request = chat_request(response_format={"type": "json_object"})
    with pytest.raises(UnsupportedSchemaError, match="the limit is 2000"):
        support.calls_or_content_grammar(request, "", names)
