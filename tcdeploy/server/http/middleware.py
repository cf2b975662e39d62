"""ASGI middleware that checks API keys and removes a path (--root-path), and the response to any exception of a route.

An error has OpenAI's body, or Anthropic's on the routes of its API. That for a request which matches no route names the
route that the client probably meant. Most of these requests come from a base URL with one part too few or too many:
clients append `/chat/completions` to a base URL that lacks `/v1`, or `/v1/chat/completions` to one that has it.
"""

from __future__ import annotations

import difflib
import hmac
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tcdeploy.server.apis.anthropic.protocol import messages_error_body
from tcdeploy.server.apis.openai.protocol import ApiError

UNAUTHENTICATED_PATHS = ("/health", "/ready", "/", "/docs")
MESSAGES_PATH = "/v1/messages"  # a prefix of the paths of Anthropic's API
MIN_SIMILARITY = 0.8  # of two paths; /v1/embeddings and /v1/models have 0.62
MAX_PATH_CHARS = 200  # of the path in a message, and of paths that are compared


class AuthMiddleware:
    """Plain ASGI: Starlette's BaseHTTPMiddleware would switch tasks for each event of a stream."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app, self._api_keys = app, api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, keys = self._app, self._api_keys
        needs_key = keys and scope["type"] == "http" and scope["path"] not in UNAUTHENTICATED_PATHS
        if needs_key and find_key(Request(scope), keys) is None:
            error = ApiError(
                401, "the API key is missing or wrong; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
            app = error_response(error, scope["path"])
        await app(scope, receive, send)


def find_key(request: Request, keys: tuple[str, ...]) -> str | None:
    """The one of `keys` that the request contains, or None, in a time that does not depend on which key matches."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else ""
    sent = [text.encode() for text in (bearer, request.headers.get("x-api-key", ""))]
    matches = [key for key in keys for text in sent if hmac.compare_digest(text, key.encode())]
    return matches[0] if matches else None


class RootPath:
    """Removes `root_path` from the beginning of paths, behind a proxy that forwards only these. A path without it is
    served too, because some proxies remove it. ASGI's `root_path` is not used: each reader of the path would have to
    handle both cases.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """`root_path` begins with "/" and does not end with it."""
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._root_path:
            redirect = RedirectResponse(f"{self._root_path}/")  # the page at / has addresses relative to its own
            await redirect(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"][len(self._root_path) :]
            scope["raw_path"] = scope["path"].encode()
        await self._app(scope, receive, send)


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
