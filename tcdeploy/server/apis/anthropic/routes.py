"""The routes of Anthropic's Messages API. Their errors have Anthropic's format (error_response.py)."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tcdeploy.server.apis.anthropic.answer import MessagesAnswer
from tcdeploy.server.apis.anthropic.protocol import (
    MESSAGES_FIELD_NAMES,
    MESSAGES_INERT_VALUES,
    CountTokensRequest,
    MessagesRequest,
)
from tcdeploy.server.apis.anthropic.translation import prompt_fields, to_chat_request
from tcdeploy.server.apis.openai.protocol import ApiError, TokenizeRequest
from tcdeploy.server.apis.openai.unsupported_fields import check_unsupported_fields, rename_error
from tcdeploy.server.generate.generation import GenerationApi, TranslatedRequest, admitted_body, generate
from tcdeploy.server.server_state import ServerState


async def _translate(_: ServerState, __: Request, body: MessagesRequest) -> TranslatedRequest:
    check_unsupported_fields(body, MESSAGES_INERT_VALUES, MESSAGES_FIELD_NAMES)
    return TranslatedRequest(await to_chat_request(body), partial(MessagesAnswer, body=body))


MESSAGES = GenerationApi(MessagesRequest, _translate, MESSAGES_INERT_VALUES, MESSAGES_FIELD_NAMES)


def messages_routes(state: ServerState) -> list[Route]:
    async def messages(request: Request) -> Response:
        """Create a message (Anthropic's Messages API)."""
        return await generate(state, request, MESSAGES)

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
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
