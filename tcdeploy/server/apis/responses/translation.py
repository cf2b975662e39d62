"""Translates requests of OpenAI's Responses API to a ChatRequest, and outputs to messages of the next request.

In the Responses API, reasoning, text and calls of the model are separate items; in a ChatRequest, they are one
assistant message. Adjacent system and developer messages are merged, because most templates read a system message only
if it is the first message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from tcdeploy.server.apis.openai.protocol import (
    MAX_MESSAGES,
    PART_SEPARATOR,
    ChatRequest,
    FunctionCall,
    Message,
    SamplingRequest,
    ToolCall,
    bad_request,
)
from tcdeploy.server.apis.openai.tool_fields import Function, NamedFunction, NamedToolChoice, Tool
from tcdeploy.server.apis.openai.validation import count_chars
from tcdeploy.server.apis.responses.protocol import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    FunctionToolChoice,
    Item,
    JsonSchemaTextFormat,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)
from tcdeploy.server.apis.turn import BLOCKS_PER_SLICE, Turn, to_messages, tool_turn
from tcdeploy.server.output.json_text import dump
from tcdeploy.server.output.structured.output_constraint import JsonObjectFormat, JsonSchema, JsonSchemaFormat
from tcdeploy.text.template_form import INSTRUCTION_ROLES, MESSAGE_SEPARATOR

# Reasoning is returned as text, which clients can send back, so it need not be encrypted.
INERT_INCLUDES = ("reasoning.encrypted_content",)
# Fields that the response repeats, and that need not be part of the prompt, whose length is limited.
REPEATED_FIELDS = {"metadata", "prompt_cache_key", "safety_identifier", "text", "tools", "user"}
MAX_REPEATED_CHARS = 512 << 10  # in one field; writing them as JSON blocks the event loop for some 5 ms
INERT_OPTIONS = {"summary": ("auto",), "generate_summary": ("auto",), "mode": ("standard",), "context": ("auto",)}


async def new_messages(body: ResponsesRequest, previous: Sequence[Message]) -> list[Message]:
    """The messages that the request adds to the conversation of `previous`."""
    turns: list[Turn] = []
    num_parts = 0
    for item in body.input:
        _add_item(turns, item)
        num_parts += 1 + (len(item.content) if isinstance(item, MessageItem) else 0)
        if num_parts >= BLOCKS_PER_SLICE:
            num_parts = 0
            await asyncio.sleep(0)
    if len(previous) + len(turns) > MAX_MESSAGES:
        message = f"the conversation has {len(previous) + len(turns)} messages; the limit is {MAX_MESSAGES}"
        raise bad_request(message, "previous_response_id" if previous else "input")
    return await to_messages(turns)


def to_chat_request(body: ResponsesRequest, conversation: list[Message]) -> ChatRequest:
    """The chat request of a validated body. `conversation`: without the instructions. Raises ApiError 400."""
    _check_options(body)
    sampling = {name: getattr(body, name) for name in SamplingRequest.model_fields}
    return ChatRequest.model_construct(
        **sampling,
        messages=_with_instructions(body.instructions, conversation),
        max_completion_tokens=body.max_output_tokens,
        stop=body.stop,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def answer_messages(items: Iterable[dict[str, Any]]) -> list[Message]:
    """The messages of a response's output items, for the next request of the conversation, without a truncated call."""
    turns: list[Turn] = []
    for item in items:
        match item["type"]:
            case "message":
                _assistant_turn(turns).texts.append(item["content"][0]["text"])
            case "reasoning":
                _assistant_turn(turns).reasoning.append(item["content"][0]["text"])
            case "function_call" if item["status"] == "completed":
                _add_call(turns, item["call_id"], item["name"], item["arguments"])
    return [turn.message() for turn in turns]


def _add_item(turns: list[Turn], item: Item) -> None:
    match item:
        case MessageItem(role="assistant"):
            _assistant_turn(turns).texts.append(_text(item.content))
        case MessageItem():
            if item.role in INSTRUCTION_ROLES and turns and turns[-1].role in INSTRUCTION_ROLES:
                turns[-1].texts.append(_text(item.content))
            else:
                turns.append(Turn(item.role, [_text(item.content)]))
        case FunctionCallItem():
            _add_call(turns, item.call_id, item.name, item.arguments)
        case FunctionCallOutputItem():
            turns.append(tool_turn(item.call_id, [_text(item.output)]))
        case ReasoningItem():
            texts = [part.text for part in item.content or item.summary or []]
            _assistant_turn(turns).reasoning += texts


def _assistant_turn(turns: list[Turn]) -> Turn:
    """The last turn if it is the assistant's and has no calls, else a new one: text after a call is a new message."""
    if not turns or turns[-1].role != "assistant" or turns[-1].calls:
        turns.append(Turn("assistant"))
    return turns[-1]


def _add_call(turns: list[Turn], call_id: str, name: str, arguments: str) -> None:
    function = FunctionCall.model_construct(name=name, arguments=arguments)
    if not turns or turns[-1].role != "assistant":
        turns.append(Turn("assistant"))
    turns[-1].calls.append(ToolCall.model_construct(id=call_id, function=function))


def _text(parts: Iterable[Any]) -> str:
    return PART_SEPARATOR.join(part.text for part in parts)


def _with_instructions(instructions: str | None, conversation: list[Message]) -> list[Message]:
    if not instructions:
        return conversation
    if conversation and conversation[0].role in INSTRUCTION_ROLES:
        first, *conversation = conversation
        instructions = f"{instructions}{MESSAGE_SEPARATOR}{first.content}"
    return [Message.model_construct(role="system", content=instructions), *conversation]


def _tool(tool: FunctionTool) -> Tool:
    """Not validated, because names may be longer than OpenAI's chats allow."""
    fields = tool.model_dump(exclude_unset=True, exclude={"type"})
    return Tool.model_construct(type="function", function=Function.model_construct(**fields))


def _tool_choice(body: ResponsesRequest) -> Any:
    if isinstance(body.tool_choice, FunctionToolChoice):
        return NamedToolChoice(type="function", function=NamedFunction(name=body.tool_choice.name))
    return body.tool_choice


def _response_format(body: ResponsesRequest) -> Any:
    text_format = body.text.format if body.text else None
    if isinstance(text_format, JsonSchemaTextFormat):
        schema = JsonSchema.model_construct(json_schema=text_format.json_schema)
        return JsonSchemaFormat.model_construct(type="json_schema", json_schema=schema)
    return text_format if isinstance(text_format, JsonObjectFormat) else None


def _check_options(body: ResponsesRequest) -> None:
    """Raises ApiError 400 for an unsupported nested option that would change the response."""
    for value in body.include or ():
        if value not in INERT_INCLUDES:
            raise _unsupported(f"include {value[:80]!r}", "include")
    for name, inert in INERT_OPTIONS.items():
        if body.reasoning is not None and getattr(body.reasoning, name) not in (None, *inert):
            raise _unsupported(f"this value of reasoning.{name}", f"reasoning.{name}")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise _unsupported("this value of text.verbosity", "text.verbosity")
    for name, value in body.model_dump(include=REPEATED_FIELDS, by_alias=True, exclude_none=True).items():
        _check_repeated_field(name, value)
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise _unsupported("stream_options.include_obfuscation", "stream_options.include_obfuscation")


def _check_repeated_field(name: str, value: Any) -> None:
    if (num_chars := count_chars(value)) > MAX_REPEATED_CHARS:
        raise bad_request(f"{name} has {num_chars} characters; the limit is {MAX_REPEATED_CHARS}", name)
    try:
        dump(value)
    except ValueError:  # NaN, which the parser of requests accepts, and numbers beyond a float's range
        raise bad_request(f"{name} contains a number that JSON does not have", name) from None


def _unsupported(what: str, param: str) -> Exception:
    return bad_request(f"{what} is not supported", param, "unsupported_parameter")
