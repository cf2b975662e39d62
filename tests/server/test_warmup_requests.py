"""Before it is ready, a server has answered once of each kind; its books begin at nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tcdeploy.server import warmup_requests as warmup_requests
from tcdeploy.server.admission import Admission
from tcdeploy.server.service import Service


def test_it_has_answered_and_no_figure_tells_of_it(serve: Callable[..., Any]) -> None:
    with serve() as fresh:
        assert fresh.metric("startup_seconds", stage="warmup_requests") > 0
        assert not [line for line in fresh.stderr if "rehears" in line.lower() and "stages" not in line]
        for name in ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count"):
            assert fresh.metric(name) == 0
        assert fresh.metric("request_success_total", finished_reason="length") == 0
        status = httpx.get(f"{fresh.address}/status").json()
        assert (status["answers"], status["generation_tokens"], status["kv_cache_usage"], status["running"]) == (
            0,
            0,
            0,
            0,
        )


@pytest.mark.parametrize("has_grammars", [False, True])
@pytest.mark.parametrize("template", [None, "a template"])
def test_each_kind_is_asked(template: str | None, has_grammars: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def post(app: object, path: str, body: dict[str, object]) -> int:
        asked.append((path, body["stream"], "temperature" in body, "response_format" in body))
        return 200

    monkeypatch.setattr(warmup_requests, "_post", post)
    asyncio.run(warmup_requests.send_warmup_requests(service_with(template, has_grammars)))
    kinds = ["/v1/completions", *(["/v1/chat/completions"] if template else [])]
    assert asked == [
        *[(kind, stream, False, False) for kind in kinds for stream in (True, False)],
        ("/v1/completions", False, True, False),
        *([("/v1/completions", False, False, True)] if has_grammars else []),
    ]


def test_what_fails_is_said_and_keeps_nobody_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses = iter([200, 400])

    async def post(app: object, path: str, body: dict[str, object]) -> int:
        if path == "/v1/completions":
            raise RuntimeError("out of order")
        return next(statuses)

    monkeypatch.setattr(warmup_requests, "_post", post)
    with caplog.at_level(logging.WARNING, "tcdeploy.server"):
        asyncio.run(warmup_requests.send_warmup_requests(service_with("a template")))
    assert [record.getMessage() for record in caplog.records] == [
        *["the rehearsal of /v1/completions failed: RuntimeError: out of order"] * 2,
        "rehearsed /v1/chat/completions: 400",
        "the rehearsal of /v1/completions failed: RuntimeError: out of order",
    ]


def service_with(template: str | None, has_grammars: bool = False) -> Service:
    made = Service(SimpleNamespace(deployment=None, failure=None), Admission(1), "model")  # type: ignore[arg-type]
    made.tokenizer = SimpleNamespace(chat_template=template)
    made.structured_output = SimpleNamespace(is_available=has_grammars)  # type: ignore[assignment]
    return made
