"""Warm-up requests cover each kind of request, and leave no trace in the metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tcdeploy.server import warmup_requests
from tcdeploy.server.admission import Admission
from tcdeploy.server.metrics import Metrics
from tcdeploy.server.service import Service
from tcdeploy.server.settings import ServerSettings


def test_a_ready_server_has_sent_them_and_its_counters_are_zero(serve: Callable[..., Any]) -> None:
    with serve() as fresh:
        assert fresh.metric("startup_seconds", stage="warmup_requests") > 0
        assert not [line for line in fresh.stderr if "warm-up request" in line.lower() and "stages" not in line]
        for name in ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count"):
            assert fresh.metric(name) == 0
        assert fresh.metric("request_success_total", finished_reason="length") == 0
        status = httpx.get(f"{fresh.address}/status").json()
        for name in ("finished", "generation_tokens", "kv_cache_usage", "running"):
            assert status[name] == 0, name


@pytest.mark.parametrize("has_grammars", [False, True])
@pytest.mark.parametrize("template", [None, "a template"])
def test_one_request_of_each_kind_is_sent(
    template: str | None, has_grammars: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, seeds = [], []

    async def post(app: object, path: str, body: dict[str, object]) -> int:
        seeds.append(body.get("seed"))
        sent.append((path, body["stream"], "temperature" in body, "response_format" in body))
        return 200

    monkeypatch.setattr(warmup_requests, "_post", post)
    asyncio.run(warmup_requests.send_warmup_requests(service_with(template, has_grammars)))
    paths = ["/v1/completions", *(["/v1/chat/completions"] if template else [])]
    assert sent == [
        *[(path, stream, False, False) for path in paths for stream in (True, False)],
        ("/v1/completions", False, True, False),
        *([("/v1/completions", False, False, True)] if has_grammars else []),
    ]
    assert seeds == [0] * len(sent), "an unseeded JSON object ends one step early in 3% of the starts"


def test_failures_are_logged_and_do_not_stop_the_start(
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
        *["the warm-up request to /v1/completions failed: RuntimeError: out of order"] * 2,
        "warm-up request to /v1/chat/completions: 400",
        "the warm-up request to /v1/completions failed: RuntimeError: out of order",
    ]


def service_with(template: str | None, has_grammars: bool = False) -> Service:
    return Service(
        settings=ServerSettings(model="model"), deployment=None, worker=SimpleNamespace(failure=None),
        admission=Admission(1), metrics=Metrics(),
        tokenizer=SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template)), vocabulary=None, limits=None,
        structured_output=SimpleNamespace(is_available=has_grammars), tools=None, missed_shapes=None,
        compiles_at_load=0,
    )  # type: ignore[arg-type]  # fmt: skip
