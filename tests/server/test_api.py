"""What every answer has, whichever way it went: through the framework's routes or past them."""

from __future__ import annotations

import asyncio
import inspect
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tcdeploy.server.admission import Admission
from tcdeploy.server.api import make_app
from tcdeploy.server.protocol import ApiError, CompletionRequest, parse
from tcdeploy.server.service import Prompt, Service
from tcdeploy.server.validation import ModelLimits, to_sampling_params

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
    assert service.admission.num_admitted == 0
    assert asked is MODELS or "a request failed" in caplog.text  # the framework's routes raise it on to uvicorn


@pytest.mark.parametrize("asked", [COMPLETION, CHAT, MODELS])
def test_every_answer_has_a_request_id_and_wants_the_key(asked: Any, service: Service) -> None:
    refused = ask(service, *asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert len(refused.headers["x-request-id"]) == 32
    named = ask(service, *asked, **{"authorization": "Bearer secret", "x-request-id": "mine"})
    assert named.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", [RuntimeError("out of order"), asyncio.CancelledError()])
def test_what_fails_when_the_engine_has_it_leaves_nobody_inside(
    end: BaseException, stream: bool, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is an answer that could close it."""
    given: list[Any] = []
    taken_back: list[Any] = []

    async def prompts(_: object) -> list[Prompt]:
        return [Prompt([1], None)]

    def fail(*_: object) -> None:
        assert service.admission.num_admitted == len(given) == 1, "the engine has it"
        raise end

    monkeypatch.setattr(service, "prompts", prompts)
    service.limits = ModelLimits(64, 100, ())
    service.worker = SimpleNamespace(failure=None, submit=given.append, cancel=taken_back.append)  # type: ignore[assignment]
    service.vocabulary, service.tokenizer = None, None  # type: ignore[assignment]
    monkeypatch.setattr("tcdeploy.server.active_request.Completions", fail)
    body = {"prompt": [1], "stream": stream}
    if isinstance(end, asyncio.CancelledError):
        with pytest.raises(asyncio.CancelledError):
            ask(service, "POST", "/v1/completions", body, authorization="Bearer secret")
    else:
        assert ask(service, "POST", "/v1/completions", body, authorization="Bearer secret").status_code == 500
    assert service.admission.num_admitted == 0 and taken_back == given


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"temperature": -1, "max_tokens": 1000}, "temperature"),
        ({"max_tokens": -1, "min_tokens": 3}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"max_tokens": 1000, "min_tokens": 2000}, "max_tokens"),
        ({"seed": 2**70, "n": 2}, "seed"),
        ({"top_p": 3, "stop_token_ids": [1000]}, "stop_token_ids"),
    ],
)
def test_of_two_wrong_fields_one_is_named(asked: dict[str, Any], named: str) -> None:
    request = parse(CompletionRequest, httpx.Request("POST", "http://test", json={"prompt": [1], **asked}).content)
    with pytest.raises(ApiError) as refused:
        to_sampling_params(request, 1, ModelLimits(64, 100, ()))
    assert refused.value.body["error"]["param"] == named


def test_uvicorn_s_send_waits_for_the_client_alone() -> None:
    """Where this fails, `is_write_paused` tells too little, and an event may wait without a time-out."""
    source = inspect.getsource(RequestResponseCycle.send)
    assert source.count("await ") == source.count("await self.flow.drain()") == 1
    assert source.index("if self.flow.write_paused") < source.index("await ")
