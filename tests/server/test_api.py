"""What every answer has, whichever way it went: through the framework's routes or past them."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tcdeploy.server.admission import Admission
from tcdeploy.server.api import make_app
from tcdeploy.server.service import Service

COMPLETION = ("POST", "/v1/completions", {"prompt": [1]})
CHAT = ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
MODELS = ("GET", "/v1/models", None)


def ask(service: Service, method: str, path: str, body: Any, **headers: str) -> httpx.Response:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(answer())


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    """One in which whatever needs the model is out of order."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    made = Service(SimpleNamespace(failure=None, deployment=object()), Admission(1), "tiny", "secret")  # type: ignore[arg-type]
    made.admission.open(1)
    monkeypatch.setattr(made, "prompts", fail)
    monkeypatch.setattr(made, "model_card", fail)
    return made


@pytest.mark.parametrize("asked", [COMPLETION, CHAT, MODELS])
def test_what_nobody_expected_is_500_is_logged_and_leaves_nobody_inside(
    asked: Any, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "tcdeploy.server"):
        answer = ask(service, *asked, authorization="Bearer secret")
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "RuntimeError: out of order")
    assert service.admission.inside == 0
    assert asked is MODELS or "a request failed" in caplog.text  # the framework's routes raise it on to uvicorn


@pytest.mark.parametrize("asked", [COMPLETION, CHAT, MODELS])
def test_every_answer_has_a_request_id_and_wants_the_key(asked: Any, service: Service) -> None:
    refused = ask(service, *asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert len(refused.headers["x-request-id"]) == 32
    named = ask(service, *asked, **{"authorization": "Bearer secret", "x-request-id": "mine"})
    assert named.headers["x-request-id"] == "mine"
