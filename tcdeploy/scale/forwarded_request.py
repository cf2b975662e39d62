"""Forwards HTTP requests from the ingress to a replica, over HTTP or through a Ray deployment handle.

`forward_over_http` sends a request to Ray's proxy, at the path of the model. `respond` runs a replica's app on a
request that has come through a deployment handle of Ray. Both return the response as events (ASGI messages).

A handle passes each token through Ray's object store. With the embedded model on 2 CPU cores behind HAProxy, HTTP added
0.4 ms to the first token of single requests and a handle 7.6 ms, and 8 streams through a handle had 0.5 to 0.65 times
the tokens/s. So only models whose `request_router_config` needs a handle are reached through one. Does not import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
from starlette.types import ASGIApp, Message, Scope
from yarl import URL

from tcdeploy.server.apis.openai.protocol import ApiError

CONNECT_TIMEOUT_S = 5
MAX_MESSAGE_CHARS = 400
TEXT_PATHS = ("/ready",)  # its errors are plain text; on other paths, a plain-text error comes from the proxy
Headers = tuple[tuple[bytes, bytes], ...]
PATH_CHARS = "/:@!$&'()*+,;=-._~"  # need no percent-encoding in a path (RFC 3986)
# Hop-by-hop headers. Below, headers that aiohttp or the server of the ingress sets itself.
HOP_BY_HOP_HEADERS = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
}  # fmt: skip
REQUEST_HEADERS_WRITTEN_ANEW = {b"host", b"content-length", b"expect"}
RESPONSE_HEADERS_WRITTEN_ANEW = {b"date", b"server"}
ADDED_BY_AIOHTTP = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_running: set[asyncio.Task[None]] = set()  # the event loop holds tasks by weak references only


@dataclass(frozen=True)
class ForwardedRequest:
    """A request whose body has arrived. `headers` have names in lower case, as in ASGI."""

    method: str
    path: str
    query_string: bytes = b""
    headers: Headers = ()
    body: bytes = b""

    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": quote(self.path, PATH_CHARS).encode(),
            "query_string": self.query_string,
            "root_path": "",
            "headers": list(self.headers),
            "client": None,
            "server": None,
            "extensions": {},
        }


@dataclass(frozen=True)
class PromptRequest(ForwardedRequest):
    """A request with the text by which a request router of Ray chooses the replica; the replica does not get it."""

    prompt: str = ""

    def __getstate__(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "prompt"}


def http_session() -> aiohttp.ClientSession:
    """For `forward_over_http`. Create it in the event loop that uses it.

    Each request has a connection of its own: a proxy may close an idle one while a request is being sent on it.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=False), auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S), cookie_jar=aiohttp.DummyCookieJar(),
    )  # fmt: skip


async def forward_over_http(
    session: aiohttp.ClientSession, base_url: str, request: ForwardedRequest
) -> AsyncGenerator[list[Message], None]:
    """Events of the response, as they arrive. Raises ApiError for errors of the connection and of the proxy.

    If the caller stops early or is cancelled, the connection is closed, which aborts the request.
    """
    try:
        async with contextlib.aclosing(_http_events(session, base_url, request)) as events:
            async for event in events:
                yield [event]
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise ApiError(503, f"the server of the model cannot be reached: {reason}", code="unreachable") from error


async def _http_events(
    session: aiohttp.ClientSession, base_url: str, request: ForwardedRequest
) -> AsyncGenerator[Message, None]:
    headers = [
        (name.decode("latin-1"), _header_text(name, value))
        for name, value in request.headers
        if name not in HOP_BY_HOP_HEADERS | REQUEST_HEADERS_WRITTEN_ANEW
    ]
    query = f"?{request.query_string.decode('latin-1')}" if request.query_string else ""
    url = URL(f"{base_url}{quote(request.path, PATH_CHARS)}{query}", encoded=True)
    async with session.request(
        request.method, url, data=request.body or None, headers=headers, skip_auto_headers=ADDED_BY_AIOHTTP,
        allow_redirects=False,
    ) as response:  # fmt: skip
        skipped = HOP_BY_HOP_HEADERS | RESPONSE_HEADERS_WRITTEN_ANEW
        kept = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in skipped]
        if response.status >= 400 and response.content_type == "text/plain" and request.path not in TEXT_PATHS:
            retry_after = response.headers.get("retry-after", "")
            raise ApiError(
                response.status, (await response.text())[:MAX_MESSAGE_CHARS].strip(), code="proxy_error",
                retry_after=int(retry_after) if retry_after.isdecimal() else None,
            )  # fmt: skip
        yield {"type": "http.response.start", "status": response.status, "headers": kept}
        async for chunk in response.content.iter_any():
            yield {"type": "http.response.body", "body": chunk, "more_body": True}
        yield {"type": "http.response.body", "body": b"", "more_body": False}


def _header_text(name: bytes, value: bytes) -> str:
    """Raises ApiError 400 for a value that is not UTF-8, because aiohttp can send no other."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ApiError(400, f"the header {name.decode('latin-1')} is not UTF-8", code="invalid_header") from None


async def respond(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
    """Events of the response as `app` sends them; a list has all events that are ready.

    If the caller stops early or is cancelled, `app` gets `http.disconnect`. Raises what `app` raises.
    """
    events: asyncio.Queue[Message | None] = asyncio.Queue()
    is_body_sent, disconnected = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal is_body_sent
        if not is_body_sent:
            is_body_sent = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(event: Message) -> None:
        events.put_nowait(event)

    async def run() -> None:
        try:
            await app(request.scope(), receive, send)
        finally:
            events.put_nowait(None)

    task = asyncio.create_task(run())
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        has_more = True
        while has_more:
            ready = [await events.get()]
            while not events.empty():
                ready.append(events.get_nowait())
            has_more = ready[-1] is not None
            if batch := [event for event in ready if event is not None]:
                yield batch
        await task
    finally:
        disconnected.set()
