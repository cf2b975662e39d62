"""The response to any exception of a route: OpenAI's error body, or Anthropic's on the routes of its API."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from tcdeploy.server.messages_protocol import messages_error_body
from tcdeploy.server.protocol import ApiError

MESSAGES_PATH = "/v1/messages"  # and below it
log = logging.getLogger("tcdeploy.server")


def error_response(error: Exception, path: str) -> Response:
    """The response of the route of `path` to an exception."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    if not isinstance(error, ApiError):
        error = ApiError(500, f"{type(error).__name__}: {error}")
    body = messages_error_body(error) if path.startswith(MESSAGES_PATH) else error.body
    return JSONResponse(body, error.status, error.headers)


def logged_error_response(error: Exception, path: str) -> Response:
    """As `error_response`, and logs unexpected errors: uvicorn logs only those of Starlette's routes."""
    if not isinstance(error, (ApiError, ClientDisconnect)):
        log.error("a request failed", exc_info=error)
    return error_response(error, path)
