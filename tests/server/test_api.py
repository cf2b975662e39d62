"""Properties of all responses, on direct routes and on Starlette's: OpenAI's errors, a request id, authentication."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tcdeploy.engine.generation_defaults import GenerationDefaults
from tcdeploy.engine.schedule.scheduler import SchedulerStats
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.step.launch_timer import LaunchLock
from tcdeploy.server.api import make_app
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest, CompletionRequest
from tcdeploy.server.apis.openai.validation import ModelLimits, params_of_choices, to_sampling_params
from tcdeploy.server.generate.admission import Admission
from tcdeploy.server.generate.tokenization import Prompt
from tcdeploy.server.http.request_parsing import parse
from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.service import ServerState, Service
from tcdeploy.server.settings import ServerSettings

COMPLETION = ("POST", "/v1/completions", {"prompt": [1]})
CHAT = ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
MODELS = ("GET", "/v1/models", None)


def fail(*_: object) -> None:
    raise RuntimeError("out of order")


class FailingService(Service):
    def model_card(self, name: str) -> dict[str, Any]:
        raise RuntimeError("out of order")


def send_request(
    state: ServerState, method: str, path: str, body: Any, *, raises: bool = False, **headers: str
) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(state), raise_app_exceptions=raises)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(send())


def fake_engine_thread(**attributes: Any) -> Any:
    return SimpleNamespace(
        failure=None,
        canary=None,
        stats=SchedulerStats(0, 0, 0, 0, 0),
        launch_lock=LaunchLock(),
        **attributes,
    )


@pytest.fixture
def state() -> ServerState:
    """A ready server whose tokenizer and model card raise RuntimeError."""
    settings = ServerSettings(model="tiny", api_keys=("other", "secret"))
    admission, metrics, engine_thread = Admission(1), Metrics(), fake_engine_thread()
    admission.open(1)
    service = FailingService(
        settings=settings, deployment=None, engine_thread=engine_thread, admission=admission, metrics=metrics,
        prompt_tokenizer=SimpleNamespace(prompts=fail, tokenizer=None), vocabulary=None, limits=ModelLimits(64, 100),
        structured_output=None, tools=None, missed_shapes=None, compiles_at_load=0, system_fingerprint="fp_0",
    )  # type: ignore[arg-type]  # fmt: skip
    return ServerState(settings, engine_thread, admission, metrics, service=service)


def loading_state(**settings: Any) -> ServerState:
    return ServerState(ServerSettings(model="tiny", **settings), fake_engine_thread(), Admission(1))


@pytest.mark.parametrize("request_line", [COMPLETION, CHAT, MODELS])
def test_an_unexpected_error_is_500_is_logged_and_releases_the_admission(request_line: Any, state: ServerState) -> None:
    response = send_request(state, *request_line, authorization="Bearer secret")
    assert (response.status_code, response.json()["error"]["message"]) == (500, "RuntimeError: out of order")
    assert state.admission.num_admitted == 0
    with pytest.raises(RuntimeError, match="out of order"):  # is raised again, so that uvicorn logs it
        send_request(state, *request_line, raises=True, authorization="Bearer secret")


@pytest.mark.parametrize("request_line", [COMPLETION, CHAT, MODELS])
def test_every_response_has_a_request_id_and_requires_the_key(request_line: Any, state: ServerState) -> None:
    rejected = send_request(state, *request_line)
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (401, "invalid_api_key")
    assert len(rejected.headers["x-request-id"]) == 32 and rejected.headers["www-authenticate"] == "Bearer"
    accepted = send_request(state, *request_line, **{"authorization": "Bearer secret", "x-request-id": "mine"})
    assert accepted.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("authorization", "is_accepted"),
    [
        ("bearer secret", True), ("BEARER  secret", True), ("Bearer Secret", False), ("Basic secret", False),
        ("Bearer", False), ("secret", False), ("Bearer secret x", False), ("", False),
    ],
)  # fmt: skip
def test_the_scheme_of_the_key_is_accepted_in_any_case(
    authorization: str, is_accepted: bool, state: ServerState
) -> None:
    response = send_request(state, "GET", "/version", None, authorization=authorization)
    assert response.status_code == (200 if is_accepted else 401)


@pytest.mark.parametrize(("key", "status"), [("secret", 503), ("other", 503), ("Secret", 401), ("", 401)])
def test_the_key_is_also_accepted_as_anthropics_clients_send_it(key: str, status: int, state: ServerState) -> None:
    state.admission.close("draining")
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    response = send_request(state, "POST", "/v1/messages", body, **{"x-api-key": key})
    kind = "overloaded_error" if status == 503 else "authentication_error"
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("out of order"), asyncio.CancelledError()], ids=repr)
def test_a_failure_after_submission_cancels_the_request_and_releases_the_admission(
    error: BaseException, stream: bool, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure happens before a response exists that could close the request."""
    submitted: list[Any] = []
    cancelled: list[Any] = []

    async def prompts(_: object) -> list[Prompt]:
        return [Prompt([1], None)]

    def fail_in_choice(*_: object) -> None:
        assert state.admission.num_admitted == len(submitted) == 1, "the engine has the request"
        raise error

    assert state.service is not None
    engine_thread = fake_engine_thread(submit=submitted.append, cancel=cancelled.append)
    tokenizer: Any = SimpleNamespace(prompts=prompts, tokenizer=None)
    state.service = dataclasses.replace(state.service, engine_thread=engine_thread, prompt_tokenizer=tokenizer)
    monkeypatch.setattr("tcdeploy.server.generate.active_request.ActiveRequest._new_choice", fail_in_choice)
    body = {"prompt": [1], "stream": stream}
    if isinstance(error, asyncio.CancelledError):
        with pytest.raises(asyncio.CancelledError):
            send_request(state, "POST", "/v1/completions", body, authorization="Bearer secret")
    else:
        response = send_request(state, "POST", "/v1/completions", body, authorization="Bearer secret")
        assert response.status_code == 500
    assert state.admission.num_admitted == 0 and cancelled == submitted


class CountingTokenizer:
    """Records how many choices are admitted while it works."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self.num_admitted = admission, []  # type: ignore[var-annotated]

    async def tokenize(self, _: object) -> list[int]:
        self.num_admitted.append(self._admission.num_admitted)
        return [1]

    async def tokens_json(self, ids: list[int]) -> bytes:
        return b'{"tokens": [1]}'

    async def detokenize(self, _: object) -> str:
        self.num_admitted.append(self._admission.num_admitted)
        return "a"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_requests_whose_bodies_have_not_arrived_occupy_no_place_in_the_queue(path: str, state: ServerState) -> None:
    """They would keep the queue full, and delay a drain, until the body timeout."""
    content = b'{"prompt": "a", "tokens": [1]}'
    tokenizer: Any = CountingTokenizer(state.admission)
    assert state.service is not None and state.admission.limit == 2
    state.service = dataclasses.replace(state.service, prompt_tokenizer=tokenizer)

    async def run() -> None:
        transport = httpx.ASGITransport(make_app(state), raise_app_exceptions=False)
        headers = {"authorization": "Bearer secret", "content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            num_waiting, has_arrived, may_continue = 0, asyncio.Event(), asyncio.Event()

            async def slow_content() -> AsyncIterator[bytes]:
                nonlocal num_waiting
                num_waiting += 1
                if num_waiting == 3:
                    has_arrived.set()
                await may_continue.wait()
                yield content

            slow = [asyncio.ensure_future(client.post(path, content=slow_content())) for _ in range(3)]
            await asyncio.wait_for(has_arrived.wait(), 10)
            assert state.admission.num_admitted == 0
            assert (await client.post(path, content=content)).status_code == 200
            state.admission.close("draining")
            refused = await client.post(path, content=slow_content())
            assert (refused.status_code, num_waiting) == (503, 3), "a closed server does not wait for the body"
            may_continue.set()
            assert {(await response).json()["error"]["code"] for response in slow} == {"draining"}

    asyncio.run(run())
    assert tokenizer.num_admitted == [1] and state.admission.num_admitted == 0


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_full_queue_rejects_tokenizer_requests(path: str, state: ServerState) -> None:
    state.admission.acquire(2)
    body = {"prompt": "a", "tokens": [1]}
    response = send_request(state, "POST", path, body, authorization="Bearer secret")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
    assert state.admission.num_admitted == 2


def test_a_loading_server_answers_operations_and_rejects_the_rest() -> None:
    state = loading_state()
    for path in ("/health", "/metrics", "/status", "/", "/docs", "/version", "/openapi.json"):
        assert send_request(state, "GET", path, None).status_code == 200, path
    ready = send_request(state, "GET", "/ready", None)
    assert (ready.status_code, ready.json()["status"]) == (503, "loading")
    tokenize = ("POST", "/tokenize", {"prompt": "a"})
    for request_line in (COMPLETION, CHAT, MODELS, tokenize, ("GET", "/tokenizer_info", None)):
        response = send_request(state, *request_line)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading"), request_line
        assert response.headers["retry-after"] == "1"
    assert state.admission.rejections["loading"] == 2, "completions are counted"


def test_ready_says_where_the_start_is_while_the_server_loads() -> None:
    state = loading_state()
    before = send_request(state, "GET", "/ready", None).json()
    assert before.pop("seconds") >= 0 and before.pop("status") == "loading"
    assert list(before) == ["stage", "step", "step_number", "num_steps", "detail", "seconds_left"]
    assert not any(before.values()), "nothing is known yet"
    state.progress.stage("load")
    state.progress.expect({"load": 1e6, "compile": 500.0})
    state.progress.stage("compile")
    state.progress.step(2, 4, "prefill:32")
    state.progress.detail("package 3 of 5")
    document = send_request(state, "GET", "/ready", None).json()
    assert 400 < document.pop("seconds_left") < 500, "the rest of `compile`"
    assert document.pop("seconds") < 60
    assert document == {
        "status": "loading", "stage": "compile", "step": "prefill:32", "step_number": 2, "num_steps": 4,
        "detail": "package 3 of 5",
    }  # fmt: skip
    state.admission.close("draining")
    assert send_request(state, "GET", "/ready", None).json() == {"status": "draining"}


def test_a_body_over_the_limit_is_413() -> None:
    state = loading_state()
    state.settings = dataclasses.replace(state.settings, max_body_bytes=100)
    response = send_request(state, "POST", "/v1/completions", {"prompt": "a" * 100})
    assert (response.status_code, response.json()["error"]["message"]) == (413, "the body is larger than 100 bytes")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1, "max_tokens": 1000}, "temperature"),
        ({"max_tokens": -1, "min_tokens": 3}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"max_tokens": 1000, "min_tokens": 2000}, "max_tokens"),
        ({"seed": 2**70, "n": 2}, "seed"),
        ({"top_p": 3, "stop_token_ids": [1000]}, "top_p"),
    ],
)
def test_of_two_invalid_fields_one_is_named(fields: dict[str, Any], param: str) -> None:
    body = httpx.Request("POST", "http://test", json={"prompt": [1], **fields}).content
    with pytest.raises(ApiError) as rejection:
        to_sampling_params(parse(CompletionRequest, body), 1, ModelLimits(64, 100))
    assert rejection.value.body["error"]["param"] == param


@pytest.mark.parametrize(
    ("request_type", "fields", "prompt_length", "requested", "param"),
    [
        (
            CompletionRequest, {"max_tokens": 60}, 5,
            "you requested 65 tokens (5 in the prompt, 60 in the completion)", "max_tokens",
        ),
        (CompletionRequest, {}, 64, "you requested 80 tokens (64 in the prompt, 16 in the completion)", "prompt"),
        (
            ChatRequest, {"max_tokens": 9}, 70,
            "you requested 79 tokens (70 in the messages, 9 in the completion)", "messages",
        ),
        (ChatRequest, {}, 64, "your messages resulted in 64 tokens", "messages"),
        (
            ChatRequest, {"max_completion_tokens": 60, "max_tokens": 1}, 5,
            "you requested 65 tokens (5 in the messages, 60 in the completion)", "max_completion_tokens",
        ),
    ],
)  # fmt: skip
def test_a_request_beyond_the_context_is_refused_in_the_words_that_clients_search_for(
    request_type: Any, fields: dict[str, Any], prompt_length: int, requested: str, param: str
) -> None:
    """litellm raises ContextWindowExceededError if the message contains its first words, in any case."""
    prompt: dict[str, Any] = {"messages": CHAT[2]["messages"]} if request_type is ChatRequest else {"prompt": [1]}
    request = request_type.model_validate({**prompt, **fields})
    with pytest.raises(ApiError) as rejection:
        to_sampling_params(request, prompt_length, ModelLimits(64, 100))
    place = "messages" if request_type is ChatRequest else "prompt"
    place += " or completion" if "completion" in requested else ""
    assert rejection.value.status == 400 and rejection.value.body["error"] == {
        "message": f"This model's maximum context length is 64 tokens. However, {requested}. "
        f"Please reduce the length of the {place}.",
        "type": "invalid_request_error", "param": param, "code": "context_length_exceeded",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 6), ({"max_tokens": 4}, 4), ({"min_tokens": 2}, 2), ({"min_tokens": 0}, 0),
        ({"response_format": {"type": "json_object"}}, 0),
    ],
)  # fmt: skip
def test_the_models_minimum_length_is_the_default_of_free_text(fields: dict[str, Any], expected: int) -> None:
    request = parse(CompletionRequest, httpx.Request("POST", "http://test", json={"prompt": [1], **fields}).content)
    limits = ModelLimits(64, 100, GenerationDefaults(min_new_tokens=6, stop_token_ids=(2,)))
    assert to_sampling_params(request, 1, limits).min_tokens == expected


def test_choices_of_a_seeded_prompt_use_consecutive_seeds() -> None:
    first = SamplingParams(seed=2**63 - 2, temperature=0.5, logit_bias=((3, -1.0),))
    seeds = [2**63 - 2, 2**63 - 1, 0]
    assert params_of_choices(first, 3) == [dataclasses.replace(first, seed=seed) for seed in seeds]
    assert params_of_choices(dataclasses.replace(first, seed=None), 2) == [dataclasses.replace(first, seed=None)] * 2


def test_uvicorns_send_waits_only_for_the_write_buffer() -> None:
    """If this fails, `is_write_paused` is not sufficient, and an event may wait without a time-out."""
    source = inspect.getsource(RequestResponseCycle.send)
    assert source.count("await ") == source.count("await self.flow.drain()") == 1
    assert source.index("if self.flow.write_paused") < source.index("await ")
