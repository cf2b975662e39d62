"""Anthropic's own client."""

from __future__ import annotations

import anthropic
from checks import CLOCK_SCHEMA, LONG_TEXT, MODEL, QUESTION, URL, check, run_checks

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = [{"name": "clock", "input_schema": CLOCK_SCHEMA}]


@check("messages")
def messages() -> None:
    message = client.messages.create(model=MODEL, max_tokens=8, messages=MESSAGES, system="Be brief.")
    assert message.usage.output_tokens and message.stop_reason
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0


@check("stream")
def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=8, messages=MESSAGES) as events:
        text = "".join(events.text_stream)
        assert text and events.get_final_message().usage.output_tokens


@check("tools")
def tools() -> None:
    options = {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    message = client.messages.create(model=MODEL, max_tokens=200, messages=MESSAGES, **options)
    [use] = [block for block in message.content if block.type == "tool_use"]
    assert isinstance(use.input["utc"], bool) and message.stop_reason == "tool_use"
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "noon"}]},
    ]
    assert client.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=TOOLS).usage.output_tokens


@check("context error")
def context_error() -> None:
    try:
        client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": LONG_TEXT}])
    except anthropic.BadRequestError as error:
        assert "prompt is too long" in str(error)
    else:
        raise AssertionError("a prompt beyond the context was accepted")


run_checks()
