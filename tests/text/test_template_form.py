"""Conversations are converted to the form that a template expects."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tcdeploy.text.template_form import RefusedMessageError, TemplateForm, message_kind

USER = {"role": "user", "content": "Hello"}
ARGUMENTS = '{"city":"Rome","n":12345678901234567890}'
CALL = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": ARGUMENTS}}
PARSED_CALL = {**CALL, "function": {"name": "look_up", "arguments": {"city": "Rome", "n": 12345678901234567890}}}


def convert(form: TemplateForm, *conversation: dict[str, Any]) -> list[dict[str, Any]]:
    before = copy.deepcopy(conversation)
    converted = [message.fields for message in form.messages(conversation)]
    assert conversation == before, "the given messages must not change"
    return converted


def test_the_default_form_has_texts_objects_and_no_nulls() -> None:
    assert convert(
        TemplateForm(), {"role": "developer", "content": "Be brief", "name": None}, USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "call00001", "content": "sunny"}, {"role": "assistant", "content": None},
    ) == [
        {"role": "system", "content": "Be brief"}, USER,
        {"role": "assistant", "content": "", "tool_calls": [PARSED_CALL], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "sunny"},
        {"role": "assistant", "content": ""},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call_content", "fields"),
    [("empty", {"content": ""}), ("null", {"content": None}), ("omitted", {})],
)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_the_content_beside_calls_is_empty_null_or_omitted(
    call_content: Any, fields: dict[str, Any], content: dict[str, Any]
) -> None:
    form = TemplateForm(call_content=call_content, arguments="json")
    expected = {"role": "assistant", **fields, "tool_calls": [CALL]}
    assert convert(form, {"role": "assistant", **content, "tool_calls": [CALL]}) == [expected]


def test_text_beside_calls_becomes_a_message_if_the_template_renders_only_one_of_them() -> None:
    message = {"role": "assistant", "content": "Let me see", "tool_calls": [CALL], "reasoning_content": "Hm"}
    form = TemplateForm(splits_calls=True, call_content="null", arguments="json")
    assert convert(form, message) == [
        {"role": "assistant", "content": "Let me see", "reasoning_content": "Hm"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    [kept] = convert(TemplateForm(call_content="null", arguments="json"), message)
    assert kept == message


def test_parts_have_the_text_of_the_message() -> None:
    form = TemplateForm(part_roles=frozenset({"user", "system"}))
    system = {"role": "developer", "content": "Be brief"}
    assert convert(form, system, USER, {"role": "assistant", "content": "Hi"}, {"role": "critic", "content": ""}) == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]}, {"role": "assistant", "content": "Hi"},
        {"role": "critic", "content": []},
    ]  # fmt: skip


def test_arguments_are_the_clients_text_or_an_equal_object() -> None:
    for arguments in (ARGUMENTS, {"city": "Z\u00fcrich"}, "", {}):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        [text] = convert(TemplateForm(arguments="json"), message)
        expected = {"": "{}", ARGUMENTS: ARGUMENTS}.get(arguments) if isinstance(arguments, str) else None
        assert text["tool_calls"][0]["function"]["arguments"] == (
            expected or ('{"city": "Z\u00fcrich"}' if arguments else "{}")
        )
    for arguments in ("[1]", "{", "[" * 100_000, "null"):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        for form in (TemplateForm(), TemplateForm(arguments="json")):
            with pytest.raises(RefusedMessageError, match="the arguments of the call of f are not a") as refusal:
                form.messages([USER, message])
            assert (refusal.value.number, refusal.value.field) == (1, "tool_calls")


def test_a_function_call_and_its_result_become_a_tool_call_and_its_result() -> None:
    legacy = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    function = {"role": "function", "name": "look_up", "content": "sunny"}
    assert convert(TemplateForm(arguments="json"), USER, legacy, function) == [
        USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "sunny"},
    ]  # fmt: skip
    assert [message_kind(message) for message in (USER, legacy, function)] == ["user", "tool call", "tool result"]


def test_adjacent_instructions_are_merged_if_the_template_renders_only_one() -> None:
    messages = [{"role": role, "content": role} for role in ("developer", "system", "user", "system", "assistant")]
    form = TemplateForm(merges_instructions=True, developer_role="developer")
    merged = form.messages(messages)
    assert [(message.number, message.fields["role"], message.fields["content"]) for message in merged] == [
        (0, "developer", "developer\n\nsystem"), (2, "user", "user"), (3, "system", "system"),
        (4, "assistant", "assistant"),
    ]  # fmt: skip
    assert len(TemplateForm().messages(messages)) == 5
