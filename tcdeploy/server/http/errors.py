"""The response to any exception of a route: OpenAI's error body, or Anthropic's on the routes of its API.

The error for a request that matches no route names the route that the client probably meant. Most of these requests
come from a base URL with one part too few or too many: clients append `/chat/completions` to a base URL that lacks
`/v1`, or `/v1/chat/completions` to one that has it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tcdeploy.server.apis.anthropic.protocol import messages_error_body
from tcdeploy.server.apis.openai.protocol import ApiError

MESSAGES_PATH = "/v1/messages"  # a prefix of the paths of Anthropic's API
MIN_SIMILARITY = 0.8  # of two paths; /v1/embeddings and /v1/models have 0.62
MAX_PATH_CHARS = 200  # of the path in a message, and of paths that are compared


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


def routing_error(routes: Sequence[Route], method: str, path: str) -> ApiError:
    """The error 405 if another method of `path` is served, else 404."""
    if methods := _methods(routes, path):
        message = f"{method} is not allowed for {path[:MAX_PATH_CHARS]}; use {' or '.join(_main_methods(methods))}"
        allow = {"allow": ", ".join(sorted(methods))}
        return ApiError(405, message, code="method_not_allowed", headers=allow)
    near_path = find_near_path([route.path for route in routes if not route.param_convertors], path)
    if near_path is None:
        hint = "GET /openapi.json lists the routes"
    else:
        hint = f"did you mean {_main_methods(_methods(routes, near_path))[0]} {near_path}?"
    return ApiError(404, f"unknown route {method} {path[:MAX_PATH_CHARS]}; {hint}", code="unknown_route")


def find_near_path(known_paths: Sequence[str], path: str) -> str | None:
    """The known path that lacks the start of `path`, or has an additional one; else the most similar one; or None."""
    path = path[:MAX_PATH_CHARS].lower().rstrip("/")
    candidates = [known for known in known_paths if known != "/"]
    if not path:
        return None
    if contained := [known for known in candidates if path.endswith(known)]:
        return max(contained, key=len)
    if containing := [known for known in candidates if known.endswith(path)]:
        return min(containing, key=len)
    return next(iter(difflib.get_close_matches(path, candidates, 1, MIN_SIMILARITY)), None)


def _methods(routes: Sequence[Route], path: str) -> set[str]:
    return {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}


def _main_methods(methods: set[str]) -> list[str]:
    return sorted(methods - {"HEAD"})
