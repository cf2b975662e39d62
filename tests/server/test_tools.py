"""Tool calls: rendered by the chat template, parsed by transformers, or forced by a grammar."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tcdeploy.engine.schedule.sequence import NewToken
from tcdeploy.models.load import resolve_model_path
from tcdeploy.server.apis.openai.answer import ChatAnswer
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest
from tcdeploy.server.apis.openai.validation import ModelLimits, check_combinations
from tcdeploy.server.generate.choice import Choice, Delta, Vocabulary
from tcdeploy.server.generate.text_encoder import TextEncoder
from tcdeploy.server.generate.tokenization import PromptTokenizer
from tcdeploy.server.http.request_parsing import parse
from tcdeploy.server.output import tools as tools_module
from tcdeploy.server.output.parser import split_by_kind
from tcdeploy.server.output.structured.structured_output import StructuredOutputBackend
from tcdeploy.server.output.template_parser import TemplateParser, template_format
from tcdeploy.server.output.tools import ToolSupport
from tcdeploy.text.stop_strings import StopStringDetokenizer
from tests.conftest import TINY
from tests.fork_server import ForkServer
from tests.server.conftest import ServerProcess, serving

CHAT_TEMPLATE = """{{- bos_token }}
{%- if tools %}{{- '<|system|>You can call' }}
{%- for tool in tools %}{{- ' ' + tool | tojson }}{%- endfor %}{{- eos_token }}{%- endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content | trim }}
{%- for call in message.tool_calls or [] %}
{{- '<call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</call>' }}
{%- endfor %}
{{- (' to ' + message.tool_call_id if message.tool_call_id else '') + eos_token }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look at the sky.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object", "properties": {"utc": {"type": "boolean"}}, "required": ["utc"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, CLOCK)}
QUESTION = {"role": "user", "content": "What is a list?"}
PROMPT = "<|user|>What is a list?<|end|><|assistant|>"
CLOCK_TEXT = '<call>{"name": "clock", "arguments": {"utc": true}}</call>'
WEATHER_TEXT = '<call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</call>'


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def make_model(folder: Path, response_template: dict[str, Any] | None = RESPONSE_TEMPLATE) -> Path:
    """A copy of the embedded model with a chat template that renders tools, and a response template."""
    shutil.copytree(resolve_model_path(TINY), folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if response_template:
        config["response_template"] = response_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_model(tmp_path_factory.mktemp("tokenizer") / "tools"))


LLAMA = "llama"  # model type


@pytest.fixture(scope="module")
def tools(tokenizer: Any) -> ToolSupport:
    return ToolSupport(tokenizer, LLAMA)


def chat_request(**fields: Any) -> ChatRequest:
    body = {"messages": [QUESTION], "tools": [WEATHER, CLOCK], **fields}
    request = parse(ChatRequest, json.dumps(body).encode())
    check_combinations(request)
    return request


def parse_output(
    tools: ToolSupport,
    tokenizer: Any,
    text: str,
    reason: str = "stop",
    stream: bool = False,
    stop_strings: tuple[str, ...] = (),
    raw_arguments: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """The response to a client if the model generates `text`. Stream chunks are concatenated."""
    request = chat_request(stream=stream, **fields)
    vocabulary = Vocabulary(tokenizer)
    choice = Choice(
        0,
        StopStringDetokenizer(tokenizer, stop_strings, False),
        5,
        None,
        output_parser=tools.output_parser(request, PROMPT).parser,
    )
    settings = SimpleNamespace(model="tiny")
    service = SimpleNamespace(settings=settings, system_fingerprint="fp_0", vocabulary=vocabulary)
    answer = ChatAnswer(SimpleNamespace(request=request, service=service))  # type: ignore[arg-type]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    output, message = Delta(), {"content": "", "reasoning_content": "", "tool_calls": []}
    for number, token_id in enumerate(ids):
        new = Delta()
        choice.receive(NewToken(1, token_id, reason if number == len(ids) - 1 else ""), vocabulary, new)
        output.append(new)
        if stream:
            delta = answer.chunk_choice(choice, new)["delta"]
            assert [call["index"] for call in delta.get("tool_calls", [])] == list(
                range(len(message["tool_calls"]), len(message["tool_calls"]) + len(delta.get("tool_calls", [])))
            )
            for key in message:
                message[key] += delta.get(key, type(message[key])())
        if choice.finish_reason:
            break
    if not stream:
        message = answer.whole_choice(choice, output)["message"]
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [
            (call["function"]["name"], (str if raw_arguments else json.loads)(call["function"]["arguments"]))
            for call in calls
        ],
        "reason": choice.finish_reason,
    }


# Parsing


CLOCK_CALL, WEATHER_CALL = ("clock", {"utc": True}), ("get_weather", {"city": "Oslo", "days": 3})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("It is a sequence.<|end|>", "It is a sequence.", "", []),
        (f"{CLOCK_TEXT}<|end|>", "", "", [CLOCK_CALL]),
        (f"{CLOCK_TEXT}\n{WEATHER_TEXT}<|end|>", "", "", [CLOCK_CALL, WEATHER_CALL]),
        (f" Let me look.\n{WEATHER_TEXT}<|end|>", "Let me look.", "", [WEATHER_CALL]),
        (f"<think>\nWhich? <b\n</think>\n\n{CLOCK_TEXT}<|end|>", "", "Which? <b", [CLOCK_CALL]),
        ("<think>Hm.</think>\n\nA  sequence, <i> think. <|end|>", "A  sequence, <i> think.", "Hm.", []),
        ("a <cal <call", "a <cal <call", "", []),
        ('<call>{"name": "clock"}</call>', "", "", [("clock", {})]),
        ('<call>{"name": "clock", "arguments": {"utc": "true"}}</call>', "", "", [CLOCK_CALL]),
    ],
)  # fmt: skip
def test_outputs_are_parsed_whole_and_streamed(
    tools: ToolSupport, tokenizer: Any, text: str, content: str, reasoning: str, calls: list[Any], stream: bool
) -> None:
    response = parse_output(tools, tokenizer, text, stream=stream)
    assert response == {
        "content": content, "reasoning": reasoning, "calls": calls, "reason": "tool_calls" if calls else "stop",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"A {CLOCK_TEXT}<call>{{no json}}</call>{WEATHER_TEXT}", f"A\n<call>{{no json}}</call>{WEATHER_TEXT}"),
        (f'A {CLOCK_TEXT}\n<call>["a"]</call>', 'A\n<call>["a"]</call>'),
        (f'A {CLOCK_TEXT}<call>{{"name": 5, "arguments": {{}}}}</call>',
         'A\n<call>{"name": 5, "arguments": {}}</call>'),
        (f'A {CLOCK_TEXT}<call>{{"name": "clock", "arguments": "\\ud800"}}</call>',
         'A\n<call>{"name": "clock", "arguments": "\\ud800"}</call>'),
        (f"A {CLOCK_TEXT}<call>5</call>rest", "A\n<call>5</call>rest"),
        (f"A {CLOCK_TEXT}{WEATHER_TEXT[:-20]}", f"A\n{WEATHER_TEXT[:-20]}"),
    ],
)  # fmt: skip
def test_the_text_of_a_malformed_call_is_content(
    tools: ToolSupport, tokenizer: Any, text: str, content: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    response = parse_output(tools, tokenizer, text, "stop", stream)
    assert response == {"content": content, "reasoning": "", "calls": [CLOCK_CALL], "reason": "tool_calls"}
    assert "cannot parse a tool call" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (WEATHER_TEXT[:-20], ("get_weather", '{"city": "Oslo",')),
        (WEATHER_TEXT.removesuffix("</call>"), ("get_weather", '{"city": "Oslo", "days": 3}')),
        ('<call>{"name": "clock", "ar', ("clock", "")), ('<call>{"arguments": {"utc": true}, "name": "clo', None),
    ],
)  # fmt: skip
def test_a_call_that_max_tokens_cuts_is_returned_as_far_as_it_came(
    tools: ToolSupport, tokenizer: Any, text: str, cut: Any, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    response = parse_output(tools, tokenizer, CLOCK_TEXT + text, "length", stream, raw_arguments=True)
    calls = [("clock", '{"utc": true}'), *([cut] if cut else [])]
    assert response == {"content": "" if cut else text, "reasoning": "", "calls": calls, "reason": "length"}
    assert not caplog.text, "a call that is cut is not malformed"


def test_a_call_with_a_stop_string_inside_is_content(tools: ToolSupport, tokenizer: Any) -> None:
    """A client could not distinguish it from a complete call by the finish reason."""
    response = parse_output(tools, tokenizer, f"I look.{CLOCK_TEXT}{WEATHER_TEXT}", stop_strings=("days",))
    content = f"I look.\n{WEATHER_TEXT[: WEATHER_TEXT.index('days')]}"
    assert response == {"content": content, "reasoning": "", "calls": [CLOCK_CALL], "reason": "tool_calls"}


def test_only_the_first_call_is_returned_without_parallel_tool_calls(tools: ToolSupport, tokenizer: Any) -> None:
    response = parse_output(tools, tokenizer, CLOCK_TEXT + WEATHER_TEXT, parallel_tool_calls=False)
    assert response["calls"] == [CLOCK_CALL]


def test_families_of_transformers_table_are_parsed(tmp_path: Path) -> None:
    """Qwen's tokenizers have no response template; an internal table of transformers has one."""
    tokenizer = load(make_model(tmp_path / "model", None))
    qwen = ToolSupport(tokenizer, "qwen3")
    assert qwen.unsupported_reason == ""
    parser = qwen.output_parser(chat_request(), "<|im_start|>assistant\n").parser
    assert isinstance(parser, TemplateParser)
    [call] = split_by_kind(
        parser.push('<tool_call>\n{"name": "clock", "arguments": {"utc": true}}\n</tool_call>')
    ).calls
    assert (call.name, call.arguments) == ("clock", '{"utc": true}')
    assert '"<tool_call>"' in qwen.grammar(chat_request(tool_choice="required"), "<|im_start|>assistant\n")


def test_long_white_space_does_not_reach_transformers_parser(tools: ToolSupport) -> None:
    """The time of that parser is quadratic in the length of white space."""
    parser = tools.output_parser(chat_request(), PROMPT).parser
    assert isinstance(parser, TemplateParser)
    for text in ("A", *[" "] * 5000, "B", *[" "] * 200, "C", *["\n"] * 5000, WEATHER_TEXT):
        output = split_by_kind(parser.push(text))
        assert output.content.strip() == text.strip().replace(WEATHER_TEXT, "")
    assert [call.name for call in output.calls] == ["get_weather"]
    text = '<call>{"name": "clock", "arguments": {"text": "' + " " * 5000 + '"}}</call>'
    [call] = split_by_kind(parser.push(text)).calls
    assert json.loads(call.arguments) == {"text": " " * 5000}


# Rejections


def test_a_model_without_tool_support_reports_the_reason(tmp_path: Path) -> None:
    without_tools = load(Path(resolve_model_path(TINY)))
    without_tools.chat_template = PLAIN_TEMPLATE
    for tokenizer, reason in (
        (without_tools, "chat template does not render tools"),
        (load(make_model(tmp_path / "none", None)), "no response template"),
        (
            load(make_model(tmp_path / "empty", {**RESPONSE_TEMPLATE, "fields": {"content": {}}})),
            "no response template",
        ),
        (load(make_model(tmp_path / "bad", {**RESPONSE_TEMPLATE, "version": 9})), "is not usable: Unsupported"),
    ):
        unsupported = ToolSupport(tokenizer, LLAMA)
        unsupported.check([])
        with pytest.raises(ApiError, match=reason) as rejection:
            unsupported.check([CLOCK])
        assert (rejection.value.status, rejection.value.param) == (400, "tools")


def test_a_server_without_transformers_rejects_tools_with_the_extra_that_installs_it(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools_module, "is_installed", lambda name: name != "transformers")
    tools = ToolSupport(tokenizer, LLAMA)
    tools.check([])
    with pytest.raises(
        ApiError, match=r"transformers, which parses tool calls, is not installed \(install the extra `compile`\)"
    ) as error:
        tools.check([CLOCK])
    assert (error.value.status, error.value.param) == (400, "tools")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [{**CLOCK, "type": "web"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools"), ({"tools": "clock"}, "tools"), ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "another"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": allowed_tools("auto")}, "tool_choice"),
        ({"tool_choice": allowed_tools("required", "clock", "another")}, "tool_choice"),
        ({"tool_choice": allowed_tools("any", "clock")}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"), ({"tool_choice": {"type": "web"}}, "tool_choice"),
        ({"tools": [], "tool_choice": allowed_tools("auto", "clock")}, "tool_choice"),
        ({"guided_regex": "a"}, "guided_regex"), ({"stop": ["a", "a" * 1001]}, "stop"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"), ({"functions": [CLOCK["function"]]}, "functions"),
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_field_is_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as rejection:
        chat_request(**fields)
    assert (rejection.value.status, rejection.value.param) == (400, param)


def test_allowed_tools_are_the_only_ones_that_the_model_sees_and_may_call() -> None:
    request = chat_request(tool_choice=allowed_tools("auto", "clock"))
    assert (request.usable_tools, request.forced_tools, request.constraint_field) == ([CLOCK], [], "")
    request = chat_request(tool_choice=allowed_tools("required", "clock", "get_weather"))
    assert request.usable_tools == request.forced_tools == [WEATHER, CLOCK] and request.allows_multiple_calls
    request = chat_request(tool_choice=allowed_tools("required", "clock"), parallel_tool_calls=False)
    assert request.forced_tools == [CLOCK] and not request.allows_multiple_calls


@pytest.mark.parametrize("arguments", ["[1]", "{", "5", "[" * 100_000])
def test_earlier_calls_whose_arguments_are_not_an_object_are_rejected(tokenizer: Any, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    request = chat_request(messages=[QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}])
    prompts = PromptTokenizer(tokenizer, TextEncoder(tokenizer), ModelLimits(64, 2048), "a", ToolSupport(tokenizer, ""))
    with pytest.raises(ApiError, match="the arguments of the call of clock are not a JSON object") as rejection:
        asyncio.run(prompts.prompts(request))
    assert (rejection.value.status, rejection.value.param) == (400, "messages[1].tool_calls")


# Forced calls


FIELD = RESPONSE_TEMPLATE["fields"]["tool_calls"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("changed", "example"),
    [
        ({}, '<call>{"name": "f", "arguments": {}}</call>'),
        ({"open_pattern": None, "open": ["<a>", "<b>"]}, '<a>{"name": "f", "arguments": {}}</call>'),
        (
            {"transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.with}"}}},
            '<call>{"tool": "f", "with": {}}</call>',
        ),
        ({"open_pattern": r"<call:(?P<name>\w+)>"}, None), ({"close": None}, None), ({"content": "xml-inline"}, None),
        ({"content_args": {"unquoted_keys": True}}, None), ({"transform": None}, None),
        ({"transform": {"function": {"name": "{name}", "arguments": "{content}"}}}, None),
    ],
)  # fmt: skip
def test_a_call_can_be_forced_if_it_is_json_between_fixed_delimiters(
    changed: dict[str, Any], example: str | None
) -> None:
    field = {key: value for key, value in {**FIELD, **changed}.items() if value is not None}
    described = template_format({"fields": {"tool_calls": field}})
    assert described is not None and (described.forced.example("f") if described.forced else None) == example
    assert template_format({}) is None


def test_a_call_is_not_forced_after_a_prompt_where_the_parser_reads_none(tools: ToolSupport) -> None:
    """The prompt ends inside the reasoning block, where delimiters of calls are plain text."""
    request = chat_request(tool_choice="required")
    assert "start: call" in tools.grammar(request, PROMPT)
    with pytest.raises(ApiError, match="none or auto") as rejection:
        tools.grammar(request, PROMPT + "<think>\n")
    assert rejection.value.param == "tool_choice"


def test_delimiters_that_are_one_token_are_forced_as_that_token(tmp_path: Path) -> None:
    """Special tokens have no text in a grammar. `<|user|>` serves as one here."""
    field = {**{key: value for key, value in FIELD.items() if key != "open_pattern"}, "open": "<|user|>"}
    template = {**RESPONSE_TEMPLATE, "fields": {"tool_calls": {**field, "close": "<|system|>"}, "content": {}}}
    tokenizer = load(make_model(tmp_path / "model", template))
    structured_output, tools = StructuredOutputBackend(tokenizer, (2,)), ToolSupport(tokenizer, LLAMA)
    request = chat_request(tool_choice={"type": "function", "function": {"name": "clock"}})
    matcher = asyncio.run(structured_output.compile_lark(tools.grammar(request, "<|assistant|>"), "tools")).start()
    text = '<|user|>{"name": "clock", "arguments": {"utc": false}}<|system|>'
    *first, last = tokenizer(text, add_special_tokens=False).input_ids
    assert [matcher.accept(token_id) for token_id in first] == [""] * len(first)
    assert matcher.accept(last) == "stop"


# With a real server


def chat(server: ServerProcess, **fields: Any) -> Any:
    return server.client.chat.completions.create(
        **{
            "model": TINY,
            "messages": [QUESTION],
            "max_tokens": 120,
            "temperature": 0,
            "tools": [WEATHER, CLOCK],
            **fields,
        }
    )


def calls_of(choice: Any) -> list[Any]:
    """Name and arguments of each call, validated against the schema of its function."""
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
    return calls


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_tool_choice_required_forces_one_call(tool_api_server: ServerProcess, temperature: float) -> None:
    for seed in range(1 if temperature == 0 else 3):
        fields = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": temperature, "seed": seed}
        [choice] = chat(tool_api_server, **fields).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert len(calls_of(choice)) == 1
        assert choice.message.tool_calls[0].id.startswith("call_")
    assert tool_api_server.metric("recompiles_total") == 0


def test_a_named_tool_choice_forces_that_function(tool_api_server: ServerProcess) -> None:
    for name in SCHEMAS:
        chosen = {"type": "function", "function": {"name": name}}
        choices = chat(tool_api_server, tool_choice=chosen, temperature=1, seed=4, n=3).choices
        assert [called for choice in choices for called, _ in calls_of(choice)] == [name] * 3


def test_required_allowed_tools_force_one_of_them(tool_api_server: ServerProcess) -> None:
    chosen = allowed_tools("required", "clock")
    choices = chat(tool_api_server, tool_choice=chosen, parallel_tool_calls=False, temperature=1, seed=4, n=3).choices
    assert [called for choice in choices for called, _ in calls_of(choice)] == ["clock"] * 3


def test_a_streamed_call_equals_the_whole_call(tool_api_server: ServerProcess) -> None:
    fields = {"tool_choice": "required", "temperature": 1.1, "seed": 2}
    [whole] = chat(tool_api_server, **fields).choices
    chunks = [chunk.choices[0] for chunk in chat(tool_api_server, **fields, stream=True)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    streamed_calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [call.index for call in streamed_calls] == list(range(len(streamed_calls)))
    assert [(call.function.name, call.function.arguments) for call in streamed_calls] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert chunks[-1].finish_reason == whole.finish_reason


def test_a_truncated_call_is_returned_as_far_as_it_came(tool_api_server: ServerProcess) -> None:
    num_broken = tool_api_server.metric("broken_tool_calls_total")
    fields = {"tool_choice": {"type": "function", "function": {"name": "clock"}}, "max_tokens": 22}
    [choice] = chat(tool_api_server, **fields).choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, choice.message.content) == ("length", "clock", None)
    chunks = [chunk.choices[0] for chunk in chat(tool_api_server, **fields, stream=True)]
    [streamed] = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert streamed.function.model_dump() == call.function.model_dump()
    assert chunks[-1].finish_reason == "length"
    assert tool_api_server.metric("broken_tool_calls_total") == num_broken


def test_content_without_a_call_is_returned_unchanged(tool_api_server: ServerProcess) -> None:
    [choice] = chat(tool_api_server, max_tokens=30).choices
    chunks = list(chat(tool_api_server, max_tokens=30, stream=True))
    assert choice.message.content and choice.message.tool_calls is None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert "<|end|>" not in choice.message.content


def test_tools_are_in_the_prompt_unless_tool_choice_is_none(tool_api_server: ServerProcess) -> None:
    lengths = {
        choice: chat(tool_api_server, tool_choice=choice, max_tokens=1).usage.prompt_tokens
        for choice in ("auto", "required", "none")
    }
    plain = chat(tool_api_server, tools=openai.NOT_GIVEN, max_tokens=1).usage.prompt_tokens
    assert lengths["auto"] == lengths["required"] > lengths["none"] == plain
    body = {"messages": [QUESTION], "tools": [WEATHER, CLOCK]}
    assert httpx.post(f"{tool_api_server.address}/tokenize", json=body).json()["count"] == lengths["auto"]


def test_a_chat_continues_with_the_result_of_a_call(tool_api_server: ServerProcess) -> None:
    """The client sends back the call and its result. The template gets the arguments as an object."""
    [choice] = chat(tool_api_server, tool_choice={"type": "function", "function": {"name": "clock"}}).choices
    [call] = choice.message.tool_calls
    history = [QUESTION, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "It is noon."}]
    [last] = chat(tool_api_server, messages=history, max_tokens=10).choices
    assert last.message.content
    with pytest.raises(openai.BadRequestError) as rejection:
        chat(
            tool_api_server,
            messages=[QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "x"}}]}],
        )
    assert rejection.value.param == "messages[1].tool_calls"


def test_invalid_parameter_schemas_are_rejected_only_if_a_call_is_forced(tool_api_server: ServerProcess) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "strange"}}}
    with pytest.raises(openai.BadRequestError) as rejection:
        chat(tool_api_server, tools=[bad], tool_choice="required")
    assert rejection.value.param == "tools"
    assert chat(tool_api_server, tools=[bad], max_tokens=2).choices


def test_openapi_json_describes_tools_and_formats(tool_api_server: ServerProcess) -> None:
    schemas = httpx.get(f"{tool_api_server.address}/openapi.json").json()["components"]["schemas"]
    assert {"tools", "tool_choice", "parallel_tool_calls", "response_format"} <= set(
        schemas["ChatRequest"]["properties"]
    )
    assert "schema" in schemas["JsonSchema"]["properties"] and "tool_calls" in schemas["Message"]["properties"]


def test_a_model_without_tool_support_rejects_tools_and_keeps_serving(tmp_path: Path, serve: Any) -> None:
    (tmp_path / "plain.jinja").write_text(PLAIN_TEMPLATE)
    with serve("--chat-template", str(tmp_path / "plain.jinja")) as server:
        with pytest.raises(openai.BadRequestError, match="chat template does not render tools") as rejection:
            chat(server)
        assert rejection.value.param == "tools"
        assert chat(server, tool_choice="none", max_tokens=2).choices[0].message.content


def test_without_llguidance_calls_are_parsed_but_not_forced(
    tmp_path: Path, warm_cache: Path, fork_server: ForkServer
) -> None:
    folder = make_model(tmp_path / "model")
    script = "import sys; sys.modules['llguidance'] = None"
    flags = ("--served-model-name", TINY)
    with serving(tmp_path, warm_cache, *flags, model=str(folder), script=script, fork_server=fork_server) as server:
        with pytest.raises(openai.BadRequestError, match="the extra `structured`") as rejection:
            chat(server, tool_choice="required")
        assert rejection.value.param == "tool_choice"
        assert chat(server, max_tokens=5).choices[0].message.content
