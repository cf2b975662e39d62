"""ASGI middleware that checks API keys, and that serves the application below a path (--root-path)."""

from __future__ import annotations

import hmac

from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.http.errors import error_response

UNAUTHENTICATED_PATHS = ("/health", "/ready", "/", "/docs")


class AuthMiddleware:
    """Plain ASGI: Starlette's BaseHTTPMiddleware would switch tasks for each event of a stream."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app, self._api_keys = app, api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        app = self._app
        if (
            self._api_keys
            and scope["path"] not in UNAUTHENTICATED_PATHS
            and find_key(Request(scope), self._api_keys) is None
        ):
            error = ApiError(
                401, "the API key is missing or wrong; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
            app = error_response(error, scope["path"])
        await app(scope, receive, send)


def find_key(request: Request, keys: tuple[str, ...]) -> str | None:
    """The one of `keys` that the request contains, or None. The time does not depend on which key matches. Anthropic's
    clients send the key as `x-api-key`.
    """
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
