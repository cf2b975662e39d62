"""Fields that would change the answer are refused by name; values that change nothing are accepted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tcdeploy.server.apis.anthropic.protocol import MESSAGES_INERT_VALUES, MessagesRequest
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest, CompletionRequest, GenerationRequest
from tcdeploy.server.apis.openai.unsupported_fields import (
    ALTERNATIVES,
    CONSTRAINT_INERT_VALUES,
    INERT_VALUES,
    OUR_NAMES,
    SWITCHES,
)
from tcdeploy.server.apis.openai.validation import check_combinations
from tcdeploy.server.apis.responses.protocol import RESPONSES_INERT_VALUES, ResponsesRequest
from tcdeploy.server.apis.responses.routes import to_chat_request
from tcdeploy.server.http.json_steps import JsonLimits
from tcdeploy.server.http.request_parsing import LargeBodyParser, parse
from tcdeploy.server.output.structured.output_constraint import OutputConstraint


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "Hi", **fields}).encode())


def refusal(request: GenerationRequest) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as rejection:
        check_combinations(request)
    assert (rejection.value.status, rejection.value.code) == (400, "unsupported_parameter")
    return rejection.value.param, rejection.value.message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("grammar", "root ::= [0-9]+", "grammar is not supported; use response_format or structured_outputs"),
        ("mirostat", 2, "mirostat is not supported"), ("mirostat_tau", 3.0, "mirostat_tau is not supported"),
        ("dry_multiplier", 0.8, "dry_multiplier is not supported"), ("dry_base", 2, "dry_base is not supported"),
        ("xtc_probability", 0.5, "xtc_probability is not supported"), ("typical_p", 0.9, "typical_p is not supported"),
        ("n_probs", 3, "n_probs is not supported; use logprobs"), ("samplers", ["top_k"], "samplers is not supported"),
        ("use_beam_search", True, "use_beam_search is not supported"), ("best_of", 2, "best_of is not supported"),
        ("length_penalty", 0.5, "length_penalty is not supported"), ("top_a", 0.1, "top_a is not supported"),
        ("structured_outputs", {"structural_tag": "{}"}, "structured_outputs.structural_tag is not supported"),
        ("structured_outputs", {"regex": "a", "whitespace_pattern": " "},
         "structured_outputs.whitespace_pattern is not supported"),
        ("structured_outputs", {"regex": "a", "lark": "a"}, "structured_outputs.lark is not supported"),
        ("guided_decoding_backend", "outlines", "guided_decoding_backend is not supported"),
        ("guided_whitespace_pattern", " ", "guided_whitespace_pattern is not supported"),
        ("structural_tag", "{}", "structural_tag is not supported"),
        ("n_predict", 5, "n_predict is not supported; use max_tokens"),
        ("repeat_penalty", 1.1, "repeat_penalty is not supported; use repetition_penalty"),
        ("enable_thinking", False, "enable_thinking is not supported; send it in chat_template_kwargs"),
        ("extra_body", {"top_k": 1}, "extra_body is not supported; send its fields beside the others"),
    ],
)  # fmt: skip
def test_a_field_that_would_change_the_answer_is_refused_by_name(field: str, value: Any, message: str) -> None:
    for make in (chat, completion):
        assert refusal(make(**{field: value})) == (field, message)


@pytest.mark.parametrize("make", [chat, completion])
def test_null_and_every_value_that_changes_nothing_are_accepted_and_others_are_not(make: Any) -> None:
    unknown = [name for name in INERT_VALUES if name not in make().__class__.model_fields]
    assert len(unknown) > 90
    for name in unknown:
        check_combinations(make(**{name: None}))
        for value in INERT_VALUES[name]:
            check_combinations(make(**{name: value}))
        assert refusal(make(**{name: {"another": "value"}}))[0] == name


SCHEMA = {"type": "boolean"}
USER = {"role": "user", "content": "a"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "json_object", "response_schema": SCHEMA}}, "response_format",
         "response_schema is not supported; use the type json_schema"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format", "schema is not supported"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, "response_format",
         "json_schema is not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": {}}},
         "response_format", "schema is not supported"),
        ({"response_format": {"type": "json_object", "regex": "a"}}, "response_format", "use structured_outputs"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "include_obfuscation"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools", "defer_loading is not supported"),
        ({"tools": [TOOL], "tool_choice": {**NAMED, "disable_parallel_tool_use": True}}, "tool_choice",
         "disable_parallel_tool_use is not supported; use parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages",
         "prefix is not supported; use continue_final_message"),
        ({"messages": [{"role": "user", "content": "a", "images": ["b"]}]}, "messages", "images is not supported"),
    ],
    ids=str,
)  # fmt: skip
def test_an_unsupported_field_inside_of_another_is_refused_by_name(
    fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ApiError) as rejection:
        chat(**fields)
    error = rejection.value
    assert (error.status, error.param, error.code) == (400, param, "unsupported_parameter") and message in error.message


def test_null_and_unknown_fields_inside_of_others_are_accepted_and_collected() -> None:
    request = chat(
        response_format={"type": "text", "schema": None, "x1": 1},
        tools=[{**TOOL, "cache_control": {}, "x2": 1}], stream=True,
        stream_options={"include_usage": None, "continuous_usage_stats": None, "include_obfuscation": False, "x3": 1},
        messages=[
            {"role": "user", "name": "n", "prefix": False, "content": [{"type": "text", "text": "a", "x4": 1}]},
            {"role": "assistant", "tool_calls": [{"type": None, "function": {"name": "f", "arguments": ""}}]},
        ],
    )  # fmt: skip
    check_combinations(request)
    assert request._unknown_nested == {"response_format.x1", "tools.x2", "stream_options.x3", "messages.content.x4"}
    assert request.usable_tools == [TOOL], "an unknown field of a tool is not part of the prompt"
    assert request.messages[0].for_template()["name"] == "n", "the template gets the other fields of a message"


def test_unknown_fields_of_large_bodies_are_collected_too() -> None:
    part = {"type": "text", "text": "a" * 100, "x": 1}
    body = {"messages": [{"role": "user", "content": [part] * 300}] * 3, "stream_options": {"y": 1}, "stream": True}
    request = asyncio.run(
        LargeBodyParser().parse(ChatRequest, json.dumps(body).encode(), JsonLimits(string_chars=1000, integers=10))
    )
    assert request._unknown_nested == {"messages.content.x", "stream_options.y"}


@pytest.mark.parametrize(
    ("request_type", "fields", "unknown"),
    [
        (ResponsesRequest, {"input": [{"type": None, "role": "user", "content": "a", "id": "i", "x": 1}]}, "input.x"),
        (ResponsesRequest, {"input": "a", "text": {"x": 1}}, "text.x"),
        (ResponsesRequest, {"input": "a", "tools": [{**FUNCTION, "type": "function", "x": 1}]}, "tools.x"),
        (MessagesRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
         "messages.content.x"),
        (MessagesRequest,
         {"messages": [USER], "tools": [{"name": "f", "input_schema": {}, "cache_control": {}, "x": 1}]}, "tools.x"),
        (MessagesRequest, {"messages": [USER], "thinking": {"type": "disabled", "x": 1}}, "thinking.x"),
    ],
    ids=str,
)  # fmt: skip
def test_unknown_fields_inside_of_others_are_collected_in_the_other_apis(
    request_type: Any, fields: dict[str, Any], unknown: str
) -> None:
    request = parse(request_type, json.dumps({"max_tokens": 1, **fields}).encode())
    assert request._unknown_nested == {unknown}


def test_unsupported_fields_inside_of_others_are_refused_in_the_other_apis() -> None:
    bodies: list[tuple[Any, dict[str, Any]]] = [
        (MessagesRequest, {"messages": [USER], "max_tokens": 1, "output_config": {"task_budget": {"type": "tokens"}}}),
        (ResponsesRequest, {"input": "a", "text": {"format": {"type": "text", "schema": SCHEMA}}}),
    ]
    for request_type, fields in bodies:
        with pytest.raises(ApiError, match="is not supported") as rejection:
            parse(request_type, json.dumps(fields).encode())
        assert rejection.value.code == "unsupported_parameter"


def test_json_object_with_a_schema_is_constrained_by_it() -> None:
    for schema in (SCHEMA, {}):
        request = chat(response_format={"type": "json_object", "schema": schema})
        assert request.output_constraint == OutputConstraint("json", schema, "response_format")
    plain = chat(response_format={"type": "json_object", "schema": None}).output_constraint
    assert plain == OutputConstraint("json", {"type": "object"}, "response_format")
    body = {"input": "a", "text": {"format": {"type": "json_object", "schema": SCHEMA}}}
    responses_request = parse(ResponsesRequest, json.dumps(body).encode())
    translated = to_chat_request(responses_request, [])
    assert translated.output_constraint == OutputConstraint("json", SCHEMA, "response_format")


def test_a_client_may_send_all_sliders_turned_off() -> None:
    check_combinations(
        completion(
            mirostat=0, mirostat_tau=3, mirostat_eta=1, dry_multiplier=0.0, dry_base=3, dry_allowed_length=9,
            dry_sequence_breakers=["a"], dry_penalty_last_n=64, xtc_probability=0, xtc_threshold=0.3,
            repeat_penalty=1.0, repeat_last_n=64, do_sample=False, temperature=0, dynatemp_range=0, dynatemp_exponent=2,
            typical_p=1.0, tfs_z=1, top_a=0, top_n_sigma=-1, use_beam_search=False, length_penalty=2.0, n_predict=7,
            max_new_tokens=7, max_tokens=7,
        )
    )  # fmt: skip
    assert refusal(completion(mirostat=1, mirostat_tau=3))[0] == "mirostat"
    assert refusal(completion(dry_base=3, dry_multiplier=0.5))[0] in ("dry_base", "dry_multiplier")
    assert refusal(completion(n_predict=8, max_tokens=7))[0] == "n_predict"
    check_combinations(chat(n_predict=8, max_completion_tokens=8))
    assert refusal(completion(do_sample=False))[0] == "do_sample"


def test_the_tables_agree_with_each_other_and_with_the_schemas() -> None:
    assert {*SWITCHES, *SWITCHES.values(), *OUR_NAMES} <= INERT_VALUES.keys()
    other_apis = {*CONSTRAINT_INERT_VALUES, "output_format"}
    assert ALTERNATIVES.keys() - other_apis <= INERT_VALUES.keys()
    assert (
        other_apis <= MESSAGES_INERT_VALUES.keys() and CONSTRAINT_INERT_VALUES.keys() <= RESPONSES_INERT_VALUES.keys()
    )
    assert CONSTRAINT_INERT_VALUES.keys() <= ChatRequest.model_fields.keys()
    supported = ChatRequest.model_fields.keys() & CompletionRequest.model_fields.keys()
    assert not supported & INERT_VALUES.keys(), "a supported field is listed as unsupported"
