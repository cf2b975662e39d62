"""Tests whether each message of a conversation reaches the prompt.

The text of a message cannot be searched in the prompt: templates strip it, escape it as JSON, or drop earlier
reasoning from it. Instead, the template renders an outline of the conversation: the same messages, with each text, the
name of each call and each argument replaced by a short mark. A mark that is missing in the result belongs to a message
that the template leaves out. This takes linear time, because an outline has few characters and is searched once. The
test misses a template that leaves out a message because of words in its text, other than the end of reasoning. Does not
import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tcdeploy.errors import ModelError
from tcdeploy.text.template_form import TemplateMessage

MARK_PATTERN = re.compile(r"tcdmark(\d+)end", re.IGNORECASE)  # templates may change the case of a text
REASONING_END = "</think>"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class Place(NamedTuple):
    """Where a mark stands: the index of its message in the conversation, and the field of the message."""

    number: int
    field: str


class Outline(NamedTuple):
    messages: list[dict[str, Any]]
    places: list[Place]  # of each mark

    def missing(self, text: str) -> list[Place]:
        """The places of marks that are not in the rendered `text`, in the order of the conversation."""
        rendered_marks = {int(match[1]) for match in MARK_PATTERN.finditer(text)}
        return [place for mark, place in enumerate(self.places) if mark not in rendered_marks]


def make_outline(messages: Iterable[TemplateMessage], *, marks_names: bool = True) -> Outline:
    """The outline of a conversation. Without `marks_names`, calls keep their names.

    Reasoning has no marks, because templates drop that of earlier turns.
    """
    outline = Outline([], [])
    for number, fields in messages:

        def mark(field: str, number: int = number) -> str:
            outline.places.append(Place(number, field))
            return f"tcdmark{len(outline.places) - 1}end"

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
        outline.messages.append(marked)
    return outline


def render_outline(
    messages: Sequence[TemplateMessage], render: Callable[[list[dict[str, Any]]], str]
) -> tuple[str, list[Place]]:
    """The text of the outline, and the places of messages that are missing in it. Raises ModelError as `render` does.

    Templates may look up the name of a call in `tools`, so names are kept if the outline with marked names fails.
    """
    outline = make_outline(messages)
    try:
        text = render(outline.messages)
    except ModelError:
        if not any(message.fields.get("tool_calls") for message in messages):
            raise
        outline = make_outline(messages, marks_names=False)
        text = render(outline.messages)
    return text, outline.missing(text)


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
