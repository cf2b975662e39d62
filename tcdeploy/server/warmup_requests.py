"""Answers to nobody, before the server is ready: what a process does for the first time takes longer.

Without it the slowest of the first ten answers began after 28 ms, and after 17 with it, the median being 15 (H100, 8B's
shape, scripts/bench-serve, a card each). It goes the way of every request, through the routes, to the engine and back,
with books of its own: metrics begin at nothing.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from typing import Any

from starlette.types import ASGIApp, Message

from tcdeploy.server.admission import Admission
from tcdeploy.server.api import make_app
from tcdeploy.server.metrics import Metrics
from tcdeploy.server.service import Service
from tcdeploy.server.status import RecentStats

log = logging.getLogger("tcdeploy.server")
MAX_TOKENS = 4
COMPLETION = {"prompt": [0], "max_tokens": MAX_TOKENS, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": MAX_TOKENS}
SAMPLED = {  # whatever a step may have to do beside its program
    **COMPLETION, "temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.1, "logit_bias": {"0": 1}, "logprobs": 1
}  # fmt: skip
JSON_OBJECT = {"prompt": [0], "max_tokens": MAX_TOKENS, "response_format": {"type": "json_object"}}
ASGI_SCOPE = {
    "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
    "scheme": "http", "root_path": "", "query_string": b"", "client": None, "server": None,
    "headers": [(b"content-type", b"application/json")],
}  # fmt: skip


async def send_warmup_requests(service: Service) -> None:
    """Ask once of each kind. What fails is logged: the model may refuse what we ask."""
    app = make_app(_with_separate_metrics(service))
    requests = [("/v1/completions", COMPLETION, stream) for stream in (True, False)]
    if service.tokenizer.chat_template:
        requests += [("/v1/chat/completions", CHAT, stream) for stream in (True, False)]
    requests.append(("/v1/completions", SAMPLED, False))
    if service.structured_output.is_available:
        requests.append(("/v1/completions", JSON_OBJECT, False))
    for path, body, stream in requests:
        try:
            status = await _post(app, path, {**body, "stream": stream})
        except Exception as error:  # the framework answers 500, and raises it too
            log.warning("the rehearsal of %s failed: %s: %s", path, type(error).__name__, error)
        else:
            log.log(logging.DEBUG if status == 200 else logging.WARNING, "rehearsed %s: %d", path, status)


def _with_separate_metrics(service: Service) -> Service:
    stand_in = copy.copy(service)
    stand_in.api_key, stand_in.metrics, stand_in.recent, stand_in.admission = (
        None,
        Metrics(),
        RecentStats(),
        Admission(0),
    )
    stand_in.admission.open(max_running=1)
    return stand_in


async def _post(app: ASGIApp, path: str, body: dict[str, Any]) -> int:
    """The status; the answer is dropped."""
    incoming: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    statuses: list[int] = []

    async def receive() -> Message:
        if not incoming:
            await asyncio.Event().wait()  # this client never leaves
        return incoming.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app({**ASGI_SCOPE, "path": path, "raw_path": path.encode()}, receive, send)
    return statuses[0]
