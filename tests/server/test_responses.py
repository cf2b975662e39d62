"""OpenAI's Responses API: translation to a chat request, the events, stored responses, and OpenAI's Python client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import EngineDeadError
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest, Message
from tcdeploy.server.apis.openai.unsupported_fields import rename_error
from tcdeploy.server.apis.openai.validation import check_combinations
from tcdeploy.server.apis.responses.answer import ResponsesAnswer
from tcdeploy.server.apis.responses.protocol import RESPONSES_INERT_VALUES, ResponsesRequest
from tcdeploy.server.apis.responses.routes import RESPONSES, answer_messages, new_messages, to_chat_request
from tcdeploy.server.apis.responses.store import ResponseStore, StoredResponse, memory_of
from tcdeploy.server.generate.admission import Admission
from tcdeploy.server.generate.choice import Delta
from tcdeploy.server.generate.generation import sse_events
from tcdeploy.server.http.json_steps import JsonLimits
from tcdeploy.server.http.request_parsing import LargeBodyParser, parse
from tcdeploy.server.service import ServerState
from tcdeploy.server.settings import ServerSettings
from tcdeploy.text.template_form import RefusedMessageError, TemplateForm
from tests.conftest import TINY
from tests.server.conftest import ServerProcess
from tests.server.test_api import fake_engine_thread, loading_state, send_request
from tests.server.test_messages import OUTPUTS, events_of, fake_active
from tests.server.test_tools import CLOCK, WEATHER, load, make_model

QUESTION = "What is a list?"
USER = {"role": "user", "content": QUESTION}
TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]  # type: ignore[dict-item]
CALL = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": '{"utc": true}', "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}


def responses_request(**fields: Any) -> ResponsesRequest:
    return parse(ResponsesRequest, json.dumps({"input": QUESTION, **fields}).encode())


def ready_state(*keys: str) -> ServerState:
    """A state that the translation can use. It has no model."""
    admission = Admission(1)
    admission.open(1)
    return ServerState(ServerSettings(model="tiny", api_keys=keys), fake_engine_thread(), admission)


def chat_request(state: ServerState | None = None, **fields: Any) -> ChatRequest:
    """The chat request that `fields` are translated to, as the route does it."""
    request = SimpleNamespace(headers={})

    async def translate() -> Any:
        return await RESPONSES.translate(state or ready_state(), request, responses_request(**fields))  # type: ignore[arg-type]

    chat = asyncio.run(translate()).request
    try:
        check_combinations(chat)
    except ApiError as error:
        raise rename_error(error, RESPONSES.field_names) from None
    return chat


def template_messages(*items: Any, **fields: Any) -> list[Any]:
    """The messages that a template gets, in the form that most templates expect."""
    conversation = [message.for_template() for message in chat_request(input=list(items), **fields).messages]
    return [message.fields for message in TemplateForm().messages(conversation)]


# Translation


def test_items_become_messages_of_a_chat() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    text = {"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
    called = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": {"utc": True}}}
    assert template_messages(
        {"role": "developer", "content": "Be kind."}, {"role": "system", "content": "Be fair."}, USER,
        reasoning, message, CALL,
        {**RESULT, "output": [{"type": "input_text", "text": "noon"}]}, {**message, "content": "It is noon."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("A", "nd?")]},
        instructions="Be brief.",
    ) == [
        {"role": "system", "content": "Be brief.\n\nBe kind.\n\nBe fair."}, USER,
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "name": "clock", "content": "noon"},
        {"role": "assistant", "content": "It is noon."}, {"role": "user", "content": "A\nnd?"},
    ]  # fmt: skip
    assert template_messages(CALL, {**message, "content": "Then."}) == [
        {"role": "assistant", "content": "", "tool_calls": [called]}, {"role": "assistant", "content": "Then."},
    ]  # fmt: skip


def test_parameters_are_translated() -> None:
    request = chat_request(
        max_output_tokens=7, temperature=0.5, top_p=0.9, seed=4, stop="a", tools=TOOLS, parallel_tool_calls=False,
        tool_choice={"type": "function", "name": "clock"}, reasoning={"effort": "low", "summary": "auto"}, stream=True,
        metadata={"a": "b"}, include=["reasoning.encrypted_content"], truncation="disabled", prompt_cache_key="k",
        stream_options={"include_obfuscation": False},
    )  # fmt: skip
    assert (request.temperature, request.top_p, request.seed, request.max_new_tokens) == (0.5, 0.9, 4, 7)
    assert (request.stop_strings, request.stream, request.parallel_tool_calls) == (("a",), True, False)
    assert request.forced_tools == [CLOCK] and request.usable_tools == [WEATHER, CLOCK]
    assert request.reasoning_effort == "low"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text_format = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    for output_format, expected in ((text_format, schema), ({"type": "json_object"}, {"type": "object"})):
        constraint = chat_request(text={"format": output_format}).output_constraint
        assert constraint is not None and (constraint.kind, constraint.value) == ("json", expected)
    assert chat_request(text={"format": {"type": "text"}, "verbosity": "medium"}).output_constraint is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        *(({name: {"another": "value"}}, name, f"{name} is not supported") for name in (
            "background", "conversation", "prompt", "truncation", "max_tool_calls", "context_management", "moderation",
        )),
        ({"max_tokens": 5}, "max_tokens", "max_tokens is not supported; use max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "use text.format"),
        ({"grammar": "root ::= a"}, "grammar", "grammar is not supported; use text.format"),
        ({"n_predict": 5}, "n_predict", "n_predict is not supported; use max_output_tokens"),
        ({"include": ["message.output_text.logprobs"]}, "include", "include 'message.output_text.logprobs' is not"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "is not supported"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "is not supported"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "is not supported"),
        ({"metadata": {str(number): "a" for number in range(17)}}, "metadata", "there are 17 entries; the limit is 16"),
        ({"metadata": {"a": "a" * (1 << 19)}}, "metadata", "metadata has 524289 characters"),
        (
            {"tools": [{**TOOLS[0], "parameters": {"type": "a" * (1 << 20)}}], "tool_choice": "none"},
            "tools", "characters; the limit is",
        ),
        ({"tools": [{**TOOLS[0], "parameters": {"minimum": float("nan")}}]}, "tools", "a number that JSON does not"),
        ({"max_output_tokens": "5"}, "max_output_tokens", "valid integer"), ({"input": 5}, "input", "valid list"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "references to items are not supported"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0]", "items of the type 'web_search_call' are"),
        (
            {"input": [USER, {**USER, "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}]},
            "input[1].content[1]", "images are not supported",
        ),
        ({"input": [{**RESULT, "output": [{"type": "input_file"}]}]}, "input[0].output[0]", "files are not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "tools of the type 'web_search' are not supported"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading", "defer_loading is not supported"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "that is not in tools"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "send the request to /v1/chat/completions"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "tool_choice"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "Previous response with id 'resp_x' not found."),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_what_is_not_supported_or_invalid_is_refused_by_name(fields: Any, param: str, message: str) -> None:
    with pytest.raises(ApiError) as rejection:
        chat_request(**fields)
    error = rejection.value
    assert (error.status, error.param) == (404 if "not found" in message else 400, param)
    assert message in error.message
    assert error.status == 400 or error.code == "previous_response_not_found"


def test_arguments_of_a_call_that_are_not_an_object_are_refused() -> None:
    with pytest.raises(RefusedMessageError, match="the arguments of the call of clock are not a JSON object"):
        template_messages(USER, {**CALL, "arguments": "[1]"})


def test_supported_fields_are_not_listed_as_unsupported() -> None:
    for name, values in RESPONSES_INERT_VALUES.items():
        if name not in ResponsesRequest.model_fields:
            for value in (None, *values):
                chat_request(**{name: value})


def test_a_large_request_is_validated_in_slices_with_the_same_result() -> None:
    items = [USER, CALL, RESULT] * 300
    limits = JsonLimits(1 << 20, 1 << 17)

    def parse_large(fields: Any) -> Any:
        return asyncio.run(LargeBodyParser().parse(ResponsesRequest, json.dumps(fields).encode(), limits))

    assert parse_large({"input": items}) == responses_request(input=items)
    assert parse_large({"input": "x" * 20_000}) == responses_request(input="x" * 20_000)
    image = {"type": "input_image", "image_url": "A" * (1 << 21)}
    with pytest.raises(ApiError, match="images are not supported") as rejection:
        parse_large({"input": [{"role": "user", "content": [image]}]})
    assert rejection.value.param == "input[0].content[0]"
    with pytest.raises(ApiError, match="items of the type 'x' are not supported") as rejection:
        parse_large({"input": [*items, {"type": "x"}]})
    assert rejection.value.param == "input[900]"


# Events


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_model(tmp_path_factory.mktemp("tokenizer") / "tools"))


def fake_answer(
    tokenizer: Any, text: str, reason: str, batch_size: int, stored: list[Any] | None = None
) -> ResponsesAnswer:
    active = fake_active(tokenizer, text, reason, batch_size, ("HALT",))
    active.group = SimpleNamespace(engine_requests=[SimpleNamespace(params=SamplingParams())])
    stored = [] if stored is None else stored
    return ResponsesAnswer(active, responses_request(), "resp_1", lambda *parts: stored.append(parts))


def output_of(events: list[Any]) -> list[Any]:
    """The output items that the events build, as OpenAI's documentation says."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[Any] = []
    done = 0
    for event in events[2:-1]:
        assert event["output_index"] == len(items) - (event["type"] != "response.output_item.added")
        kind = event["type"].removeprefix("response.")
        assert "item_id" not in event or event["item_id"] == items[-1]["id"]
        if kind == "output_item.added":
            assert done == len(items), "the previous item is done"
            items.append(event["item"])
        elif kind == "content_part.added":
            items[-1]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[-1]["content"][0]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert items[-1]["content"][0]["text"] == event["text"]
        elif kind == "content_part.done":
            assert items[-1]["content"][0] == event["part"]
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert items[-1]["arguments"] == event["arguments"]
        else:
            assert kind == "output_item.done"
            done += 1
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
    assert done == len(items)
    return items


KINDS = {"text": "message", "thinking": "reasoning", "tool_use": "function_call"}


def without_ids(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_events_build_the_whole_response_however_many_tokens_an_event_covers(tokenizer: Any, name: str) -> None:
    text, reason, kinds, stop_reason = OUTPUTS[name]
    stored: list[Any] = []
    whole = json.loads(asyncio.run(fake_answer(tokenizer, text, reason, 1000, stored).body()))
    assert [item["type"] for item in whole["output"]] == ([KINDS[kind] for kind in kinds] or ["message"])
    is_cut = stop_reason == "max_tokens"
    assert whole["status"] == ("incomplete" if is_cut else "completed")
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    assert whole["output"][-1]["status"] == whole["status"] and json.loads(stored[0][0]) == whole
    usage = whole["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 4 and usage["input_tokens"] == 9
    num_thought = usage["output_tokens_details"]["reasoning_tokens"]
    assert (num_thought > 3) == ("thinking" in kinds) and num_thought < usage["output_tokens"]
    for batch_size in (1, 3, 1000):
        events = events_of(fake_answer(tokenizer, text, reason, batch_size, stored))
        last = events[-1]
        assert last["type"] == f"response.{whole['status']}" and json.loads(stored[-1][0]) == last["response"]
        assert output_of(events) == last["response"]["output"]
        assert without_ids(last["response"]["output"]) == without_ids(whole["output"])
        assert last["response"]["usage"] == usage
        assert stored[-1][1] == last["response"]["output"]


def test_an_error_inside_a_stream_is_an_event_and_a_failed_response(tokenizer: Any) -> None:
    stored: list[Any] = []
    answer = fake_answer(tokenizer, "It is a sequence", "stop", 1, stored)
    deltas = answer.active.deltas

    async def failing_deltas(timeout_s: float) -> AsyncIterator[dict[int, Delta]]:
        async for new in deltas(timeout_s):
            yield new
            raise EngineDeadError("out of memory")

    async def run() -> bytes:
        answer.active.deltas = failing_deltas  # type: ignore[method-assign, assignment]
        return b"".join([event async for event in sse_events(answer)])

    *_, error, failed, end = asyncio.run(run()).decode().split("\n\n")
    content = json.loads(error.removeprefix("event: error\ndata: "))
    assert (content["type"], content["message"], content["code"]) == ("error", "out of memory", "engine_died")
    response = json.loads(failed.removeprefix("event: response.failed\ndata: "))["response"]
    assert response["error"] == {"code": "server_error", "message": "out of memory"}
    assert response["status"] == "failed" and response["output"][0]["content"][0]["text"] == "It"
    assert end == "" and not stored


# Stored responses


def stored_response(num_bytes: int = 100, api_key: str = "", *messages: Message) -> StoredResponse:
    return StoredResponse(b"{}", list(messages), num_bytes, api_key)


def test_the_least_recently_used_responses_are_dropped() -> None:
    store = ResponseStore(max_responses=3, max_bytes=1000)
    for name in "abc":
        store.put(name, stored_response())
    assert store.get("a", "") is not None
    store.put("d", stored_response())
    assert [name for name in "abcd" if store.get(name, "")] == ["a", "c", "d"] and store.num_bytes == 300
    store.put("e", stored_response(900))
    assert [name for name in "abcde" if store.get(name, "")] == ["d", "e"] and store.num_bytes == 1000
    store.put("f", stored_response(1001))
    assert store.get("f", "") is None and len(store) == 2
    assert store.delete("d", "") and not store.delete("d", "") and store.num_bytes == 900


def test_a_response_belongs_to_its_key() -> None:
    state = ready_state("one", "two")
    state.stored_responses.put("resp_1", stored_response(100, "one"))

    def send(method: str, key: str) -> httpx.Response:
        return send_request(state, method, "/v1/responses/resp_1", None, authorization=f"Bearer {key}")

    missing = {
        "message": "Response with id 'resp_1' not found.",
        "type": "not_found_error",
        "param": None,
        "code": None,
    }
    for method in ("GET", "DELETE"):
        assert (send(method, "two").status_code, send(method, "two").json()["error"]) == (404, missing)
    body = {"input": "And?", "previous_response_id": "resp_1"}
    response = send_request(state, "POST", "/v1/responses", body, authorization="Bearer two")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "previous_response_not_found")
    assert send("GET", "one").json() == {}
    assert send("DELETE", "one").json() == {"id": "resp_1", "object": "response", "deleted": True}
    assert send("GET", "one").status_code == 404


def test_a_retrieval_that_would_be_streamed_is_refused() -> None:
    response = send_request(ready_state(), "GET", "/v1/responses/resp_1?stream=true", None)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")


def test_a_conversation_continues_without_the_earlier_instructions() -> None:
    state = ready_state()
    output = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "content": [{"type": "output_text", "text": "A sequence."}]},
        {**CALL, "status": "incomplete", "arguments": "{"},
    ]
    messages = [*chat_request(input=[USER]).messages, *answer_messages(output)]
    state.stored_responses.put("resp_1", stored_response(100, "", *messages))
    request = chat_request(state, input="And?", previous_response_id="resp_1", instructions="Be kind.")
    assert [message.for_template() for message in request.messages] == [
        {"role": "system", "content": "Be kind."}, USER,
        {"role": "assistant", "content": "A sequence.", "reasoning_content": "Hm."},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    state.stored_responses.put("resp_2", stored_response(100, "", *messages * 2000))
    with pytest.raises(ApiError, match="the conversation has 4097 messages; the limit is 4096"):
        chat_request(state, input=[USER] * 97, previous_response_id="resp_2")
    loading = loading_state()
    response = send_request(loading, "POST", "/v1/responses", {"input": "a", "previous_response_id": "resp_1"})
    assert response.status_code == 503


def test_a_continued_response_does_not_count_the_json_of_earlier_ones(tokenizer: Any) -> None:
    """The JSON repeats the tools, so a conversation with many turns would fill the store alone."""
    state, request = ready_state(), SimpleNamespace(headers={})
    state.stored_responses.put("resp_1", StoredResponse(b"x" * 50_000, [], 50_100, ""))

    async def answer() -> None:
        body = responses_request(previous_response_id="resp_1")
        exchange = await RESPONSES.translate(state, request, body)  # type: ignore[arg-type]
        active = fake_active(tokenizer, "It is.<|end|>", "stop", 1)
        active.group = SimpleNamespace(engine_requests=[SimpleNamespace(params=SamplingParams())])
        await exchange.new_answer(active).body()

    asyncio.run(answer())
    assert len(state.stored_responses) == 2 and 50_100 < state.stored_responses.num_bytes < 60_000


def test_the_memory_of_messages_is_not_underestimated() -> None:
    import tracemalloc

    body = responses_request(input=[{"role": "user", "content": "é" * 1000}, CALL, RESULT] * 300)
    tracemalloc.start()
    messages = asyncio.run(new_messages(body, []))
    texts = sum(len(message.content or "") for message in messages)
    used = tracemalloc.get_traced_memory()[0] + texts  # the texts existed before
    tracemalloc.stop()
    assert used < memory_of(messages) < 5 * used


# Robustness


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.sampled_from(["message", "user", "assistant", "function_call", "reasoning", "input_image", "auto", "clock"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "call_id", "name", "output"]), inner),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*ResponsesRequest.model_fields, "x"]), JSON_VALUES), JSON_VALUES)
def test_no_body_causes_another_error_than_400_or_404(fields: dict[str, Any], item: Any) -> None:
    try:
        request = parse(ResponsesRequest, json.dumps({"input": [item], **fields}).encode())
        chat = to_chat_request(request, asyncio.run(new_messages(request, [])))
        check_combinations(chat)
        TemplateForm().messages([message.for_template() for message in chat.messages])
    except ApiError as error:
        assert error.status == 400
    except RefusedMessageError as error:
        assert error.field == "tool_calls"


# With OpenAI's client


@pytest.fixture(scope="module")
def client(tool_api_server: ServerProcess) -> openai.OpenAI:
    return tool_api_server.client


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(
        **{"model": TINY, "input": QUESTION, "max_output_tokens": 120, "temperature": 0, **fields}
    )


def test_a_streamed_response_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = create(client, instructions="Be brief.", metadata={"a": "b"})
    assert whole.output_text and (whole.status, whole.metadata) == ("completed", {"a": "b"})
    arguments: Any = {"input": QUESTION, "instructions": "Be brief.", "max_output_tokens": 120, "temperature": 0}
    with client.responses.stream(model=TINY, **arguments) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text and final.usage and whole.usage
    assert final.usage.output_tokens == whole.usage.output_tokens
    cut = create(client, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_function_is_called_and_its_result_is_read(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = create(client, **fields)
    [call] = whole.output
    arguments: Any = {"input": QUESTION, "max_output_tokens": 120, "temperature": 0, **fields}
    with client.responses.stream(model=TINY, **arguments) as stream:
        [streamed] = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    stateless = create(client, input=[USER, *whole.output, result], tools=TOOLS, max_output_tokens=8)
    stored = create(client, input=[result], previous_response_id=whole.id, tools=TOOLS, max_output_tokens=8)
    assert stored.output_text == stateless.output_text and stored.output_text
    assert stored.usage.input_tokens == stateless.usage.input_tokens
    assert stored.previous_response_id == whole.id
    assert [item.name for item in create(client, tools=TOOLS, tool_choice=TOOLS[1]).output] == ["clock"]


class Answer(BaseModel):
    is_true: bool
    digit: Literal[1, 2]


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model=TINY, input=QUESTION, text_format=Answer, max_output_tokens=200, temperature=0
    ).output_parsed
    assert isinstance(parsed, Answer)


def test_responses_are_stored_until_they_are_deleted(client: openai.OpenAI) -> None:
    first = create(client, max_output_tokens=4)
    assert client.responses.retrieve(first.id) == first
    with client.responses.stream(
        model=TINY, input="And?", previous_response_id=first.id, max_output_tokens=20
    ) as stream:
        for event in stream:
            last: Any = event
    assert client.responses.retrieve(last.response.id).output_text == last.response.output_text
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{first.id}' not found"):
            call(first.id)
    with pytest.raises(openai.NotFoundError) as rejection:
        create(client, previous_response_id=first.id)
    assert (rejection.value.code, rejection.value.param) == ("previous_response_not_found", "previous_response_id")
    unstored = create(client, max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_errors_name_the_fields_of_this_api(client: openai.OpenAI) -> None:
    for fields, param in (
        ({"input": "long " * 5000}, "input"), ({"max_output_tokens": 1020}, "max_output_tokens"),
        ({"model": "another"}, "model"), ({"temperature": -1}, "temperature"),
        ({"input": [USER, {**CALL, "arguments": "{"}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "strange"}}}}, "text.format"),
    ):  # fmt: skip
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as rejection:
            create(client, **fields)
        assert rejection.value.param == param


def test_an_unknown_field_is_counted_once(tool_api_server: ServerProcess) -> None:
    before = tool_api_server.metric("unknown_fields_total")
    for _ in range(2):
        body = {"input": QUESTION, "max_output_tokens": 1, "odd_field": 1, "background": False, "user": "a"}
        httpx.post(f"{tool_api_server.address}/v1/responses", json=body).raise_for_status()
    assert tool_api_server.metric("unknown_fields_total") == before + 1
