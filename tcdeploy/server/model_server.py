"""Serves one model within an event loop: loads it in the engine thread, warms it up, drains and closes it.

run.py adds the socket, uvicorn and the signals of `tcdeploy serve`; scale/replica.py runs a ModelServer in Ray Serve.

Before /ready, warm-up requests pass through the routes and the engine, so that no client waits for first-time work: one
of each kind. Without them, the slowest of the first ten requests had its first token after 28 ms instead of 17 (H100,
docs/performance-log.md). They have separate metrics, but the counters of engine steps (`bucket_steps`) include theirs.
Their seed is fixed, so the number of steps is the same in every start. None uses a grammar, because the grammar tables
take 0.9 s for 128,000 tokens, in which llguidance holds the GIL. They are built when no request has been open for
GRAMMAR_IDLE_S, counted from /ready on, or by the first request that needs them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message

from tcdeploy.engine.thread.canary_schedule import CanarySchedule
from tcdeploy.engine.thread.engine_thread import EngineThread
from tcdeploy.host.gc_policy import freeze_gc_after_startup
from tcdeploy.host.progress import Progress, StageProgress
from tcdeploy.server.api import make_app
from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.generate.admission import Admission
from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.observe.status import INTERVAL_S
from tcdeploy.server.observe.telemetry import Telemetry
from tcdeploy.server.package_builder import PackageBuilder
from tcdeploy.server.service import ServerState, Service, build_service
from tcdeploy.server.settings import ServerSettings

if TYPE_CHECKING:  # importing torch takes seconds; the app answers before
    from tcdeploy.start.deployment import Deployment

# Each time the engine thread releases the GIL, it may wait this long to reacquire it; Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.0005
DRAIN_POLL_S, DRAIN_REPORT_S = 0.05, 5.0
ERROR_DELIVERY_S = 1.0  # time for the last error events to reach the clients
GRAMMAR_IDLE_S = 10.0  # a request that arrives while the grammar tables are built waits for them
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


class ModelServer:
    """An ASGI app, `app`, and the engine thread behind it, in which `deploy` runs. Completions get 503 until the model
    is warm. On the event loop, `on_ready` is called once every bucket is warm and checked and the warm-up requests have
    completed, and `on_failure` if `deploy` raises or a step fails.
    """

    def __init__(
        self, settings: ServerSettings, deploy: Callable[[], Deployment], on_ready: Callable[[Deployment], None],
        on_failure: Callable[[BaseException], None], progress: StageProgress,
    ) -> None:  # fmt: skip
        """`progress`: also receives the reports of `deploy`."""
        self._progress = progress
        self.settings, self._deploy, self._on_ready, self._on_failure = settings, deploy, on_ready, on_failure
        self.engine_thread = EngineThread(self._load, self._on_loaded, self._on_engine_death)
        self.admission = Admission(settings.max_queued, settings.max_waiting_bytes)
        self.metrics = Metrics(settings.model, settings.metrics_prefix)
        self.state = ServerState(settings, self.engine_thread, self.admission, self.metrics, progress=progress)
        if settings.otlp_endpoint:
            self.state.telemetry = Telemetry(settings.otlp_endpoint, settings.model)
        self.app = make_app(self.state)
        self._history_task: asyncio.Task[None] | None = None
        self._package_builder: PackageBuilder | None = None

    def start(self) -> None:
        """Start to load the model."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._history_task = asyncio.create_task(self._sample_history())
        self.engine_thread.start()

    async def drain(self) -> None:
        """Reject new requests, and wait until the running ones have ended, at most `drain_timeout`; the rest fail."""
        if self._progress.position.stage:
            self._progress.finish(is_complete=False)
        self.admission.close("draining")
        loop = asyncio.get_running_loop()
        deadline, report_at = loop.time() + self.settings.drain_timeout, 0.0
        while self.admission.num_admitted and loop.time() < deadline:
            if loop.time() >= report_at:
                seconds = f"{deadline - loop.time():.0f} s left"
                self._progress.message(f"draining {_requests(self.admission.num_admitted)}, {seconds}")
                report_at = loop.time() + DRAIN_REPORT_S
            await asyncio.sleep(DRAIN_POLL_S)
        if left := self.admission.num_admitted:
            self._progress.message(f"stopped waiting for {_requests(left)} after --drain-timeout")
        self.engine_thread.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        while self.admission.num_admitted and loop.time() < deadline + 2 * ERROR_DELIVERY_S:
            await asyncio.sleep(DRAIN_POLL_S)

    def close(self) -> None:
        """Stop the engine thread after its present step, and write what logs and traces have buffered."""
        self.app.close()
        if self._history_task is not None:
            self._history_task.cancel()
        self.engine_thread.stop()
        if self.engine_thread.swaps is not None:
            self.engine_thread.swaps.stop()
        if self._package_builder is not None:
            self._package_builder.stop()
        if self.state.telemetry is not None:
            self.state.telemetry.close()

    async def _sample_history(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.state.history.sample(self.state.figures(), self.metrics.recent)

    def _load(self) -> Service:
        deployment = self._deploy()
        if deployment.swaps is not None:
            self.engine_thread.start_swaps(deployment.swaps, partial(self._on_warm, deployment))
        else:
            self._start_canary(deployment)
        return build_service(deployment, self.settings, self.engine_thread, self.admission, self.metrics)

    def _on_warm(self, deployment: Deployment) -> None:
        """In the engine thread, once all eager steps are replaced: the canary compares results of programs."""
        self._start_canary(deployment)
        self._progress.finish()
        self._progress.message("all buckets run their programs")
        freeze_gc_after_startup()

    def _start_canary(self, deployment: Deployment) -> None:
        """Schedule the canary, if it is on; with --canary-strict, also record it.

        Raises CompileError if no case is repeatable.
        """
        if not self.settings.canary_interval:
            return
        from tcdeploy.engine.check.canary import Canary  # imports torch, which is loaded by now

        canary = CanarySchedule(Canary(deployment.engine), self.settings.canary_interval)
        if self.settings.canary_strict:
            self._progress.stage("canary")
            start = time.perf_counter()
            canary.record()
            deployment.stage_seconds["canary"] = time.perf_counter() - start
        self.engine_thread.canary = canary

    def _on_loaded(self, service: Service) -> None:
        self.state.service = service
        self._warmup_task = asyncio.create_task(self._warm_up_and_open(service))

    async def _warm_up_and_open(self, service: Service) -> None:
        start, deployment = time.perf_counter(), service.deployment
        self._progress.stage("warm-up requests")
        await send_warmup_requests(service, self._progress)
        deployment.stage_seconds["warmup_requests"] = time.perf_counter() - start
        freeze_gc_after_startup()
        self._progress.finish()
        self.admission.open(deployment.plan.decode_buckets[-1].size)
        self._on_ready(deployment)
        await build_grammar_tables_when_idle(service)
        if self.settings.build_packages:
            self._package_builder = PackageBuilder(deployment, self.admission)
            await self._package_builder.run()

    def _on_engine_death(self, error: BaseException) -> None:
        self.admission.close("dead")
        self._on_failure(error)


async def send_warmup_requests(service: Service, progress: Progress) -> None:
    """Failures are logged and ignored: a chat template may reject the message, for example."""
    app = make_app(_separate_state(service))
    requests = [("/v1/completions", COMPLETION, stream) for stream in (True, False)]
    if service.prompt_tokenizer.tokenizer.chat_template:
        requests += [("/v1/chat/completions", CHAT, stream) for stream in (True, False)]
    requests.append(("/v1/completions", SAMPLED, False))
    for number, (path, body, stream) in enumerate(requests, 1):
        progress.step(number, len(requests), path)
        try:
            status = await _post(app, path, {**body, "stream": stream})
        except Exception as error:  # Starlette responds with 500 and raises the exception again
            log.warning("the warm-up request to %s failed: %s: %s", path, type(error).__name__, error)
        else:
            log.log(logging.DEBUG if status == 200 else logging.WARNING, "warm-up request to %s: %d", path, status)


async def build_grammar_tables_when_idle(service: Service) -> None:
    """Build the grammar tables once no request has been open for GRAMMAR_IDLE_S, unless a request has built them, the
    server drains or fails, or grammars are not available.
    """
    admission = service.admission
    while service.structured_output.needs_tables and not admission.closed_reason:
        if admission.idle_seconds() >= GRAMMAR_IDLE_S:
            await service.structured_output.build_tables()
            return
        await asyncio.sleep(IDLE_POLL_S)


def _requests(count: int) -> str:
    """`count`: of choices, as Admission counts; most requests have one."""
    return "1 request" if count == 1 else f"{count} requests"


def _separate_state(service: Service) -> ServerState:
    """The same model with its own metrics and admission, and without API keys, root path and access log."""
    settings = dataclasses.replace(service.settings, api_keys=(), root_path="", log_requests="off")
    admission = Admission(0)
    admission.open(max_running=1)
    state = ServerState(settings, service.engine_thread, admission)
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
