"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tcdeploy.server.apis.openai.protocol import ApiError, bad_request
from tcdeploy.server.apis.openai.unsupported_fields import check_unsupported_fields
from tcdeploy.server.apis.responses.answer import ResponsesAnswer
from tcdeploy.server.apis.responses.protocol import RESPONSES_FIELD_NAMES, RESPONSES_INERT_VALUES, ResponsesRequest
from tcdeploy.server.apis.responses.store import StoredResponse, memory_of
from tcdeploy.server.apis.responses.translation import answer_messages, new_messages, to_chat_request
from tcdeploy.server.generate.active_request import ActiveRequest
from tcdeploy.server.generate.generation import GenerationApi, TranslatedRequest, generate
from tcdeploy.server.http.middleware import find_key
from tcdeploy.server.server_state import ServerState

# Unsupported query parameters of a GET, which would change the response.
RETRIEVE_OPTIONS = ("include", "include[]", "include_obfuscation", "starting_after", "stream")


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


RESPONSES = GenerationApi(ResponsesRequest, _translate, RESPONSES_INERT_VALUES, RESPONSES_FIELD_NAMES)


def responses_routes(state: ServerState) -> list[Route]:
    async def responses(request: Request) -> Response:
        """Create a response (OpenAI's Responses API)."""
        return await generate(state, request, RESPONSES)

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
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/responses/{response_id}", retrieve_response, methods=["GET"]),
        Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
    ]


def _not_found(request: Request) -> ApiError:
    return ApiError(404, f"Response with id '{request.path_params['response_id'][:200]}' not found.")
