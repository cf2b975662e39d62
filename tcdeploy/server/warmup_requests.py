"""Warm-up requests before /ready, so that no client waits for first-time work: one of each kind but structured output.

They pass through the routes and the engine like any request, with separate metrics, so that the counters of requests
and generated tokens start at zero. The counters of engine steps (`bucket_hits`) include their steps. Without these
requests, the slowest of the first ten requests had its first token after 28 ms instead of 17 (H100,
docs/performance-log.md). Their seed is fixed: sampled tokens, and so the number of steps, are the same in every start.

No warm-up request uses a grammar, because the grammar tables take 0.9 s for a large vocabulary, in which llguidance
holds the GIL. They are built once no request has been open for GRAMMAR_IDLE_S, or by the first request that needs them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from typing import Any

from starlette.types import ASGIApp, Message

from tcdeploy.server.api import make_app
from tcdeploy.server.generate.admission import Admission
from tcdeploy.server.server_state import ServerState
from tcdeploy.server.service import Service

GRAMMAR_IDLE_S = 1.0
IDLE_POLL_S = 0.1
log = logging.getLogger("tcdeploy.server")
SHORT_AND_SEEDED = {"max_tokens": 4, "seed": 0}
COMPLETION = {"prompt": [0], "ignore_eos": True, **SHORT_AND_SEEDED}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], **SHORT_AND_SEEDED}
SAMPLED = {  # everything that a step may compute outside its compiled program
    **COMPLETION, "temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.1, "logit_bias": {"0": 1}, "logprobs": 1
}  # fmt: skip
ASGI_SCOPE = {
    "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
    "scheme": "http", "root_path": "", "query_string": b"", "client": None, "server": None,
    "headers": [(b"content-type", b"application/json")],
}  # fmt: skip


async def send_warmup_requests(service: Service) -> None:
    """Failures are logged and ignored: a chat template may reject the message, for example."""
    app = make_app(_separate_state(service))
    requests = [("/v1/completions", COMPLETION, stream) for stream in (True, False)]
    if service.tokenizer.tokenizer.chat_template:
        requests += [("/v1/chat/completions", CHAT, stream) for stream in (True, False)]
    requests.append(("/v1/completions", SAMPLED, False))
    for path, body, stream in requests:
        try:
            status = await _post(app, path, {**body, "stream": stream})
        except Exception as error:  # Starlette responds with 500 and raises the exception again
            log.warning("the warm-up request to %s failed: %s: %s", path, type(error).__name__, error)
        else:
            log.log(logging.DEBUG if status == 200 else logging.WARNING, "warm-up request to %s: %d", path, status)


async def build_grammar_tables_when_idle(service: Service) -> None:
    """Build the grammar tables once no request has been open for GRAMMAR_IDLE_S, unless a request has built them.

    Returns without building them if the server drains or fails, or if grammars are not available.
    """
    admission, idle_s = service.admission, 0.0
    while service.structured_output.needs_tables and not admission.closed_reason:
        if idle_s >= GRAMMAR_IDLE_S:
            await service.structured_output.build_tables()
            return
        await asyncio.sleep(IDLE_POLL_S)
        idle_s = 0.0 if admission.num_admitted else idle_s + IDLE_POLL_S


def _separate_state(service: Service) -> ServerState:
    """The same model with its own metrics and admission, and without API keys, root path and access log."""
    settings = dataclasses.replace(service.settings, api_keys=(), root_path="", log_requests="off")
    admission = Admission(0)
    admission.open(max_running=1)
    state = ServerState(settings, service.worker, admission)
    state.service = dataclasses.replace(service, settings=settings, admission=admission, metrics=state.metrics)
    return state


async def _post(app: ASGIApp, path: str, body: dict[str, Any]) -> int:
    """The HTTP status. The response body is discarded."""
    incoming: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    statuses: list[int] = []

    async def receive() -> Message:
        if not incoming:
            await asyncio.Event().wait()  # never disconnects
        return incoming.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app({**ASGI_SCOPE, "path": path, "raw_path": path.encode()}, receive, send)
    return statuses[0]
