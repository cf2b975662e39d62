"""Tools go into the chat template, and calls come out as calls: read by transformers, or forced by a grammar."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tcdeploy.engine.sequence import NewToken
from tcdeploy.models.load import resolve_model_path
from tcdeploy.server.protocol import ApiError, ChatRequest, parse
from tcdeploy.server.response_builder import ChatResponseBuilder, Choice
from tcdeploy.server.stop_strings import StopStringDetokenizer
from tcdeploy.server.structured_output import StructuredOutputBackend
from tcdeploy.server.tools import Markup, ToolSupport, find_markup
from tcdeploy.server.validation import check
from tcdeploy.server.vocabulary import Vocabulary
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
ONE = '<call>{"name": "clock", "arguments": {"utc": true}}</call>'
TWO = '<call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</call>'


def make_model(folder: Path, response_template: dict[str, Any] | None = RESPONSE_TEMPLATE) -> Path:
    """The embedded model with a chat template that shows tools, and a response template."""
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


LLAMA = SimpleNamespace(config=SimpleNamespace(model_type="llama"))


@pytest.fixture(scope="module")
def tools(tokenizer: Any) -> ToolSupport:
    return ToolSupport(tokenizer, LLAMA)


def request(**asked: Any) -> ChatRequest:
    body = {"messages": [QUESTION], "tools": [WEATHER, CLOCK], **asked}
    made = parse(ChatRequest, json.dumps(body).encode())
    check(made)
    return made


def answer(
    tools: ToolSupport,
    tokenizer: Any,
    text: str,
    reason: str = "stop",
    stream: bool = False,
    stop_strings: tuple[str, ...] = (),
    **asked: Any,
) -> dict[str, Any]:
    """What a client gets of a model that says `text`; of a stream, put together again."""
    made = request(stream=stream, **asked)
    vocabulary = Vocabulary(tokenizer)
    choice = Choice(
        0, StopStringDetokenizer(tokenizer, stop_strings, False), 5, False, tool_parser=tools.tool_parser(made, PROMPT)
    )
    builder = ChatResponseBuilder(made, "tiny", vocabulary)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    content, message = "", {"content": "", "reasoning_content": "", "tool_calls": []}
    for number, token_id in enumerate(ids):
        delta = choice.receive(NewToken(1, token_id, reason if number == len(ids) - 1 else ""), vocabulary)
        content += delta
        if stream:
            delta = builder.delta(choice, delta)["delta"]
            assert [call["index"] for call in delta.get("tool_calls", [])] == list(
                range(len(message["tool_calls"]), len(message["tool_calls"]) + len(delta.get("tool_calls", [])))
            )
            for key in message:
                message[key] += delta.get(key, type(message[key])())
        if choice.finish_reason:
            break
    if not stream:
        message = builder.full_json(choice, content)["message"]
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls],
        "reason": choice.finish_reason,
    }


# What is read


CLOCK_CALL, WEATHER_CALL = ("clock", {"utc": True}), ("get_weather", {"city": "Oslo", "days": 3})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("It is a sequence.<|end|>", "It is a sequence.", "", []),
        (f"{ONE}<|end|>", "", "", [CLOCK_CALL]),
        (f"{ONE}\n{TWO}<|end|>", "", "", [CLOCK_CALL, WEATHER_CALL]),
        (f" Let me look.\n{TWO}<|end|>", "Let me look.", "", [WEATHER_CALL]),
        (f"<think>\nWhich? <b\n</think>\n\n{ONE}<|end|>", "", "Which? <b", [CLOCK_CALL]),
        ("<think>Hm.</think>\n\nA  sequence, <i> think. <|end|>", "A  sequence, <i> think.", "Hm.", []),
        ("a <cal <call", "a <cal <call", "", []),
        ('<call>{"name": "clock"}</call>', "", "", [("clock", {})]),
        ('<call>{"name": "clock", "arguments": {"utc": "true"}}</call>', "", "", [CLOCK_CALL]),
    ],
)  # fmt: skip
def test_an_answer_is_read_whole_and_in_pieces(
    tools: ToolSupport, tokenizer: Any, text: str, content: str, reasoning: str, calls: list[Any], stream: bool
) -> None:
    found = answer(tools, tokenizer, text, stream=stream)
    assert found == {
        "content": content, "reasoning": reasoning, "calls": calls, "reason": "tool_calls" if calls else "stop",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{ONE}<call>{{no json}}</call>{TWO}", "stop"), (f"{ONE}{TWO[:-20]}", "length"),
        (f"{ONE}{TWO.removesuffix('</call>')}", "length"), (f'{ONE}<call>["a"]</call>', "stop"),
        (f'{ONE}<call>{{"name": 5, "arguments": {{}}}}</call>', "stop"), (f"{ONE}<call>5</call>rest", "stop"),
    ],
)  # fmt: skip
def test_half_a_call_and_what_is_none_is_told_to_nobody(
    tools: ToolSupport, tokenizer: Any, text: str, reason: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = answer(tools, tokenizer, text, reason, stream)
    assert (found["calls"], found["content"]) == ([CLOCK_CALL], "")
    assert found["reason"] == ("tool_calls" if reason == "stop" else "length")
    assert "a tool call could not be read" in caplog.text


def test_a_stop_string_within_a_call_cuts_it(tools: ToolSupport, tokenizer: Any) -> None:
    found = answer(tools, tokenizer, f"I look.{ONE}{TWO}", stop_strings=("days",))
    assert (found["calls"], found["content"], found["reason"]) == ([CLOCK_CALL], "I look.", "tool_calls")


def test_of_several_calls_the_first_is_told_where_one_is_wanted(tools: ToolSupport, tokenizer: Any) -> None:
    assert answer(tools, tokenizer, ONE + TWO, parallel_tool_calls=False)["calls"] == [CLOCK_CALL]


def test_families_of_transformers_own_table_are_read_too(tmp_path: Path) -> None:
    """Qwen's tokenizers bring no response template; an internal of transformers knows their markup."""
    tokenizer = load(make_model(tmp_path / "model", None))
    qwen = ToolSupport(tokenizer, SimpleNamespace(config=SimpleNamespace(model_type="qwen3")))
    assert qwen.unsupported_reason == ""
    parsed = qwen.tool_parser(request(), "<|im_start|>assistant\n").push(
        '<tool_call>\n{"name": "clock", "arguments": {"utc": true}}\n</tool_call>'
    )
    assert [(call.name, call.arguments) for call in parsed.calls] == [("clock", '{"utc": true}')]
    assert '"<tool_call>"' in qwen.grammar(request(tool_choice="required"), "<|im_start|>assistant\n")


# What is refused


def test_a_model_that_cannot_use_tools_says_why(tmp_path: Path) -> None:
    for tokenizer, why in (
        (load(Path(resolve_model_path(TINY))), "chat template does not take tools"),
        (load(make_model(tmp_path / "none", None)), "no response template"),
        (
            load(make_model(tmp_path / "empty", {**RESPONSE_TEMPLATE, "fields": {"content": {}}})),
            "no response template",
        ),
        (load(make_model(tmp_path / "bad", {**RESPONSE_TEMPLATE, "version": 9})), "cannot be used: Unsupported"),
    ):
        unable = ToolSupport(tokenizer, LLAMA)
        unable.check([])
        with pytest.raises(ApiError, match=why) as refused:
            unable.check([CLOCK])
        assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [{**CLOCK, "type": "web"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools"), ({"tools": "clock"}, "tools"), ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "another"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"), ({"functions": [CLOCK["function"]]}, "functions"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused_by_the_name_of_the_field(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        request(**asked)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("arguments", ["[1]", "{", "5", "[" * 100_000])
def test_earlier_calls_with_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    message = request(messages=[QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]).messages[1]
    with pytest.raises(ApiError) as refused:
        message.for_template()
    assert refused.value.param == "messages"


# What is forced


FIELD = RESPONSE_TEMPLATE["fields"]["tool_calls"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("changed", "markup"),
    [
        ({}, Markup("<call>", "</call>", "name", "arguments")),
        ({"open_pattern": None, "open": ["<a>", "<b>"]}, Markup("<a>", "</call>", "name", "arguments")),
        (
            {"transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.with}"}}},
            Markup("<call>", "</call>", "tool", "with"),
        ),
        ({"open_pattern": r"<call:(?P<name>\w+)>"}, None), ({"close": None}, None), ({"content": "xml-inline"}, None),
        ({"content_args": {"unquoted_keys": True}}, None), ({"transform": None}, None),
        ({"transform": {"function": {"name": "{name}", "arguments": "{content}"}}}, None),
    ],
)  # fmt: skip
def test_a_call_can_be_forced_where_it_is_json_between_fixed_marks(changed: dict[str, Any], markup: Any) -> None:
    field = {key: value for key, value in {**FIELD, **changed}.items() if value is not None}
    assert find_markup({"fields": {"tool_calls": field}}) == markup
    assert find_markup({}) is None


def test_a_prompt_behind_which_no_call_would_be_read_refuses_to_force_one(tools: ToolSupport) -> None:
    """The template wrote the beginning of the reasoning, in which a mark means nothing."""
    asked = request(tool_choice="required")
    assert "start: call" in tools.grammar(asked, PROMPT)
    with pytest.raises(ApiError, match="none or auto") as refused:
        tools.grammar(asked, PROMPT + "<think>\n")
    assert refused.value.param == "tool_choice"


def test_marks_that_are_tokens_are_forced_as_those_tokens(tmp_path: Path) -> None:
    """Special tokens have no text in a grammar. `<|user|>` stands for one here."""
    field = {**{key: value for key, value in FIELD.items() if key != "open_pattern"}, "open": "<|user|>"}
    template = {**RESPONSE_TEMPLATE, "fields": {"tool_calls": {**field, "close": "<|system|>"}, "content": {}}}
    tokenizer = load(make_model(tmp_path / "model", template))
    structured_output, tools = StructuredOutputBackend(tokenizer, (2,)), ToolSupport(tokenizer, LLAMA)
    asked = request(tool_choice={"type": "function", "function": {"name": "clock"}})
    position = asyncio.run(structured_output.compile_lark(tools.grammar(asked, "<|assistant|>"), "tools")).start()
    text = '<|user|>{"name": "clock", "arguments": {"utc": false}}<|system|>'
    *first, last = tokenizer(text, add_special_tokens=False).input_ids
    assert [position.accept(token_id) for token_id in first] == [""] * len(first)
    assert position.accept(last) == "stop"


# Through the real server


@pytest.fixture(scope="module")
def tool_server(
    tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, server: ServerProcess, fork_server: ForkServer
) -> Iterator[ServerProcess]:
    folder = make_model(tmp_path_factory.mktemp("able") / "model")
    home = tmp_path_factory.mktemp("home")
    with serving(home, warm_cache, "--served-name", TINY, model=str(folder), fork_server=fork_server) as found:
        yield found


def chat(server: ServerProcess, **asked: Any) -> Any:
    return server.client.chat.completions.create(
        **{
            "model": TINY,
            "messages": [QUESTION],
            "max_tokens": 120,
            "temperature": 0,
            "tools": [WEATHER, CLOCK],
            **asked,
        }
    )


def calls_of(choice: Any) -> list[Any]:
    """Each checked against the schema of its function."""
    found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    for name, arguments in found:
        jsonschema.validate(arguments, SCHEMAS[name])
    return found


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_a_required_call_comes_whatever_the_model_would_rather_say(
    tool_server: ServerProcess, temperature: float
) -> None:
    for seed in range(1 if temperature == 0 else 6):
        asked = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": temperature, "seed": seed}
        [choice] = chat(tool_server, **asked).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert len(calls_of(choice)) == 1
        assert choice.message.tool_calls[0].id.startswith("call_")
    assert tool_server.metric("recompiles_total") == 0


def test_a_named_function_is_the_one_that_is_called(tool_server: ServerProcess) -> None:
    for name in SCHEMAS:
        chosen = {"type": "function", "function": {"name": name}}
        choices = chat(tool_server, tool_choice=chosen, temperature=1, seed=4, n=3).choices
        assert [one for choice in choices for one, _ in calls_of(choice)] == [name] * 3


def test_a_streamed_call_is_the_call_not_streamed(tool_server: ServerProcess) -> None:
    asked = {"tool_choice": "required", "temperature": 1.1, "seed": 2}
    [full_json] = chat(tool_server, **asked).choices
    chunks = [chunk.choices[0] for chunk in chat(tool_server, **asked, stream=True)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    told = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [call.index for call in told] == list(range(len(told)))
    assert [(call.function.name, call.function.arguments) for call in told] == [
        (call.function.name, call.function.arguments) for call in full_json.message.tool_calls
    ]
    assert chunks[-1].finish_reason == full_json.finish_reason


def test_a_call_that_is_cut_is_told_to_nobody(tool_server: ServerProcess) -> None:
    [choice] = chat(tool_server, tool_choice="required", max_tokens=12).choices
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("length", None, "")
    assert tool_server.metric("broken_tool_calls_total") == 1


def test_a_model_that_may_call_and_does_not_says_what_it_says(tool_server: ServerProcess) -> None:
    [choice] = chat(tool_server, max_tokens=30).choices
    chunks = list(chat(tool_server, max_tokens=30, stream=True))
    assert choice.message.content and choice.message.tool_calls is None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert "<|end|>" not in choice.message.content


def test_tools_are_in_the_prompt_unless_none_may_be_called(tool_server: ServerProcess) -> None:
    lengths = {
        choice: chat(tool_server, tool_choice=choice, max_tokens=1).usage.prompt_tokens
        for choice in ("auto", "required", "none")
    }
    plain = chat(tool_server, tools=openai.NOT_GIVEN, max_tokens=1).usage.prompt_tokens
    assert lengths["auto"] == lengths["required"] > lengths["none"] == plain
    asked = {"messages": [QUESTION], "tools": [WEATHER, CLOCK]}
    assert httpx.post(f"{tool_server.address}/tokenize", json=asked).json()["count"] == lengths["auto"]


def test_a_chat_goes_on_after_a_call(tool_server: ServerProcess) -> None:
    """The message as it came goes back with the tool's answer; the template sees arguments as an object."""
    [choice] = chat(tool_server, tool_choice={"type": "function", "function": {"name": "clock"}}).choices
    [call] = choice.message.tool_calls
    history = [QUESTION, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "It is noon."}]
    [last] = chat(tool_server, messages=history, max_tokens=10).choices
    assert last.message.content
    with pytest.raises(openai.BadRequestError) as refused:
        chat(
            tool_server,
            messages=[QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "x"}}]}],
        )
    assert refused.value.param == "messages"


def test_parameters_that_are_no_schema_are_refused_where_they_must_hold(tool_server: ServerProcess) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "strange"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(tool_server, tools=[bad], tool_choice="required")
    assert refused.value.param == "tools"
    assert chat(tool_server, tools=[bad], max_tokens=2).choices


def test_the_description_of_the_api_knows_the_new_fields(tool_server: ServerProcess) -> None:
    shapes = httpx.get(f"{tool_server.address}/openapi.json").json()["components"]["schemas"]
    assert {"tools", "tool_choice", "parallel_tool_calls", "response_format"} <= set(
        shapes["ChatRequest"]["properties"]
    )
    assert "schema" in shapes["JsonSchema"]["properties"] and "tool_calls" in shapes["Message"]["properties"]


def test_a_model_without_tools_refuses_them_and_serves_on(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template does not take tools") as refused:
        chat(server)
    assert refused.value.param == "tools"
    assert chat(server, tool_choice="none", max_tokens=2).choices[0].message.content


def test_without_the_grammar_library_a_call_cannot_be_forced_but_read(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model")
    script = "import sys; sys.modules['llguidance'] = None"
    with serve("--served-name", TINY, model=str(folder), script=script) as server:
        with pytest.raises(openai.BadRequestError, match=r"tcdeploy\[structured\]") as refused:
            chat(server, tool_choice="required")
        assert refused.value.param == "tool_choice"
        assert chat(server, max_tokens=5).choices[0].message.content
