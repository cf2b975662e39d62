"""Anthropic's Messages API: translation to a chat request, the events, and Anthropic's Python client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tcdeploy.engine.schedule.sequence import NewToken
from tcdeploy.errors import EngineDeadError
from tcdeploy.server.api import make_app
from tcdeploy.server.apis.answer import Answer
from tcdeploy.server.apis.anthropic.answer import MessagesAnswer
from tcdeploy.server.apis.anthropic.protocol import CountTokensRequest, MessagesRequest, messages_error_body
from tcdeploy.server.apis.anthropic.routes import MESSAGES, to_chat_request
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest
from tcdeploy.server.apis.openai.unsupported_fields import rename_error
from tcdeploy.server.apis.openai.validation import (
    ModelLimits,
    check_combinations,
    context_length_error,
    to_sampling_params,
)
from tcdeploy.server.generate import generation
from tcdeploy.server.generate.choice import Choice, Delta, Vocabulary, total_usage
from tcdeploy.server.generate.generation import sse_events
from tcdeploy.server.http.json_steps import JsonLimits
from tcdeploy.server.http.request_parsing import LargeBodyParser, parse
from tcdeploy.server.output.tools import ToolSupport
from tcdeploy.text.stop_strings import StopStringDetokenizer
from tcdeploy.text.template_form import TemplateForm
from tests.conftest import TINY
from tests.server.conftest import ServerProcess
from tests.server.test_api import loading_state, send_request
from tests.server.test_tools import CLOCK, CLOCK_TEXT, PROMPT, WEATHER, WEATHER_TEXT, load, make_model

if TYPE_CHECKING:  # importing it takes more than a second, in each worker
    import anthropic

USER = {"role": "user", "content": "What is a list?"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {"utc": True}}
TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}  # type: ignore[index]
    for tool in (WEATHER, CLOCK)
]


def messages_request(**fields: Any) -> MessagesRequest:
    return parse(MessagesRequest, json.dumps({"messages": [USER], "max_tokens": 5, **fields}).encode())


def chat_request(**fields: Any) -> ChatRequest:
    """The chat request that `fields` are translated to, as the route does it."""

    async def translate() -> Any:
        return await MESSAGES.translate(None, None, messages_request(**fields))  # type: ignore[arg-type]

    request = asyncio.run(translate()).request
    try:
        check_combinations(request)
    except ApiError as error:
        raise rename_error(error, MESSAGES.field_names) from None
    return request


def template_messages(*messages: Any, **fields: Any) -> list[Any]:
    """The messages that a template gets, in the form that most templates expect."""
    conversation = [message.for_template() for message in chat_request(messages=list(messages), **fields).messages]
    return [message.fields for message in TemplateForm().messages(conversation)]


# Translation


def test_content_blocks_become_messages_of_a_chat() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "noon"}]}
    thinking = {"type": "thinking", "thinking": "Which?", "signature": "x"}
    text = {"type": "text", "text": "Let me look.", "cache_control": {"type": "ephemeral"}}
    assert template_messages(
        USER,
        {"role": "assistant", "content": [thinking, text, CALL]},
        {"role": "user", "content": [result, {**result, "content": "1 pm", "is_error": True}, {**text, "text": "So?"}]},
        {"role": "user", "content": "Please."},
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
    ) == [
        {"role": "system", "content": "Be brief.\n\nBe kind."}, USER,
        {
            "role": "assistant", "content": "Let me look.", "reasoning_content": "Which?",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "clock", "arguments": {"utc": True}}}
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "clock", "content": "noon"},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "clock", "content": "Error: 1 pm"},
        {"role": "user", "content": "So?\n\nPlease."},
    ]  # fmt: skip


def test_parameters_are_translated() -> None:
    request = chat_request(
        system="Be brief.", stop_sequences=["a"], temperature=0.5, top_p=0.9, top_k=3, seed=4, tools=TOOLS,
        tool_choice={"type": "tool", "name": "clock", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"}, output_config={"effort": "low"}, metadata={"user_id": "a"}, stream=True,
    )  # fmt: skip
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0.5, 0.9, 3, 4)
    assert (request.stop_strings, request.max_new_tokens, request.stream) == (("a",), 5, True)
    assert [tool["function"]["name"] for tool in request.forced_tools] == ["clock"]
    assert request.usable_tools[1]["function"]["parameters"] == TOOLS[1]["input_schema"]
    assert request.parallel_tool_calls is False and request.reasoning_effort == "low"
    assert request.chat_template_kwargs == {"enable_thinking": False}
    for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 2000}):
        assert chat_request(thinking=thinking).chat_template_kwargs == {"enable_thinking": True}
    for choice, expected in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert chat_request(tools=TOOLS, tool_choice={"type": choice}).tool_choice == expected
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    constraint = chat_request(output_config={"format": {"type": "json_schema", "schema": schema}}).output_constraint
    assert constraint is not None and constraint.value == schema


def test_a_final_assistant_message_is_continued() -> None:
    request = chat_request(messages=[USER, {"role": "assistant", "content": "A list"}])
    assert request.continue_final_message is True and chat_request().continue_final_message is None


def test_a_limit_beyond_the_context_is_lowered_as_in_anthropics_api() -> None:
    limits = ModelLimits(64, 100)
    assert to_sampling_params(chat_request(max_tokens=4096), 60, limits).max_tokens == 4
    assert to_sampling_params(chat_request(max_tokens=3), 60, limits).max_tokens == 3
    with pytest.raises(ApiError) as rejection:
        to_sampling_params(chat_request(max_tokens=4096), 64, limits)
    message = messages_error_body(rejection.value)["error"]["message"]
    assert message.startswith("prompt is too long: This model's maximum context length is 64 tokens. However, your mes")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"container": "c"}, "container", "container is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management", "is not supported"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "mcp_servers is not supported"),
        ({"grammar": "root ::= a"}, "grammar", "grammar is not supported; use output_config.format"),
        ({"stop": ["a"]}, "stop", "stop is not supported; use stop_s"), ({"n": 2}, "n", "n is not supported"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences contains an empty string"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"), ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"system": [{"type": "image"}]}, "system[0]", "images are not supported by this server"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]", "documents"),
        ({"messages": [{"role": "user", "content": [{"type": "{x}"}]}]}, "messages[0].content[0]", "the type 'x' are"),
        (
            {"messages": [USER, {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "", "content": [{"type": "text", "text": ""}, {"type": "image"}]}
            ]}]}, "messages[1].content[0].content[1]", "images are not supported",
        ),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0]", "to a message of the role"),
        ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "messages", "must have its tool_result"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "messages.0.role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]", "the type 'web_search_2025"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading", "defer_loading is not supported"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools", "tools.0.name"),
        ({"tools": TOOLS * 65}, "tools", "at most 128"),
        ({"guided_json": {"type": "object"}}, "guided_json", "not supported; use output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format", "not supported; use output_config.format"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice", "tool_choice.name is required"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "that is not in tools"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_what_is_not_supported_or_invalid_is_refused_by_name(fields: Any, param: str, message: str) -> None:
    with pytest.raises(ApiError) as rejection:
        chat_request(**fields)
    assert (rejection.value.status, rejection.value.param) == (400, param)
    assert message in rejection.value.message


def test_a_large_request_is_validated_in_slices_with_the_same_result() -> None:
    parts = [{"type": "text", "text": "x" * 40}] * 900
    body = {"messages": [{"role": "user", "content": parts}] * 2, "max_tokens": 5}
    limits = JsonLimits(1 << 20, 1 << 17)

    def parse_large(fields: Any) -> Any:
        return asyncio.run(LargeBodyParser().parse(MessagesRequest, json.dumps(fields).encode(), limits))

    assert parse_large(body) == messages_request(**body)
    image = {"type": "image", "source": {"type": "base64", "data": "A" * (1 << 21)}}
    with pytest.raises(ApiError, match="images and documents are not supported") as rejection:
        parse_large({**body, "messages": [{"role": "user", "content": [image]}]})
    assert rejection.value.param == "messages[0].content[0]"


def test_other_tasks_run_while_a_long_conversation_is_translated() -> None:
    body = messages_request(messages=[USER, {"role": "assistant", "content": "A sequence."}, USER] * 1000)
    turns = 0

    async def run() -> None:
        nonlocal turns
        translation = asyncio.ensure_future(to_chat_request(body))
        while not translation.done():
            await asyncio.sleep(0)
            turns += 1

    asyncio.run(run())
    assert turns >= 6000 // 256 + 2000 // 256, "of 3,000 messages with a block each, and of 2,000 turns"


# Events


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_model(tmp_path_factory.mktemp("tokenizer") / "tools"))


def fake_active(tokenizer: Any, text: str, reason: str, batch_size: int, stop: tuple[str, ...] = ()) -> Any:
    """An ActiveRequest whose engine generates `text`, of which `batch_size` tokens arrive at a time."""
    vocabulary, tools = Vocabulary(tokenizer), ToolSupport(tokenizer, "llama")
    chat = parse(ChatRequest, json.dumps({"messages": [USER], "tools": [WEATHER, CLOCK]}).encode())
    detokenizer = StopStringDetokenizer(tokenizer, stop, False)
    choice = Choice(0, detokenizer, 9, None, output_parser=tools.output_parser(chat, PROMPT).parser)
    ids = tokenizer(text, add_special_tokens=False).input_ids

    async def deltas(_: Any = None) -> AsyncIterator[dict[int, Delta]]:
        for start in range(0, len(ids), batch_size):
            delta = Delta()
            for number in range(start, min(start + batch_size, len(ids))):
                if choice.finish_reason:
                    break
                token = NewToken(1, ids[number], reason if number == len(ids) - 1 else "", cached_tokens=4)
                choice.receive(token, vocabulary, delta)
            yield {0: delta}

    class Active(SimpleNamespace):
        @property
        def usage(self) -> Any:
            return total_usage(self.choices, 1)

    service = SimpleNamespace(settings=SimpleNamespace(model="tiny"))
    return Active(choices=[choice], service=service, deltas=deltas, request=chat, prompts=[None])


def events_of(answer: Answer) -> list[Any]:
    """The data of all events, as generation.py sends them."""

    async def run() -> bytes:
        content = answer.first_events()
        async for deltas in answer.active.deltas():
            content += answer.events(deltas)
        return content + answer.last_events()

    events = []
    for event in asyncio.run(run()).decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events: list[Any]) -> dict[str, Any]:
    """The message that the events build, as Anthropic's documentation says."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    message, inputs, is_open = events[0]["message"], "", False
    for event in events[2:]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                inputs, is_open = "", True
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                kind, value = event["delta"].values()
                inputs += value
                if kind != "input_json_delta":
                    message["content"][-1][kind.removesuffix("_delta")] += value
            case "content_block_stop":
                is_open = False
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(inputs)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert not is_open and events[-1]["type"] == "message_stop"
    return message


OUTPUTS = {
    "text": ("It is a sequence.<|end|>", "stop", ["text"], "end_turn"),
    "thinking": ("<think>Hm, a list?</think>\n\nA sequence.<|end|>", "stop", ["thinking", "text"], "end_turn"),
    "calls": (
        f"Let me look. {CLOCK_TEXT}\n{WEATHER_TEXT}<|end|>",
        "stop",
        ["text", "tool_use", "tool_use"],
        "tool_use",
    ),
    "text after a call": (f"{CLOCK_TEXT} and then<|end|>", "stop", ["tool_use", "text"], "tool_use"),
    "cut": (f"It is. {CLOCK_TEXT[:20]}", "length", ["text"], "max_tokens"),
    "cut call": (WEATHER_TEXT[:-20], "length", ["tool_use"], "max_tokens"),
    "stop string": ("It is HALT and more", "length", ["text"], "stop_sequence"),
    "nothing": ("<|end|>", "stop", [], "end_turn"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_events_build_the_whole_message_however_many_tokens_an_event_covers(tokenizer: Any, name: str) -> None:
    text, reason, kinds, stop_reason = OUTPUTS[name]
    body = messages_request(max_tokens=5)

    def answer(batch_size: int) -> MessagesAnswer:
        return MessagesAnswer(fake_active(tokenizer, text, reason, batch_size, ("HALT",)), body)

    whole = json.loads(asyncio.run(answer(1000).body()))
    assert [block["type"] for block in whole["content"]] == kinds and whole["stop_reason"] == stop_reason
    assert whole["stop_sequence"] == ("HALT" if stop_reason == "stop_sequence" else None)
    assert whole["usage"]["input_tokens"] == 5 and whole["usage"]["cache_read_input_tokens"] == 4
    for batch_size in (1, 3, 1000):
        streamed = message_of(events_of(answer(batch_size)))
        for message in (whole, streamed):
            message.pop("id")
            for block in message["content"]:
                assert (block.pop("id", "toolu_")).startswith("toolu_")
        assert streamed == whole
        whole = json.loads(asyncio.run(answer(1000).body()))


def test_a_limit_of_the_context_and_hidden_thinking(tokenizer: Any) -> None:
    active = fake_active(tokenizer, "<think>Hm.</think>So", "length", 1)
    body = messages_request(max_tokens=500, thinking={"type": "adaptive", "display": "omitted"})
    whole = json.loads(asyncio.run(MessagesAnswer(active, body).body()))
    assert whole["stop_reason"] == "model_context_window_exceeded"
    assert whole["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}


def test_arguments_that_are_not_an_object_are_put_into_one(tokenizer: Any) -> None:
    for arguments, value in (("[1]", [1]), ('"{\\"a\\": 1e999}"', '{"a": 1e999}')):
        text = f'<call>{{"name": "clock", "arguments": {arguments}}}</call><|end|>'
        active = fake_active(tokenizer, text, "stop", 1)
        [block] = json.loads(asyncio.run(MessagesAnswer(active, messages_request()).body()))["content"]
        assert block["input"] == {"arguments": value}


# Errors


def test_an_error_inside_a_stream_is_an_event_with_anthropics_format(tokenizer: Any) -> None:
    active = fake_active(tokenizer, "It is", "stop", 1)

    async def failing_deltas(_: float) -> AsyncIterator[dict[int, Delta]]:
        yield {}
        raise EngineDeadError("out of memory")

    async def run() -> bytes:
        active.deltas = failing_deltas
        return b"".join([event async for event in sse_events(MessagesAnswer(active, messages_request()))])

    *_, ping, error, end = asyncio.run(run()).decode().split("\n\n")
    assert ping == 'event: ping\ndata: {"type":"ping"}' and end == ""
    name, data = error.split("\ndata: ")
    content = json.loads(data)
    assert (name, content["type"], content["error"]["type"]) == ("event: error", "error", "overloaded_error")
    assert "out of memory" in content["error"]["message"]


def test_a_call_that_is_not_complete_has_keep_alives(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> bytes:
        answer = MessagesAnswer(fake_active(tokenizer, WEATHER_TEXT, "stop", 1), messages_request())
        return b"".join([event async for event in sse_events(answer)])

    assert asyncio.run(run()).count(b"event: ping") == 1
    monkeypatch.setattr(generation, "KEEP_ALIVE_SECONDS", 0.0)
    assert asyncio.run(run()).count(b"event: ping") > 10


def test_errors_have_anthropics_format_on_its_routes_only() -> None:
    state = loading_state()
    for method, path, status, kind in (
        ("POST", "/v1/messages", 503, "overloaded_error"), ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", 503, "overloaded_error"),
    ):  # fmt: skip
        response = send_request(state, method, path, {"messages": [USER], "max_tokens": 5})
        error = response.json()
        assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind), path
        assert set(error["error"]) == {"type", "message"}
    assert set(send_request(state, "GET", "/v1/chat/completions", None).json()["error"]) > {"param"}
    assert messages_error_body(ApiError(413, "a"))["error"]["type"] == "request_too_large"
    assert messages_error_body(ApiError(500, "a"))["error"]["type"] == "api_error"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.sampled_from(["text", "user", "assistant", "tool_use", "tool_result", "image", "auto"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "id", "name", "input"]), inner),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*MessagesRequest.model_fields, "x"]), JSON_VALUES), JSON_VALUES)
def test_no_body_causes_another_error_than_400(fields: dict[str, Any], message: Any) -> None:
    body = {"messages": [message], "max_tokens": 5, **fields}
    for request_type in (MessagesRequest, CountTokensRequest):
        try:
            request = parse(request_type, json.dumps(body).encode())
            if isinstance(request, MessagesRequest):
                chat = asyncio.run(to_chat_request(request))
                check_combinations(chat)
                TemplateForm().messages([message.for_template() for message in chat.messages])
                context_length_error(chat, ModelLimits(64, 100), 70)
        except ApiError as error:
            assert error.status == 400
            json.dumps(messages_error_body(error))


# With Anthropic's client


@pytest.fixture(scope="module")
def client(tool_api_server: ServerProcess) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=tool_api_server.address, api_key="none", max_retries=0)


def create(client: anthropic.Anthropic, temperature: float = 0, **fields: Any) -> Any:
    extra = {"temperature": temperature}
    return client.messages.create(
        **{"model": TINY, "messages": [USER], "max_tokens": 120, "extra_body": extra, **fields}
    )


def test_a_streamed_message_equals_the_whole_one(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"max_tokens": 30, "system": "Be brief."}
    whole = create(client, **fields)
    assert whole.content[0].text and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 30
    arguments: Any = {"model": TINY, "messages": [USER], "extra_body": {"temperature": 0}, **fields}
    with client.messages.stream(**arguments) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 30
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == total
    assert client.messages.count_tokens(model=TINY, messages=[USER], system="Be brief.").input_tokens == total  # type: ignore[list-item]


def test_a_tool_is_called_and_its_result_is_read(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    whole = create(client, tools=TOOLS, tool_choice=choice)
    [block] = whole.content
    assert (block.type, whole.stop_reason) == ("tool_use", "tool_use") and block.id.startswith("toolu_")
    arguments: Any = {"model": TINY, "messages": [USER], "max_tokens": 120, "tools": TOOLS, "tool_choice": choice}
    with client.messages.stream(**arguments, extra_body={"temperature": 0}) as stream:
        [streamed] = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (block.name, block.input)  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "noon"}
    history = [USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert create(client, messages=history, tools=TOOLS, max_tokens=8).content[0].text
    named = create(client, tools=TOOLS, tool_choice={"type": "tool", "name": "clock"})
    assert [block.name for block in named.content] == ["clock"]
    assert create(client, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=8).content[0].type == "text"


def test_structured_output_follows_its_schema(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    message = create(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(message.content[0].text)["a"] in (1, 2) and message.stop_reason == "end_turn"


def test_a_stop_sequence_and_a_continued_message(client: anthropic.Anthropic) -> None:
    plain = create(client, max_tokens=30).content[0].text
    stopped = create(client, max_tokens=30, stop_sequences=[plain[10:15]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", plain[10:15])
    assert stopped.content[0].text == plain[: plain.index(plain[10:15])]
    prefix = plain[:7].rstrip()
    continued = create(client, max_tokens=20, messages=[USER, {"role": "assistant", "content": prefix}])
    assert plain.startswith(prefix + continued.content[0].text[:5])


def test_clients_raise_their_exceptions_for_errors(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="images are not supported"):
        create(client, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}])
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        create(client, model="claude")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        create(client, messages=[{"role": "user", "content": "long " * 5000}])
    with pytest.raises(anthropic.BadRequestError, match="schema"):
        bad = {"name": "bad", "input_schema": {"type": "strange"}}
        create(client, tools=[bad], tool_choice={"type": "any"})


def test_an_unknown_field_is_counted_once(tool_api_server: ServerProcess) -> None:
    before = tool_api_server.metric("unknown_fields_total")
    for _ in range(2):
        body = {"messages": [USER], "max_tokens": 1, "strange_field": 1, "metadata": {"user_id": "a"}}
        httpx.post(f"{tool_api_server.address}/v1/messages", json=body).raise_for_status()
    assert tool_api_server.metric("unknown_fields_total") == before + 1


def test_the_routes_are_in_openapi_json() -> None:
    async def get() -> Any:
        transport = httpx.ASGITransport(make_app(loading_state()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get("/openapi.json")).json()

    schemas = asyncio.run(get())["components"]["schemas"]
    assert {"messages", "max_tokens", "stop_sequences"} <= set(schemas["MessagesRequest"]["properties"])
