"""Serves one model within an event loop: loads it in the engine thread, warms it up, drains and closes it.

run.py adds the socket, uvicorn and the signals of `tcdeploy serve`. scale/replica.py runs a ModelServer in a replica of
Ray Serve.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tcdeploy.host.gc_policy import freeze_gc_after_startup
from tcdeploy.server.api import make_app
from tcdeploy.server.generate.admission import Admission
from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.observe.recent_stats import INTERVAL_S
from tcdeploy.server.observe.telemetry import Telemetry
from tcdeploy.server.server_state import ServerState
from tcdeploy.server.service import Service, build_service
from tcdeploy.server.settings import ServerSettings
from tcdeploy.server.warmup_requests import build_grammar_tables_when_idle, send_warmup_requests
from tcdeploy.server.worker.canary import CanarySchedule
from tcdeploy.server.worker.worker import EngineDeadError, Worker

if TYPE_CHECKING:  # importing torch takes seconds; the app answers before
    from tcdeploy.start.deployment import Deployment

# Each time the engine thread releases the GIL, it may wait this long to reacquire it; Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.0005
DRAIN_POLL_S = 0.05
ERROR_DELIVERY_S = 1.0  # time for the last error events to reach the clients


class ModelServer:
    """An ASGI app, `app`, and the engine thread behind it.

    The app answers from the start; completions get 503 until the model is warm. `deploy` runs in the engine thread.
    On the event loop, `on_ready` is called once every bucket is warm and checked and the warm-up requests have
    completed, and `on_failure` if `deploy` raises or a step fails.
    """

    def __init__(
        self,
        settings: ServerSettings,
        deploy: Callable[[], Deployment],
        on_ready: Callable[[Deployment], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.settings, self._deploy, self._on_ready, self._on_failure = settings, deploy, on_ready, on_failure
        self.worker = Worker(self._load, self._on_loaded, self._on_engine_death)
        self.admission = Admission(settings.max_queued, settings.max_waiting_bytes)
        self.metrics = Metrics(settings.model, settings.metrics_prefix)
        self.state = ServerState(settings, self.worker, self.admission, self.metrics)
        if settings.otlp_endpoint:
            self.state.telemetry = Telemetry(settings.otlp_endpoint, settings.model)
        self.app = make_app(self.state)
        self._sampling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to load the model."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._sampling = asyncio.create_task(self._sample_history())
        self.worker.start()

    async def drain(self) -> None:
        """Reject new requests, and wait until the running ones have ended, at most `drain_timeout`; the rest fail."""
        self.admission.close("draining")
        deadline = asyncio.get_running_loop().time() + self.settings.drain_timeout
        while self.admission.num_admitted and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        self.worker.fail_all(EngineDeadError("the server is shutting down", "shutting_down"))
        while self.admission.num_admitted and asyncio.get_running_loop().time() < deadline + 2 * ERROR_DELIVERY_S:
            await asyncio.sleep(DRAIN_POLL_S)

    def close(self) -> None:
        """Stop the engine thread after its present step, and write what logs and traces have buffered."""
        self.app.close()
        if self._sampling is not None:
            self._sampling.cancel()
        self.worker.stop()
        if self.worker.swaps is not None:
            self.worker.swaps.stop()
        if self.state.telemetry is not None:
            self.state.telemetry.close()

    async def _sample_history(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.state.history.sample(self.state.figures(), self.metrics.recent)

    def _load(self) -> Service:
        """Runs in the engine thread."""
        deployment = self._deploy()
        if deployment.swaps is not None:
            self.worker.start_swaps(deployment.swaps, partial(self._on_warm, deployment))
        elif self.settings.canary_interval:
            self.worker.canary = _record_canary(deployment, self.settings)
        return build_service(deployment, self.settings, self.worker, self.admission, self.metrics)

    def _on_warm(self, deployment: Deployment) -> None:
        """Runs in the engine thread, while it is idle, once the programs have replaced all eager steps.

        The canary compares results of programs, which differ from those of eager steps.
        """
        if self.settings.canary_interval:
            self.worker.canary = _record_canary(deployment, self.settings)
        freeze_gc_after_startup()

    def _on_loaded(self, service: Service) -> None:
        self.state.service = service
        self._warmup_task = asyncio.create_task(self._warm_up_and_open(service))

    async def _warm_up_and_open(self, service: Service) -> None:
        start, deployment = time.perf_counter(), service.deployment
        await send_warmup_requests(service)
        deployment.stage_seconds["warmup_requests"] = time.perf_counter() - start
        freeze_gc_after_startup()
        self.admission.open(deployment.plan.decode_buckets[-1].size)
        self._on_ready(deployment)
        await build_grammar_tables_when_idle(service)

    def _on_engine_death(self, error: BaseException) -> None:
        self.admission.close("dead")
        self._on_failure(error)


def _record_canary(deployment: Deployment, settings: ServerSettings) -> CanarySchedule:
    """Record the canary right after the parity checks have passed.

    Raises CompileError with `canary_strict` if no case is repeatable.
    """
    from tcdeploy.engine.check.canary import Canary  # imports torch, which is loaded by now

    start = time.perf_counter()
    canary = Canary(deployment.engine)
    deployment.stage_seconds["canary"] = time.perf_counter() - start
    schedule = CanarySchedule(canary, deployment.engine, settings.canary_interval)
    if settings.canary_strict:
        schedule.require_cases()
    return schedule
