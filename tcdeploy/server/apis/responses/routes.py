"""The routes of OpenAI's Responses API, and the translation of its requests to a ChatRequest.

In the Responses API, reasoning, text and calls of the model are separate items; in a ChatRequest, they are one
assistant message. Adjacent system and developer messages are merged, because most templates read a system message only
if it is the first message.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tcdeploy.server.apis.openai.field_types import Function, NamedFunction, NamedToolChoice, Tool
from tcdeploy.server.apis.openai.protocol import (
    MAX_MESSAGES,
    PART_SEPARATOR,
    ApiError,
    ChatRequest,
    FunctionCall,
    Message,
    SamplingRequest,
    ToolCall,
    bad_request,
)
from tcdeploy.server.apis.openai.unsupported_fields import check_unsupported_fields
from tcdeploy.server.apis.openai.validation import count_chars
from tcdeploy.server.apis.responses.answer import ResponsesAnswer
from tcdeploy.server.apis.responses.protocol import (
    RESPONSES_FIELD_NAMES,
    RESPONSES_INERT_VALUES,
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
from tcdeploy.server.apis.responses.store import StoredResponse, memory_of
from tcdeploy.server.apis.turn import BLOCKS_PER_SLICE, Turn, last_turn, to_messages, tool_turn
from tcdeploy.server.generate.active_request import ActiveRequest
from tcdeploy.server.generate.generation import GenerationApi, TranslatedRequest, generation_route
from tcdeploy.server.http.middleware import find_key
from tcdeploy.server.output.json_text import dump
from tcdeploy.server.output.structured.output_constraint import JsonObjectFormat, JsonSchema, JsonSchemaFormat
from tcdeploy.server.service import ServerState
from tcdeploy.text.template_form import INSTRUCTION_ROLES, MESSAGE_SEPARATOR

# Unsupported query parameters of a GET, which would change the response.
RETRIEVE_OPTIONS = ("include", "include[]", "include_obfuscation", "starting_after", "stream")
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
        **sampling, messages=_with_instructions(body.instructions, conversation),
        max_completion_tokens=body.max_output_tokens, stop=body.stop,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools], tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls, response_format=_response_format(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip


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
    last_turn(turns, "assistant").calls.append(ToolCall.model_construct(id=call_id, function=function))


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


async def _translate(state: ServerState, raw_request: Request, body: ResponsesRequest) -> TranslatedRequest:
    check_unsupported_fields(body, RESPONSES_INERT_VALUES, RESPONSES_FIELD_NAMES)
    api_key = find_key(raw_request, state.settings.api_keys) or ""
    previous = None
    if body.previous_response_id is not None:
        previous = state.stored_responses.get(body.previous_response_id, api_key)
        if previous is None:
            state.admission.check_open()  # a server that is loading has no responses yet
            message = f"Previous response with id '{body.previous_response_id[:200]}' not found."
            raise ApiError(404, message, "previous_response_id", "previous_response_not_found")
    old_messages = previous.messages if previous else []
    added = await new_messages(body, old_messages)
    request = to_chat_request(body, [*old_messages, *added])
    response_id = f"resp_{uuid.uuid4().hex}"

    def store(response: bytes, output: list[dict[str, Any]]) -> None:
        if body.is_stored:
            messages = [*added, *answer_messages(output)]
            old_bytes = previous.num_bytes - len(previous.body) if previous else 0  # of its messages, which are kept
            num_bytes = len(response) + memory_of(messages) + old_bytes
            conversation = [*old_messages, *messages]
            state.stored_responses.put(response_id, StoredResponse(response, conversation, num_bytes, api_key))

    def new_answer(active: ActiveRequest) -> ResponsesAnswer:
        return ResponsesAnswer(active, body, response_id, store)

    return TranslatedRequest(request, new_answer)


RESPONSES = GenerationApi(
    "/v1/responses", "responses", "Create a response (OpenAI's Responses API).", ResponsesRequest, _translate,
    RESPONSES_INERT_VALUES, RESPONSES_FIELD_NAMES,
)  # fmt: skip


def responses_routes(state: ServerState) -> list[Route]:
    async def retrieve_response(request: Request) -> Response:
        """Retrieve a stored response."""
        for name in RETRIEVE_OPTIONS:
            if request.query_params.get(name) not in (None, "false"):
                raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
        stored = state.stored_responses.get(*_id_and_key(request))
        if stored is None:
            raise _not_found(request)
        return Response(stored.body, media_type="application/json")

    async def delete_response(request: Request) -> Response:
        """Delete a stored response."""
        if not state.stored_responses.delete(*_id_and_key(request)):
            raise _not_found(request)
        response_id = request.path_params["response_id"]
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _id_and_key(request: Request) -> tuple[str, str]:
        return request.path_params["response_id"], find_key(request, state.settings.api_keys) or ""

    return [
        generation_route(state, RESPONSES),
        Route("/v1/responses/{response_id}", retrieve_response, methods=["GET"]),
        Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
    ]


def _not_found(request: Request) -> ApiError:
    return ApiError(404, f"Response with id '{request.path_params['response_id'][:200]}' not found.")
