"""The response to any exception of a route: OpenAI's error body, or Anthropic's on the routes of its API."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from tcdeploy.server.apis.anthropic.protocol import messages_error_body
from tcdeploy.server.apis.openai.protocol import ApiError

MESSAGES_PATH = "/v1/messages"  # a prefix of the paths of Anthropic's API


def error_response(error: Exception, path: str) -> Response:
    """The response to an exception, in the format of the API that `path` belongs to."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    if not isinstance(error, ApiError):
        error = ApiError(500, f"{type(error).__name__}: {error}")
    body = messages_error_body(error) if path.startswith(MESSAGES_PATH) else error.body
    return JSONResponse(body, error.status, error.headers)
