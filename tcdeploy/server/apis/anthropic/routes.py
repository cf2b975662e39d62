"""The routes of Anthropic's Messages API, and the translation of its requests to a ChatRequest.

In the Messages API, tool results are blocks of a user message; in a ChatRequest, each is a message. Consecutive
messages of one role are merged, because chat templates may require that roles alternate. A final assistant message is
continued. A `max_tokens` that exceeds the context is lowered.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tcdeploy.server.apis.anthropic.answer import MessagesAnswer
from tcdeploy.server.apis.anthropic.protocol import (
    MESSAGES_FIELD_NAMES,
    MESSAGES_INERT_VALUES,
    Block,
    CountTokensRequest,
    MessageParam,
    MessagesPrompt,
    MessagesRequest,
    MessagesTool,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tcdeploy.server.apis.openai.field_types import Function, NamedFunction, NamedToolChoice, Tool
from tcdeploy.server.apis.openai.protocol import (
    ApiError,
    ChatRequest,
    FunctionCall,
    SamplingRequest,
    TokenizeRequest,
    ToolCall,
    bad_request,
)
from tcdeploy.server.apis.openai.unsupported_fields import check_unsupported_fields, rename_error
from tcdeploy.server.apis.turn import BLOCKS_PER_SLICE, Turn, last_turn, to_messages, tool_turn
from tcdeploy.server.generate.generation import GenerationApi, TranslatedRequest, admitted_body, generation_route
from tcdeploy.server.output.structured.output_constraint import JsonSchema, JsonSchemaFormat
from tcdeploy.server.service import ServerState

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def to_chat_request(body: MessagesRequest) -> ChatRequest:
    """The chat request of a validated body. Raises ApiError 400."""
    sampling = {name: getattr(body, name) for name in SamplingRequest.model_fields}
    one_call = body.tool_choice.disable_parallel_tool_use if body.tool_choice else None
    request = ChatRequest.model_construct(
        **sampling, **await prompt_fields(body), max_tokens=body.max_tokens, stop=body.stop_sequences,
        tool_choice=_tool_choice(body), parallel_tool_calls=None if one_call is None else not one_call,
        response_format=_response_format(body),
    )  # fmt: skip
    request._lowers_max_tokens = True
    return request


async def prompt_fields(body: MessagesPrompt) -> dict[str, Any]:
    """The fields of ChatRequest that the prompt depends on, except `tool_choice`. Raises ApiError 400."""
    turns = [Turn("system", [block.text for block in body.system])] if body.system else []
    await _add_messages(turns, body.messages)
    continues = bool(body.messages) and turns[-1].role == "assistant"
    if continues and turns[-1].calls:
        raise bad_request("messages ends with a tool_use block; the next message must have its tool_result", "messages")
    return {
        "messages": await to_messages(turns) if body.messages else [],
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "chat_template_kwargs": _template_kwargs(body),
        "reasoning_effort": body.output_config.effort if body.output_config else None,
        "continue_final_message": continues or None,
    }


async def _add_messages(turns: list[Turn], messages: list[MessageParam]) -> None:
    num_blocks = 0
    for number, message in enumerate(messages):
        for index, block in enumerate(message.content):
            _add_block(turns, message.role, block, f"messages[{number}].content[{index}]")
        if not message.content:
            last_turn(turns, message.role)
        num_blocks += 1 + len(message.content)
        if num_blocks >= BLOCKS_PER_SLICE:
            num_blocks = 0
            await asyncio.sleep(0)


def _add_block(turns: list[Turn], role: str, block: Block, place: str) -> None:
    expected_role = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}.get(block.type, role)
    if role != expected_role:
        raise bad_request(f"{place}: a {block.type} block belongs to a message of the role {expected_role}", place)
    match block:
        case TextBlock():
            last_turn(turns, role).texts.append(block.text)
        case ThinkingBlock():
            last_turn(turns, role).reasoning.append(block.thinking)
        case ToolUseBlock():
            function = FunctionCall.model_construct(name=block.name, arguments=block.input)
            last_turn(turns, role).calls.append(ToolCall.model_construct(id=block.id, function=function))
        case ToolResultBlock():
            turns.append(tool_turn(block.tool_use_id, _result_texts(block)))


def _result_texts(block: ToolResultBlock) -> list[str]:
    """The texts; of a failed call with the prefix "Error", since chat templates have no field for a failure."""
    texts = [part.text for part in block.content or []]
    if not block.is_error:
        return texts
    return [f"Error: {texts[0]}", *texts[1:]] if texts else ["Error"]


def _tool(tool: MessagesTool) -> Tool:
    """Not validated, because names may be longer than OpenAI's chats allow."""
    fields: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        fields["description"] = tool.description
    return Tool.model_construct(type="function", function=Function.model_construct(**fields))


def _tool_choice(body: MessagesPrompt) -> Any:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return TOOL_CHOICES[choice.type]
    if choice.name is None:
        raise bad_request("tool_choice.name is required if tool_choice.type is tool", "tool_choice")
    return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))


def _response_format(body: MessagesPrompt) -> JsonSchemaFormat | None:
    output_format = body.output_config.format if body.output_config else None
    if output_format is None:
        return None
    schema = JsonSchema.model_construct(json_schema=output_format.json_schema)
    return JsonSchemaFormat.model_construct(type="json_schema", json_schema=schema)


def _template_kwargs(body: MessagesPrompt) -> dict[str, Any] | None:
    """`thinking` sets the variable that most templates read. `budget_tokens` has no effect: in Anthropic's API it is a
    target, and `max_tokens` limits thinking too.
    """
    if body.thinking is None:
        return body.chat_template_kwargs
    return {"enable_thinking": body.thinking.type != "disabled", **(body.chat_template_kwargs or {})}


async def _translate(_: ServerState, __: Request, body: MessagesRequest) -> TranslatedRequest:
    check_unsupported_fields(body, MESSAGES_INERT_VALUES, MESSAGES_FIELD_NAMES)
    return TranslatedRequest(await to_chat_request(body), partial(MessagesAnswer, body=body))


MESSAGES = GenerationApi(
    "/v1/messages", "messages", "Create a message (Anthropic's Messages API).", MessagesRequest, _translate,
    MESSAGES_INERT_VALUES, MESSAGES_FIELD_NAMES,
)  # fmt: skip


def messages_routes(state: ServerState) -> list[Route]:
    async def count_tokens(request: Request) -> Response:
        """Count the input tokens of a request to /v1/messages."""
        async with admitted_body(state, request, CountTokensRequest) as (tokenizer, body):
            state.require_service().check_model(body.model)
            fields = await prompt_fields(body)
            if body.tool_choice is not None and body.tool_choice.type == "none":
                fields["tools"] = None
            try:
                ids = await tokenizer.tokenize(TokenizeRequest.model_construct(**fields))
            except ApiError as error:
                raise rename_error(error, MESSAGES_FIELD_NAMES) from None
            return JSONResponse({"input_tokens": len(ids)})

    return [
        generation_route(state, MESSAGES),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
