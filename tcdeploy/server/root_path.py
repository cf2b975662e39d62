"""Serves the application below a path (--root-path), behind a proxy that forwards only that path."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware that removes `root_path` from the beginning of paths.

    Some proxies remove it themselves, so a path without it is served too. ASGI's `root_path` is not used: with it,
    applications have to tell the two cases apart wherever they read the path.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """`root_path` begins with "/" and does not end with it."""
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] + "/").startswith(self._root_path + "/"):
            scope["path"] = scope["path"][len(self._root_path) :] or "/"
            scope["raw_path"] = scope["path"].encode()
        await self._app(scope, receive, send)
