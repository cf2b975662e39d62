"""The form in which a chat template expects messages, and the conversion of a conversation to it.

Chat templates agree on `role` and `content`, and on little else. Some iterate over content parts, and print nothing for
a string. Some test `content is none` before they print tool calls. Some concatenate a call's arguments, which fails for
an object, and others iterate over them, which fails for JSON text. A template that does not know a role usually prints
nothing for it. So one normal form for all templates loses messages without an error. template_probe.py finds the form
of each template; `TemplateForm.messages` converts a conversation in OpenAI's format to it.

`render_outline` tests whether each message of a conversation reaches the prompt. The text of a message cannot be
searched in the prompt: templates strip it, escape it as JSON, or drop earlier reasoning from it. Instead, the template
renders an outline of the conversation: the same messages, with each text, the name of each call and each argument
replaced by a short mark. This takes linear time, because an outline has few characters and is searched once. The test
misses a template that leaves out a message because of words in its text, other than the end of reasoning.

Does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

from tcdeploy.errors import ModelError

Arguments = Literal["object", "json"]
CallContent = Literal["empty", "null", "omitted"]
INSTRUCTION_ROLES = ("system", "developer")
MARK_PATTERN = re.compile(r"tcdmark(\d+)end", re.IGNORECASE)  # templates may change the case of a text
REASONING_END = "</think>"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
MESSAGE_SEPARATOR = "\n\n"  # between the texts of messages that are merged


class RefusedMessageError(ModelError):
    """A message that cannot be rendered. `number`: its index in the conversation; `field`: of the message."""

    def __init__(self, number: int, field: str, message: str) -> None:
        super().__init__(message, "remove it, or use another chat template")
        self.number, self.field = number, field


class TemplateMessage(NamedTuple):
    """A message as the template gets it. `number`: the index of the message in the conversation that it comes from."""

    number: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class TemplateForm:
    """How one chat template expects messages. The defaults are used if a template cannot be probed.

    system_role, developer_role: the roles with which system and developer messages are rendered.
    part_roles: those of user, assistant, tool and system (all others) whose content is a list of parts.
    call_content: the content of an assistant message that has tool calls and no text: empty, null, or no such field.
    arguments: of tool calls: an object, or JSON text.
    merges_instructions: adjacent system and developer messages become one.
    splits_calls: text and tool calls of an assistant message become two messages.
    renders_tools: whether the prompt contains `tools`.
    unrendered: kinds of messages (`message_kind`) that appeared in no prompt of the probe.
    """

    system_role: str = "system"
    developer_role: str = "system"
    part_roles: frozenset[str] = frozenset()
    call_content: CallContent = "empty"
    arguments: Arguments = "object"
    merges_instructions: bool = False
    splits_calls: bool = False
    renders_tools: bool = False
    unrendered: frozenset[str] = frozenset()

    def messages(self, conversation: Sequence[dict[str, Any]]) -> list[TemplateMessage]:
        """The conversation in this form. The given messages are not changed.

        Their content is a text or None, the arguments of calls are JSON text or an object. Raises RefusedMessageError
        for arguments that are not a JSON object.
        """
        current = _without_legacy_fields(conversation)
        if self.merges_instructions:
            current = _merge_instructions(current)
        return [TemplateMessage(message.number, fields) for message in current for fields in self._convert(message)]

    def _convert(self, message: TemplateMessage) -> Iterator[dict[str, Any]]:
        role = message.fields["role"]
        role = {"system": self.system_role, "developer": self.developer_role}.get(role, role)
        fields = {**message.fields, "role": role}
        text = fields.pop("content", "")
        calls = [self._convert_call(message.number, call) for call in fields.pop("tool_calls", ())]
        if not calls:
            yield {**fields, "content": self._content(role, text)}
        elif text.strip() and not self.splits_calls:
            yield {**fields, "content": self._content(role, text), "tool_calls": calls}
        else:
            if text.strip():
                yield {**fields, "content": self._content(role, text)}
                fields, text = {"role": role}, ""
            yield {**fields, **self._empty_content(role, text), "tool_calls": calls}

    def _content(self, role: str, text: str) -> Any:
        if (role if role in ("user", "assistant", "tool") else "system") not in self.part_roles:
            return text
        return [{"type": "text", "text": text}] if text else []

    def _empty_content(self, role: str, blanks: str) -> dict[str, Any]:
        if self.call_content == "empty":
            return {"content": self._content(role, blanks)}
        return {"content": None} if self.call_content == "null" else {}

    def _convert_call(self, number: int, call: dict[str, Any]) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"] or "{}"
        parsed = arguments if isinstance(arguments, dict) else _parse_object(arguments)
        if parsed is None:
            message = f"the arguments of the call of {name:.80} are not a JSON object"
            raise RefusedMessageError(number, "tool_calls", message)
        if self.arguments == "object":
            arguments = parsed
        elif isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {"name": name, "arguments": arguments}}


def message_kind(message: dict[str, Any]) -> str:
    """The kind of a message in OpenAI's format: its role, "tool call" or "tool result"."""
    if message.get("tool_calls") or message.get("function_call"):
        return "tool call"
    return "tool result" if message["role"] in ("tool", "function") else str(message["role"])


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _without_legacy_fields(conversation: Iterable[dict[str, Any]]) -> Iterator[TemplateMessage]:
    """The messages without null fields, `function_call` and the role `function`.

    Tool results get the name of their call, because some templates need it. OpenAI's tool messages have only the id.
    """
    names: dict[str, str] = {}  # of called functions, by call id
    last_ids: dict[str, str] = {}  # of the last `function_call` of each function, by its name
    for number, message in enumerate(conversation):
        fields = {name: value for name, value in message.items() if value is not None}
        if legacy_call := fields.pop("function_call", None):
            call_id = f"call{number:05d}"  # Mistral's templates require 9 letters and digits
            last_ids[legacy_call["name"]] = call_id
            call = {"id": call_id, "type": "function", "function": legacy_call}
            fields["tool_calls"] = [*fields.get("tool_calls", ()), call]
        names.update((call["id"], call["function"]["name"]) for call in fields.get("tool_calls", ()) if "id" in call)
        if fields["role"] == "function":
            fields["role"] = "tool"
            if isinstance(name := fields.get("name"), str) and name in last_ids:
                fields["tool_call_id"] = last_ids[name]
        if fields["role"] == "tool" and (called := names.get(fields.get("tool_call_id", ""))):
            fields.setdefault("name", called)
        yield TemplateMessage(number, fields)


def _merge_instructions(messages: Iterable[TemplateMessage]) -> Iterator[TemplateMessage]:
    """The messages, with each run of adjacent system and developer messages as one with the role of the first."""
    for is_instruction, run in groupby(messages, lambda message: message.fields["role"] in INSTRUCTION_ROLES):
        first, *others = run
        if is_instruction and others:
            texts = (message.fields.get("content") for message in (first, *others))
            first.fields["content"], others = MESSAGE_SEPARATOR.join(filter(None, texts)), []
        yield from (first, *others)


class Place(NamedTuple):
    """Where a mark stands: the index of its message in the conversation, and the field of the message."""

    number: int
    field: str


def make_outline(
    messages: Iterable[TemplateMessage], *, marks_names: bool = True
) -> tuple[list[dict[str, Any]], list[Place]]:
    """The outline, and the place of each mark. Reasoning has none, because templates drop that of earlier turns."""
    outline: list[dict[str, Any]] = []
    places: list[Place] = []
    for number, fields in messages:

        def mark(field: str, number: int = number) -> str:
            places.append(Place(number, field))
            return f"tcdmark{len(places) - 1}end"

        marked = {**fields, **{name: "reasoning" for name in REASONING_FIELDS if fields.get(name)}}
        match fields.get("content"):
            case str() as text:
                marked["content"] = _mark_text(text, fields["role"], mark)
            case [{"text": text}]:
                marked["content"] = [{"type": "text", "text": _mark_text(text, fields["role"], mark)}]
        if calls := fields.get("tool_calls"):
            marked["tool_calls"] = [
                {**call, "function": _mark_function(call["function"], mark, marks_names)} for call in calls
            ]
        outline.append(marked)
    return outline, places


def render_outline(
    messages: Sequence[TemplateMessage], render: Callable[[list[dict[str, Any]]], str]
) -> tuple[str, list[Place]]:
    """The text of the outline, and the places of messages that are missing in it. Raises ModelError as `render` does.

    Templates may look up the name of a call in `tools`, so names are kept if the outline with marked names fails.
    """
    outline, places = make_outline(messages)
    try:
        text = render(outline)
    except ModelError:
        if not any(message.fields.get("tool_calls") for message in messages):
            raise
        outline, places = make_outline(messages, marks_names=False)
        text = render(outline)
    rendered_marks = {int(match[1]) for match in MARK_PATTERN.finditer(text)}
    return text, [place for mark, place in enumerate(places) if mark not in rendered_marks]


def _mark_text(text: str, role: str, mark: Callable[[str], str]) -> str:
    """The text with a mark for each part that must be in the prompt.

    Templates split answers at the end of the reasoning, and drop what is before it. The text that is after it, and all
    texts of the other roles, must be kept.
    """
    parts = text.split(REASONING_END)
    num_droppable = len(parts) - 1 if role == "assistant" else 0
    return REASONING_END.join(
        (mark("content") if number >= num_droppable else "reasoning") if part.strip() else part[:1]
        for number, part in enumerate(parts)
    )


def _mark_function(function: dict[str, Any], mark: Callable[[str], str], marks_names: bool) -> dict[str, Any]:
    name = mark("tool_calls") if marks_names else function["name"]
    is_text = isinstance(function["arguments"], str)
    arguments = json.loads(function["arguments"]) if is_text else function["arguments"]
    marked = {key: mark("tool_calls") for key in arguments}
    return {"name": name, "arguments": json.dumps(marked) if is_text else marked}
