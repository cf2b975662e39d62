"""Warm-up requests cover each kind of request, and leave no trace in the metrics."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tcdeploy.host.progress import NullProgress
from tcdeploy.server import model_server
from tcdeploy.server.generate import admission as admission_module
from tcdeploy.server.generate.admission import Admission
from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.service import Service
from tcdeploy.server.settings import ServerSettings
from tests.server.conftest import stages_of

REPORT_IMPORT = """
import sys
from tcdeploy.server import model_server
model_server.GRAMMAR_IDLE_S = float("inf")

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "llguidance._lib":
            print("llguidance is imported", file=sys.stderr, flush=True)

sys.meta_path.insert(0, Finder())
"""


def test_a_ready_server_has_sent_them_and_its_counters_are_zero(serve: Callable[..., Any]) -> None:
    with serve() as fresh:
        assert fresh.metric("startup_seconds", stage="warmup_requests") > 0
        assert not [line for line in fresh.stderr if "warm-up request " in line.lower()], "no warnings"
        assert stages_of(fresh.stderr)[-1] == "warm-up requests, 5 of 5"
        for name in ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count"):
            assert fresh.metric(name) == 0
        assert fresh.metric("request_success_total", finished_reason="length") == 0
        status = httpx.get(f"{fresh.address}/status").json()
        for name in ("finished", "generation_tokens", "kv_cache_usage", "running"):
            assert status[name] == 0, name


@pytest.mark.parametrize("template", [None, "a template"])
def test_one_request_of_each_kind_is_sent(template: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, seeds = [], []

    async def post(app: object, path: str, body: dict[str, object]) -> int:
        seeds.append(body.get("seed"))
        sent.append((path, body["stream"], "temperature" in body, "response_format" in body))
        return 200

    monkeypatch.setattr(model_server, "_post", post)
    asyncio.run(model_server.send_warmup_requests(service_with(template, needs_tables=True), NullProgress()))
    paths = ["/v1/completions", *(["/v1/chat/completions"] if template else [])]
    assert sent == [
        *[(path, stream, False, False) for path in paths for stream in (True, False)],
        ("/v1/completions", False, True, False),
    ]
    assert seeds == [0] * len(sent)


async def build_tables(service: Service, events: dict[int, Callable[[], None]]) -> tuple[int, int]:
    """(polls, number of times that the tables were built), of a server whose start took a minute.

    `events`: callbacks by the number of the poll during which they are called.
    """
    polls, builds, now = 0, [], time.monotonic() + 60

    async def sleep(seconds: float) -> None:
        nonlocal polls, now
        polls, now = polls + 1, now + seconds
        events.get(polls, lambda: None)()
        assert polls < 300

    async def build() -> None:
        assert not service.admission.num_admitted
        builds.append(polls)

    service.structured_output.build_tables = build  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(model_server.asyncio, "sleep", sleep)
        monkeypatch.setattr(admission_module, "time", SimpleNamespace(monotonic=lambda: now))
        service.admission.open(1)
        await model_server.build_grammar_tables_when_idle(service)
    return polls, len(builds)


def test_grammar_tables_are_built_when_the_server_has_been_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that begins and ends between two polls counts: polls that missed such requests built the tables between
    them, and the next ones waited for 0.4 to 0.9 s."""
    monkeypatch.setattr(model_server, "GRAMMAR_IDLE_S", 10 * model_server.IDLE_POLL_S)
    service = service_with(None, needs_tables=True)

    def short_request() -> None:
        service.admission.acquire(1)
        service.admission.release(1)

    events = {2: lambda: service.admission.acquire(1), 5: lambda: service.admission.release(1)}
    polls, builds = asyncio.run(build_tables(service, {**events, 9: short_request, 18: short_request}))
    assert builds == 1 and polls in (28, 29), "ten polls without a request, from the 18th on"


def test_grammar_tables_are_not_built_if_the_server_drains_or_a_request_has_built_them() -> None:
    for change in (
        lambda service: service.admission.close("draining"),
        lambda service: setattr(service.structured_output, "needs_tables", False),
    ):
        service = service_with(None, needs_tables=True)
        assert asyncio.run(build_tables(service, {3: functools.partial(change, service)})) == (3, 0)


def test_grammar_tables_are_built_after_ready(serve: Callable[..., Any]) -> None:
    """The module of the tables is imported when they are built, and a request that needs them waits for that."""
    with serve(script=REPORT_IMPORT) as server:
        assert not any("llguidance is imported" in line for line in server.stderr)
        body = {"prompt": [0], "max_tokens": 2, "response_format": {"type": "json_object"}}
        assert httpx.post(f"{server.address}/v1/completions", json=body, timeout=60).status_code == 200
        assert any("llguidance is imported" in line for line in server.stderr)


def test_failures_are_logged_and_do_not_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses = iter([200, 400])

    async def post(app: object, path: str, body: dict[str, object]) -> int:
        if path == "/v1/completions":
            raise RuntimeError("out of order")
        return next(statuses)

    monkeypatch.setattr(model_server, "_post", post)
    with caplog.at_level(logging.WARNING, "tcdeploy.server"):
        asyncio.run(model_server.send_warmup_requests(service_with("a template"), NullProgress()))
    assert [record.getMessage() for record in caplog.records] == [
        *["the warm-up request to /v1/completions failed: RuntimeError: out of order"] * 2,
        "warm-up request to /v1/chat/completions: 400",
        "the warm-up request to /v1/completions failed: RuntimeError: out of order",
    ]


def service_with(template: str | None, needs_tables: bool = False) -> Service:
    return Service(
        settings=ServerSettings(model="model"), deployment=None, engine_thread=SimpleNamespace(failure=None),
        admission=Admission(1), metrics=Metrics(),
        prompt_tokenizer=SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template)), vocabulary=None,
        limits=None, structured_output=SimpleNamespace(needs_tables=needs_tables), tools=None, missed_shapes=None,
        compiles_at_load=0,
        system_fingerprint="fp_0",
    )  # type: ignore[arg-type]  # fmt: skip
