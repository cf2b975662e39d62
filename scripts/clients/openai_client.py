"""OpenAI's own client."""

from __future__ import annotations

import json
from typing import Literal

import openai
from checks import CLOCK_SCHEMA, LONG_TEXT, MODEL, QUESTION, URL, check, run_checks
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": CLOCK_SCHEMA}}]


class Answer(BaseModel):
    ok: bool
    size: Literal["small", "large"]  # a tiny model never ends a number


@check("completions")
def completions() -> None:
    response = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=4, logprobs=2, echo=True)
    assert response.usage.completion_tokens <= 4 and response.choices[0].logprobs.tokens


@check("chat")
def chat() -> None:
    assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8).choices[0].message.content


@check("stream")
def stream() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) and last.usage.completion_tokens


@check("tools")
def tools() -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    message = client.chat.completions.create(model=MODEL, messages=MESSAGES, **options).choices[0].message
    [call] = message.tool_calls
    assert isinstance(json.loads(call.function.arguments)["utc"], bool)
    result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    answer = client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, message, result], tools=TOOLS, max_tokens=8
    )
    assert answer.usage.completion_tokens


@check("structured output")
def structured_output() -> None:
    response = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer, max_tokens=300)
    assert isinstance(response.choices[0].message.parsed, Answer)


@check("responses")
def responses() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16)
    second = client.responses.create(model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=16)
    assert second.usage.input_tokens > first.usage.input_tokens
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Answer, max_output_tokens=300)
    assert isinstance(parsed.output_parsed, Answer)


@check("context error")
def context_error() -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": LONG_TEXT}])
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
    else:
        raise AssertionError("a prompt beyond the context was accepted")


run_checks()
