"""Renders a conversation in OpenAI's format with the model's chat template, and refuses messages that it leaves out.

The conversation is converted to the form that the template expects (template_form.py) and rendered. Then its outline is
rendered too: the same messages with a short mark for each text. The marks in the result show which messages are in the
prompt. Without this check, a prompt that lacks a message of the client would give a wrong answer and no error. Does not
import torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from tcdeploy.errors import ModelError
from tcdeploy.text.chat_template import TEMPLATE_HINT, ChatTemplate, render_messages, renders_in_python
from tcdeploy.text.template_form import (
    Place,
    RefusedMessageError,
    TemplateForm,
    TemplateMessage,
    message_kind,
    render_outline,
)
from tcdeploy.text.template_probe import template_form

MAX_CACHED_OUTLINES, MAX_CACHED_CHARS = 256, 16 << 10  # 4 MB at most


def render_conversation(
    tokenizer: Any, conversation: Sequence[dict[str, Any]], variables: dict[str, Any], *, continues: bool = False
) -> str:
    """The prompt. `continues`: it ends with the text of the final message.

    Blocks until the text is rendered, so the event loop must call it in `render_pool`. Raises RefusedMessageError for a
    message that the template does not render, and ModelError as `render_messages` does.
    """
    form = template_form(tokenizer, has_tools=bool(variables.get("tools")))
    messages = form.messages(conversation)
    try:
        text = render_messages(tokenizer, [message.fields for message in messages], variables, continues=continues)
    except ModelError as error:
        for number, message in enumerate(conversation):
            if message_kind(message) in form.unrendered:
                raise RefusedMessageError(number, "role", error.message) from error
        raise
    if places := _missing(tokenizer, messages, variables):
        raise _refusal(conversation, places[0], form)
    return text


def _missing(tokenizer: Any, messages: list[TemplateMessage], variables: dict[str, Any]) -> list[Place]:
    """The places of the conversation that are not in the prompt."""
    if tools := variables.get("tools"):  # of these, only the called ones may matter, and whether there is one
        names = {call["function"]["name"] for message in messages for call in message.fields.get("tool_calls", ())}
        called = [tool for tool in tools if tool.get("function", tool).get("name") in names]
        variables = {**variables, "tools": called or tools[:1]}

    def render(outline: list[dict[str, Any]]) -> str:
        request = json.dumps([outline, variables])
        if renders_in_python(tokenizer) or len(request) > MAX_CACHED_CHARS:
            return render_messages(tokenizer, outline, variables)
        return _cached_text(tokenizer, tokenizer.get_chat_template(None, variables.get("tools")), request)

    return render_outline(messages, render)[1]


@functools.lru_cache(maxsize=MAX_CACHED_OUTLINES)
def _cached_text(tokenizer: Any, _: str, request: str) -> str:
    """Outlines of short conversations are often equal: a chat of one turn always has the same one."""
    messages, variables = json.loads(request)
    return render_messages(tokenizer, messages, variables)


def _refusal(conversation: Sequence[dict[str, Any]], place: Place, form: TemplateForm) -> RefusedMessageError:
    message = conversation[place.number]
    kind, role = message_kind(message), message["role"]
    if place.field == "tool_calls":
        field = "function_call" if message.get("function_call") else "tool_calls"
        return RefusedMessageError(place.number, field, "the model's chat template leaves out the tool calls")
    reason = "does not render the role" if kind in form.unrendered else "leaves out this message of the role"
    return RefusedMessageError(place.number, "role", f"the model's chat template {reason} {role!r:.80}")


def replace_chat_template(tokenizer: Any, template: ChatTemplate) -> None:
    """Set the tokenizer's template. Raises ModelError if it uses none, or if rendering a user message fails."""
    if renders_in_python(tokenizer):
        raise ModelError(
            f"{type(tokenizer).__name__} renders chats in Python, so it cannot use another chat template",
            "remove --chat-template",
        )
    tokenizer.chat_template = template.text
    try:
        render_conversation(tokenizer, [{"role": "user", "content": "Hi"}], {"add_generation_prompt": True})
    except RefusedMessageError:
        pass  # requests are refused; other conversations may be rendered
    except ModelError as error:
        raise ModelError(f"{template.path}: {error.message}", TEMPLATE_HINT) from error
