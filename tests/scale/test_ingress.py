"""The ingress in front of apps in this process: which app gets a request, and what the client gets. Starts no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import pickle
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import aiohttp.web
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from tcdeploy.scale.forwarded_request import (
    ForwardedRequest,
    Headers,
    PromptRequest,
    forward_over_http,
    http_session,
    respond,
)
from tcdeploy.scale.ingress import MAX_PROMPT_CHARS, Ingress, IngressModel, prompt_text, single_model_ingress
from tcdeploy.scale.ray_config import ROUTE_NAMES
from tcdeploy.server.apis.openai.protocol import ApiError

KEYS = {"llama": {"all", "l"}, "qwen": {"all", "q"}}


class Model:
    """A server with an API key. `received`: its requests. A stream waits for `go_on` after its first event."""

    def __init__(self, name: str) -> None:
        self.name, self.received = name, list[tuple[Request, bytes]]()
        self.go_on, self.aborted = asyncio.Event(), asyncio.Event()
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/responses/{response_id}", self._stored),
            Route("/ready", lambda _: PlainTextResponse("ready" if name == "llama" else "loading", 200)),
            Route("/other", lambda request: PlainTextResponse(f"{name} {request.query_params['a']}")),
        ]
        self.app = Starlette(routes=routes)

    def _is_allowed(self, request: Request) -> bool:
        return request.headers.get("authorization", "").removeprefix("Bearer ") in KEYS[self.name]

    async def _models(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return JSONResponse({"error": "key"}, 401, {"www-authenticate": "Bearer"})
        card = {"id": self.name}
        return JSONResponse(card if "name" in request.path_params else {"object": "list", "data": [card]})

    async def _stored(self, request: Request) -> Response:
        if request.query_params.get("deny") == self.name:
            return JSONResponse({"error": "key"}, 401)
        is_known = request.path_params["response_id"].startswith(f"of-{self.name}")
        return JSONResponse({"by": self.name}, 200 if is_known else 404)

    async def _chat(self, request: Request) -> Response:
        self.received.append((request, body := await request.body()))
        if json.loads(body).get("stream"):
            return StreamingResponse(self._events(request), media_type="text/event-stream")
        return JSONResponse({"by": self.name}, 418, {"x-request-id": "1", "retry-after": "7"})

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await self.go_on.wait()
            yield b"data: [DONE]\n\n"
        finally:
            if not self.go_on.is_set():
                self.aborted.set()


def models() -> dict[str, Model]:
    return {name: Model(name) for name in KEYS}


def ingress(apps: dict[str, Model], seen: list[ForwardedRequest] | None = None) -> ASGIApp:
    def forward(application: str, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        if seen is not None:
            seen.append(request)
        return respond(apps[application].app, request)

    names = {"llama": IngressModel(("meta/llama", "alias")), "qwen": IngressModel(("qwen",), needs_prompt=True)}
    return Ingress(names, forward, max_body_bytes=1000).app


def client(app: ASGIApp, key: str = "all") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress", headers=headers)


def test_the_model_of_the_body_chooses_the_server_which_gets_the_request_unchanged() -> None:
    async def run() -> None:
        apps = models()
        async with client(ingress(apps)) as http:
            for model, name in (("meta/llama", "llama"), ("alias", "llama"), ("qwen", "qwen")):
                body = json.dumps({"model": model, "messages": [], "x": "\u00e4"})
                response = await http.post("/v1/chat/completions?a=b%20c", content=body, headers={"x-own": "1"})
                assert (response.status_code, response.json()) == (418, {"by": name})
                assert response.headers["retry-after"] == "7" and "x-request-id" not in response.headers
                request, received = apps[name].received[-1]
                assert received == body.encode() and request.headers["x-own"] == "1"
                assert request.url.query == "a=b%20c" and request.method == "POST"

    asyncio.run(run())


def test_a_compressed_body_is_forwarded_decompressed() -> None:
    async def run() -> None:
        apps, seen = models(), list[ForwardedRequest]()
        body = json.dumps({"model": "qwen", "messages": [{"role": "user", "content": "Hello"}]}).encode()
        async with client(ingress(apps, seen)) as http:
            headers = {"content-encoding": "gzip"}
            response = await http.post("/v1/chat/completions", content=gzip.compress(body), headers=headers)
            assert (response.status_code, response.json()) == (418, {"by": "qwen"})
            request, received = apps["qwen"].received[-1]
            assert received == body and "content-encoding" not in request.headers
            assert request.headers["content-length"] == str(len(body))
            assert isinstance(seen[-1], PromptRequest) and seen[-1].prompt == "Hello"
            for encoding, content, status in (
                ("br", body, 415), ("gzip", body, 400), ("gzip", gzip.compress(bytes(5000)), 413),
            ):  # fmt: skip
                headers = {"content-encoding": encoding}
                response = await http.post("/v1/chat/completions", content=content, headers=headers)
                assert response.status_code == status and response.json()["error"]["message"]
            assert response.status_code == 413 and len(apps["qwen"].received) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "key", "status", "message", "code"),
    [
        (
            {"model": "gpt"},
            "all",
            404,
            "'gpt' does not exist; this server serves 'llama' and 'qwen'",
            "model_not_found",
        ),
        ({"model": ["gpt"]}, "l", 404, "this server serves 'llama'", "model_not_found"),
        ({}, "all", 400, "model is required; this server serves 'llama' and 'qwen'", None),
        ([], "all", 400, "the body is not a JSON object", None),
        ("{", "all", 400, "the body is not valid JSON", "invalid_json"),
        ({"model": "gpt", "messages": "a" * 1000}, "all", 413, "1000 bytes", None),
    ],
)
def test_a_request_for_no_model_gets_an_error_of_openai_s_form(
    body: Any, key: str, status: int, message: str, code: str | None
) -> None:
    async def run() -> None:
        async with client(ingress(models()), key) as http:
            content = body if isinstance(body, str) else json.dumps(body)
            response = await http.post("/v1/chat/completions", content=content)
            error = response.json()["error"]
            assert response.status_code == status and message in error["message"] and error["code"] == code, error

    asyncio.run(run())


def test_the_models_are_those_of_the_client_s_api_key() -> None:
    async def run() -> None:
        app = ingress(models())
        for key, names in (("all", ["llama", "qwen"]), ("q", ["qwen"])):
            async with client(app, key) as http:
                assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == names
                assert (await http.get("/v1/models/qwen")).json() == {"id": "qwen"}
                assert (await http.get("/v1/models/gpt")).status_code == 404
        async with client(app, "wrong") as http:
            for response in (await http.get("/v1/models"), await http.get("/v1/models/gpt")):
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert (await http.post("/v1/chat/completions", json={"model": "gpt"})).status_code == 401

    asyncio.run(run())


def test_other_routes_answer_for_all_models_or_name_their_paths() -> None:
    async def run() -> None:
        async with client(ingress(models())) as http:
            assert (await http.get("/ready")).text == "ready" and (await http.get("/health")).status_code == 200
            assert (await http.get("/v1/responses/of-qwen")).json() == {"by": "qwen"}
            assert (await http.get("/v1/responses/unknown")).status_code == 404
            assert (await http.get("/v1/responses/of-qwen-2?deny=llama")).json() == {"by": "qwen"}
            assert (await http.get("/v1/responses/unknown?deny=llama")).status_code == 401
            unknown = await http.post("/chat/completions", json={})
            assert unknown.status_code == 404
            assert unknown.json()["error"]["message"].endswith(
                "use /llama/... or /qwen/... Did you mean /v1/chat/completions?"
            )
            assert (await http.put("/v1/models")).status_code == 405
            returned = await http.get("/llama/v1/models", headers={"x-tcdeploy-ingress": "1"})
            assert returned.status_code == 503 and "is not running" in returned.json()["error"]["message"]

    asyncio.run(run())


@pytest.mark.parametrize("headers", [(), ((b"authorization", b"Bearer wrong"),)])
def test_no_body_is_read_without_a_key_of_one_of_the_models(headers: Headers) -> None:
    async def run() -> None:
        async def receive() -> Message:
            raise AssertionError("the body is read")

        events: list[Message] = []

        async def send(event: Message) -> None:
            events.append(event)

        names = {name: IngressModel((name,), api_keys=tuple(keys)) for name, keys in KEYS.items()}
        app = Ingress(names, lambda name, request: respond(models()[name].app, request)).app
        await app(ForwardedRequest("POST", "/v1/completions", headers=headers).scope(), receive, send)
        assert events[0]["status"] == 401 and (b"www-authenticate", b"Bearer") in events[0]["headers"]
        async with client(app, key="q") as http:
            assert (await http.post("/v1/chat/completions", json={"model": "qwen"})).json() == {"by": "qwen"}
            assert (await http.get("/ready")).status_code == 200

    asyncio.run(run())


def test_a_body_that_exceeds_a_limit_is_not_called_invalid_json() -> None:
    async def run() -> None:
        names = {"llama": IngressModel(("llama",))}
        app = models()["llama"].app
        async with client(Ingress(names, lambda name, request: respond(app, request), 1 << 20).app) as http:
            error = (await http.post("/v1/completions", json={"prompt": [[1]] * 30_000})).json()["error"]
        assert "24000" in error["message"] and "JSON" not in error["message"] and error["code"] != "invalid_json"

    asyncio.run(run())


def test_names_that_would_hide_a_route_are_reserved() -> None:
    routes = Ingress({}, lambda name, request: respond(models()["llama"].app, request))._routes()
    assert {route.path.split("/")[1] for route in routes} < set(ROUTE_NAMES)


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


@pytest.mark.parametrize("is_sole", [False, True])
def test_a_stream_is_passed_on_event_by_event_and_a_disconnect_aborts_it(is_sole: bool) -> None:
    async def run() -> None:
        apps = models()
        app = ingress(apps)
        if is_sole:
            app = single_model_ingress("llama", lambda name, request: respond(apps[name].app, request))
        body = {"model": "meta/llama", "stream": True}
        async with asyncio.timeout(10):
            whole, abandoned = Connection(app, body), Connection(app, body)
            for connection in (whole, abandoned):
                assert (await connection.events.get())["status"] == 200
                assert (await connection.events.get())["body"] == b"data: 1\n\n"
            abandoned.disconnect()
            await apps["llama"].aborted.wait()
            await abandoned.task
            apps["llama"].go_on.set()
            assert (await whole.events.get())["body"] == b"data: [DONE]\n\n"
            await whole.task

    asyncio.run(run())


def failing(events: list[Message]) -> Callable[..., AsyncGenerator[list[Message], None]]:
    async def forward(_: str, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        if events:
            yield events
        raise ApiError(503, "it has gone", code="gone")

    return forward


def test_a_server_that_fails_ends_a_stream_with_an_error_event() -> None:
    async def run() -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        events = [start, {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}]
        async with client(Ingress({"m": IngressModel(("m",))}, failing(events)).app) as http:
            chat = (await http.post("/v1/chat/completions", json={"model": "m"})).text.split("\n\n")
            assert chat[0] == "data: 1" and chat[2:] == ["data: [DONE]", ""]
            assert json.loads(chat[1].removeprefix("data: "))["error"]["code"] == "gone"
            messages = (await http.post("/v1/messages", json={"model": "m"})).text.split("\n\n")
            assert messages[1].startswith('event: error\ndata: {"type": "error"')
        async with client(Ingress({"m": IngressModel(("m",))}, failing([])).app) as http:
            response = await http.post("/v1/chat/completions", json={"model": "m"})
            assert response.status_code == 503 and response.json()["error"]["message"] == "it has gone"
            assert (await http.get("/ready")).status_code == 503

    asyncio.run(run())


def test_only_a_model_with_a_request_router_gets_the_prompt_which_is_not_sent_to_the_replica() -> None:
    async def run() -> None:
        seen: list[ForwardedRequest] = []
        async with client(ingress(models(), seen)) as http:
            for model in ("qwen", "alias"):
                await http.post("/v1/chat/completions", json={"model": model, "messages": [{"content": "Hello"}]})
            await http.post("/v1/chat/completions", json={"model": "qwen", "messages": []})
        assert [getattr(request, "prompt", None) for request in seen] == ["Hello", None, None]
        sent = pickle.loads(pickle.dumps(seen[0]))
        assert isinstance(sent, PromptRequest) and "prompt" not in sent.__dict__
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


@contextlib.asynccontextmanager
async def http_server(handler: Callable[[aiohttp.web.Request], Any]) -> AsyncIterator[str]:
    app = aiohttp.web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = aiohttp.web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/llama"
    finally:
        await runner.cleanup()


def test_http_passes_on_requests_and_responses_and_turns_texts_of_a_proxy_into_errors() -> None:
    received: list[tuple[str, dict[str, str], bytes]] = []
    ended = asyncio.Event()

    async def handler(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        received.append((request.raw_path, dict(request.headers), await request.read()))
        if request.path == "/llama/ready":
            return aiohttp.web.Response(text="loading", status=503)
        if request.path == "/llama/full":
            return aiohttp.web.Response(text="dropped", status=503, headers={"retry-after": "3"})
        response = aiohttp.web.StreamResponse(headers={"x-own": "1", "content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return response

    async def run() -> None:
        headers = (
            (b"x-sent", b"\xc3\xa4"),
            (b"host", b"client"),
            (b"connection", b"close"),
            (b"content-length", b"99"),
        )
        async with asyncio.timeout(20), http_server(handler) as url, http_session() as session:
            stream = forward_over_http(
                session, url, ForwardedRequest("POST", "/v1/a b/\u00e4?", b"q=%20", headers, b"body")
            )
            async with contextlib.aclosing(stream) as events:
                [start], [first] = await anext(events), await anext(events)
            await ended.wait()
            assert start["status"] == 200 and (b"x-own", b"1") in start["headers"] and first["body"] == b"data: 1\n\n"
            path, names, body = received[0]
            assert (path, body) == ("/llama/v1/a%20b/%C3%A4%3F?q=%20", b"body")
            assert names.keys() == {"Host", "x-sent", "Content-Length", "Connection"} and names["x-sent"] == "\u00e4"
            with pytest.raises(ApiError) as not_text:
                await anext(forward_over_http(session, url, ForwardedRequest("GET", "/", headers=((b"x-a", b"\xe4"),))))
            assert (not_text.value.status, not_text.value.message) == (400, "the header x-a is not UTF-8")
            ready = [event async for events in forward_over_http(session, url, ForwardedRequest("GET", "/ready"))
                     for event in events]  # fmt: skip
            assert ready[0]["status"] == 503 and ready[1]["body"] == b"loading"
            with pytest.raises(ApiError) as full:
                await anext(forward_over_http(session, url, ForwardedRequest("GET", "/full")))
            assert (full.value.status, full.value.message) == (503, "dropped")
            assert full.value.headers == {"retry-after": "3"}
            with socket.create_server(("127.0.0.1", 0)) as unused:
                port = unused.getsockname()[1]
            with pytest.raises(ApiError) as refused:
                await anext(forward_over_http(session, f"http://127.0.0.1:{port}", ForwardedRequest("GET", "/")))
            assert refused.value.status == 503 and refused.value.code == "unreachable"

    asyncio.run(run())
