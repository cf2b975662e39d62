"""Serves the application below a path (--root-path), behind a proxy that forwards only that path."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware that removes `root_path` from the beginning of paths.

    Some proxies remove it themselves, so a path without it is served too. ASGI's `root_path` is not used: each reader
    of the path would have to handle both cases.
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
