"""The ingress in front of an app in this process: what the replica, the request router and the client get. No Ray."""

from __future__ import annotations

import asyncio
import gzip
import json
import pickle
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from tcdeploy.scale.ingress import MAX_PROMPT_CHARS, Forward, ForwardedRequest, ingress_app, prompt_text, respond
from tcdeploy.server.apis.openai.protocol import ApiError


class Model:
    """A replica. `received`: its requests. A stream waits for `go_on` after its first event."""

    def __init__(self) -> None:
        self.received = list[tuple[Request, bytes]]()
        self.go_on, self.aborted = asyncio.Event(), asyncio.Event()
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        self.received.append((request, body := await request.body()))
        if b'"stream"' in body:
            return StreamingResponse(self._events(), media_type="text/event-stream")
        return JSONResponse({"by": "model"}, 418, {"x-request-id": "1", "retry-after": "7"})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await self.go_on.wait()
            yield b"data: [DONE]\n\n"
        finally:
            if not self.go_on.is_set():
                self.aborted.set()


def ingress(model: Model, seen: list[ForwardedRequest] | None = None) -> ASGIApp:
    def forward(request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        if seen is not None:
            seen.append(request)
        return respond(model.app, request)

    return ingress_app(forward, max_body_bytes=1000)


def client(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress")


def test_the_replica_gets_the_request_and_the_client_the_response_unchanged() -> None:
    async def run() -> None:
        model = Model()
        async with client(ingress(model)) as http:
            for body in (json.dumps({"messages": [], "x": "\u00e4"}).encode(), b"{", b""):
                response = await http.post("/v1/chat/completions?a=b%20c", content=body, headers={"x-own": "1"})
                assert (response.status_code, response.json()) == (418, {"by": "model"})
                assert response.headers["retry-after"] == "7" and "x-request-id" not in response.headers
                request, received = model.received[-1]
                assert received == body and request.headers["x-own"] == "1"
                assert request.url.query == "a=b%20c" and request.method == "POST"
            assert (await http.get("/v1/unknown")).status_code == 404

    asyncio.run(run())


def test_a_compressed_body_is_forwarded_decompressed() -> None:
    async def run() -> None:
        model, seen = Model(), list[ForwardedRequest]()
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
        async with client(ingress(model, seen)) as http:
            headers = {"content-encoding": "gzip"}
            response = await http.post("/v1/chat/completions", content=gzip.compress(body), headers=headers)
            assert (response.status_code, response.json()) == (418, {"by": "model"})
            request, received = model.received[-1]
            assert received == body and "content-encoding" not in request.headers
            assert request.headers["content-length"] == str(len(body))
            assert seen[-1].prompt == "Hello"
            for encoding, content, status in (
                ("br", body, 415), ("gzip", body, 400), ("gzip", gzip.compress(bytes(5000)), 413),
            ):  # fmt: skip
                headers = {"content-encoding": encoding}
                response = await http.post("/v1/chat/completions", content=content, headers=headers)
                assert response.status_code == status and response.json()["error"]["message"]
            assert response.status_code == 413 and len(model.received) == 1

    asyncio.run(run())


class Connection:
    """A client's connection to an ASGI app, which receives each event when the app sends it."""

    def __init__(self, app: ASGIApp, body: dict[str, Any]) -> None:
        self.events: asyncio.Queue[Message] = asyncio.Queue()
        self._received: asyncio.Queue[Message] = asyncio.Queue()
        self._received.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        scope = ForwardedRequest("POST", "/v1/chat/completions").scope()
        self.task = asyncio.ensure_future(app(scope, self._received.get, self.events.put))

    def disconnect(self) -> None:
        self._received.put_nowait({"type": "http.disconnect"})


def test_a_stream_is_passed_on_event_by_event_and_a_disconnect_aborts_it() -> None:
    async def run() -> None:
        model = Model()
        app, body = ingress(model), {"stream": True}
        async with asyncio.timeout(10):
            whole, abandoned = Connection(app, body), Connection(app, body)
            for connection in (whole, abandoned):
                assert (await connection.events.get())["status"] == 200
                assert (await connection.events.get())["body"] == b"data: 1\n\n"
            abandoned.disconnect()
            await model.aborted.wait()
            await abandoned.task
            model.go_on.set()
            assert (await whole.events.get())["body"] == b"data: [DONE]\n\n"
            await whole.task

    asyncio.run(run())


def failing(events: list[Message]) -> Forward:
    async def forward(request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        if events:
            yield events
        raise ApiError(503, "it has gone", code="gone")

    return forward


def test_a_replica_that_fails_ends_a_stream_with_an_error_event() -> None:
    async def run() -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        events = [start, {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}]
        async with client(ingress_app(failing(events), 1000)) as http:
            chat = (await http.post("/v1/chat/completions", json={"model": "m"})).text.split("\n\n")
            assert chat[0] == "data: 1" and chat[2:] == ["data: [DONE]", ""]
            assert json.loads(chat[1].removeprefix("data: "))["error"]["code"] == "gone"
            messages = (await http.post("/v1/messages", json={"model": "m"})).text.split("\n\n")
            assert messages[1].startswith('event: error\ndata: {"type": "error"')
        async with client(ingress_app(failing([]), 1000)) as http:
            response = await http.post("/v1/chat/completions", json={"model": "m"})
            assert response.status_code == 503 and response.json()["error"]["message"] == "it has gone"
            assert (await http.get("/ready")).status_code == 503

    asyncio.run(run())


def test_the_request_router_gets_the_prompt_which_is_not_sent_to_the_replica() -> None:
    async def run() -> None:
        seen: list[ForwardedRequest] = []
        async with client(ingress(Model(), seen)) as http:
            await http.post("/v1/chat/completions", json={"messages": [{"content": "Hello"}]})
            await http.post("/v1/chat/completions", json={"messages": []})
            await http.post("/v1/chat/completions", json=["Hello"])
        assert [request.prompt for request in seen] == ["Hello", "", ""]
        sent = pickle.loads(pickle.dumps(seen[0]))
        assert isinstance(sent, ForwardedRequest) and sent.prompt == "" and "prompt" not in sent.__dict__
        assert sent.body == seen[0].body and sent.scope() == seen[0].scope()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "a b"}, "a b"),
        ({"prompt": [1, 23]}, "1 23 "),
        ({"prompt": ["a", "b"], "model": "m"}, "ab"),
        ({"messages": [{"role": "system", "content": "s"}, {"content": [{"type": "text", "text": "u"}]}]}, "su"),
        ({"messages": [{"content": "u"}], "system": [{"text": "s"}]}, "su"),
        ({"input": [{"content": [{"text": "i"}]}], "instructions": "s"}, "si"),
        ({"prompt": None, "messages": [None, {"content": None}]}, ""),
        ({"prompt": ["a"] * 100_000}, "a" * MAX_PROMPT_CHARS),
    ],
)
def test_the_prompt_of_a_request_is_its_text_in_the_order_of_the_model_s_prompt(
    fields: dict[str, Any], text: str
) -> None:
    assert prompt_text(fields) == text
