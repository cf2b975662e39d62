"""HTTP requests are counted by route, and the access log has one line for each."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.routing import Route

from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.observe.request_log import LOG_DELAY_S, LoggedGeneration, RequestLog, set_logged_generation

ROUTES = [Route("/health", None, methods=["GET"]), Route("/v1/models/{name:path}", None, methods=["GET"])]  # type: ignore[arg-type]


class Logged:
    """Requests that have passed the middleware: its registry, and the lines of its log."""

    def __init__(self, caplog: pytest.LogCaptureFixture, log_format: Any) -> None:
        metrics, self._caplog = Metrics(), caplog
        self.registry = metrics.registry
        self.log = RequestLog(self._answer, ROUTES, metrics, log_format)
        self.status, self.usage, self.error, self.scope = 200, None, None, None
        caplog.set_level(logging.INFO, "tcdeploy.access")

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        if self.usage is not None:
            usage = self.usage
            set_logged_generation(scope, lambda: usage)
        if self.error is not None:
            raise self.error
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def request(self, method: str, path: str, request_id: str = "", waits: bool = True) -> str:
        """Returns X-Request-Id of the response. `waits`: until the request is logged, which is not done at once."""
        sent: list[Any] = []

        async def receive() -> Any: ...
        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"x-request-id", request_id.encode())] if request_id else []
        scope = {"type": "http", "method": method, "path": path, "client": ("10.0.0.1", 99), "headers": headers}

        async def run() -> None:
            num_lines = len(self.lines)
            try:
                await self.log(scope, receive, send)
            finally:
                if waits:
                    assert len(self.lines) == num_lines, "the next request of the client would wait for the line"
                    await asyncio.sleep(LOG_DELAY_S)

        asyncio.run(run())
        return str(dict(sent[0]["headers"])[b"x-request-id"].decode())

    def count(self, handler: str, method: str, status: str) -> float | None:
        labels = {"handler": handler, "method": method, "status": status}
        return self.registry.get_sample_value("http_requests_total", labels)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.name == "tcdeploy.access"]


def test_requests_are_counted_by_route_and_clients_create_no_series(caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog, "off")
    assert logged.count("/health", "GET", "2xx") == 0
    for method, path in (
        ("GET", "/health"), ("GET", "/v1/models/a"), ("GET", "/v1/models/b/c"), ("GET", "/x"), ("TRACE", "/y"),
    ):  # fmt: skip
        logged.request(method, path)
    logged.status = 503
    logged.request("GET", "/health")
    assert logged.count("/health", "GET", "2xx") == logged.count("/health", "GET", "5xx") == 1
    assert logged.count("/v1/models/{name}", "GET", "2xx") == 2
    assert logged.count("none", "GET", "2xx") == logged.count("none", "other", "2xx") == 1
    handlers = {
        sample.labels["handler"]
        for metric in logged.registry.collect()
        for sample in metric.samples
        if "handler" in sample.labels
    }
    assert handlers == {"/health", "/v1/models/{name}", "none"}
    assert logged.lines == []


def test_a_line_names_the_request_its_time_and_its_tokens(caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog, "json")
    logged.usage = LoggedGeneration(12, 34, ("stop", "", ""))
    logged.request("POST", "/v1/completions", request_id="id-1")
    [line] = map(json.loads, logged.lines)
    assert line.pop("milliseconds") >= 0 and line.pop("time") > 1e9
    assert line == {
        "client": "10.0.0.1:99", "method": "POST", "path": "/v1/completions", "status": 200, "request_id": "id-1",
        "prompt_tokens": 12, "completion_tokens": 34, "finish_reasons": {"stop": 1, "abort": 2},
    }  # fmt: skip


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_prompts_are_logged_only_if_they_are_given(log_format: Any, caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog, log_format)
    for prompts in ((), ("a\n10.0.0.2:1 GET /forged", "é")):
        logged.usage = LoggedGeneration(12, 34, ("stop",), prompts=prompts)
        logged.request("POST", "/v1/completions", request_id="id-1")
    without, with_prompts = logged.lines
    assert "prompts" not in without and "forged" not in without
    assert "\n" not in with_prompts
    if log_format == "json":
        assert json.loads(with_prompts)["prompts"] == ["a\n10.0.0.2:1 GET /forged", "é"]
    else:
        assert with_prompts.endswith(', request id-1, prompts ["a\\n10.0.0.2:1 GET /forged", "\\u00e9"]')


def test_a_client_cannot_add_lines_or_fields_or_long_ones(caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog, "text")
    logged.usage = LoggedGeneration(12, 34, ("stop", "", ""))
    logged.request(
        "GET", "/x\n10.0.0.2:1 GET /forged 200 1 ms" + "y" * 10_000, request_id="a, request b" + "z" * 10_000
    )
    [line] = logged.lines
    assert line.startswith("10.0.0.1:99 GET /x%0A10.0.0.2:1%20GET%20/forged%20200%201%20msyyy")
    assert ", 12 prompt tokens, 34 new tokens (stop, 2 abort), request a%2C%20request%20bzzz" in line
    assert len(line) < 600


def test_every_response_has_the_request_id_that_the_log_has(caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog, "text")
    assert logged.request("GET", "/health", request_id="mine") == "mine"
    made_up = logged.request("GET", "/health")
    assert len(made_up) == 32
    assert [line.rpartition(" ")[2] for line in logged.lines] == ["mine", made_up]


def test_a_closed_log_has_all_requests_once(caplog: pytest.LogCaptureFixture) -> None:
    """`close` runs before the event loop ends; requests that are cancelled later are logged at once."""
    logged = Logged(caplog, "text")
    for is_closed in (False, True):
        logged.request("GET", "/health", waits=False)
        assert len(logged.lines) == 2 * is_closed
        logged.log.close()
    assert len(logged.lines) == 2


@pytest.mark.parametrize("log_format", ["off", "text"])
def test_a_scope_does_not_keep_the_request_that_has_ended(log_format: Any, caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog, log_format)
    logged.usage = LoggedGeneration(12, 34, ("stop",))
    logged.request("POST", "/v1/completions")
    assert logged.scope is not None and not [key for key in logged.scope if key.startswith("tcdeploy")]


def test_a_client_that_disconnects_before_the_response_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    logged = Logged(caplog, "text")
    logged.error = RuntimeError("disconnected")
    with pytest.raises(RuntimeError):
        logged.request("GET", "/health")
    assert logged.count("/health", "GET", "4xx") == 1
    assert "/health 499 " in logged.lines[0]
