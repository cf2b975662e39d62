"""Runs the server: from a recipe to a listening process, and from a signal to its exit code.

The socket accepts connections before the model is loaded: /health reports liveness, and /ready returns 200 once every
bucket is warm and checked and the warm-up requests have completed, until the server drains. The first SIGTERM or SIGINT
drains: new requests are rejected, running ones may finish within the drain time-out, and the rest end with an error
event. A second signal exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import uvicorn
from starlette.types import ASGIApp

try:
    import uvloop
except ImportError:  # not available on every platform
    uvloop = None  # type: ignore[assignment]

from tcdeploy.errors import UsageError
from tcdeploy.gc_policy import freeze_gc_after_startup
from tcdeploy.server.admission import Admission
from tcdeploy.server.api import make_app
from tcdeploy.server.canary import CanarySchedule
from tcdeploy.server.hot_path import shorten_switch_interval
from tcdeploy.server.http import http_protocol
from tcdeploy.server.metrics import Metrics
from tcdeploy.server.server_state import ServerState
from tcdeploy.server.service import Service, build_service
from tcdeploy.server.settings import ServerSettings
from tcdeploy.server.status_history import INTERVAL_S
from tcdeploy.server.telemetry import Telemetry
from tcdeploy.server.warmup_requests import build_grammar_tables_when_idle, send_warmup_requests
from tcdeploy.server.worker import EngineDeadError, Worker

if TYPE_CHECKING:  # importing torch takes seconds; the socket answers before
    from tcdeploy.deployment import Deployment

DRAIN_POLL_S = 0.05
ERROR_DELIVERY_S = 1.0  # time for the last error events to reach the clients
GRACEFUL_SHUTDOWN_S = 3  # uvicorn's time for open connections
CANCEL_S = 0.05  # time for cancelled requests to end, for which uvicorn does not wait
OnReady: TypeAlias = "Callable[[Deployment, str], None]"  # (deployment, address)


def run_server(settings: ServerSettings, deploy: Callable[[], Deployment], on_ready: OnReady) -> int:
    """Serve until a signal or the death of the engine. Returns the exit code.

    Raises UsageError if the address cannot be bound, and the exception of `deploy` if the model cannot be loaded.
    """
    _check_certificate(settings)
    listener = _listen(settings.host, settings.port)
    if settings.hot_path.short_switch_interval:
        shorten_switch_interval()

    async def run() -> int:
        return await _Server(settings, listener, deploy, on_ready).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        return runner.run(run())


def _check_certificate(settings: ServerSettings) -> None:
    """Raises UsageError if the files of TLS cannot be used: uvicorn reads them later, and raises its own errors."""
    if settings.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=_refuse_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = " and ".join(filter(None, [settings.ssl_certfile, settings.ssl_keyfile]))
        raise UsageError(
            f"the certificate cannot be used: {files}: {error}",
            "--ssl-certfile and --ssl-keyfile are PEM files of a certificate chain and its unencrypted private key",
        ) from error


def _refuse_password() -> str:
    """OpenSSL would otherwise ask for it on the terminal."""
    raise ValueError("the private key is encrypted")


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this address. Raises UsageError, whose hint names the option to change."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        is_host = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        raise UsageError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}",
            "--host 127.0.0.1 listens on this machine only, --host 0.0.0.0 on all interfaces; "
            "--port 0 selects a free port"
            if is_host
            else "--port 0 selects a free port",
        ) from error


class _Server:
    def __init__(
        self, settings: ServerSettings, listener: socket.socket, deploy: Callable[[], Deployment], on_ready: OnReady
    ) -> None:
        self.settings, self._listener, self._deploy, self._on_ready = settings, listener, deploy, on_ready
        self.worker = Worker(self._load, self._on_loaded, self._on_engine_death, settings.hot_path)
        self.admission = Admission(settings.max_queued, settings.max_waiting_bytes)
        self.metrics = Metrics(settings.model, settings.metrics_prefix)
        self.state = ServerState(settings, self.worker, self.admission, self.metrics)
        if settings.otlp_endpoint:
            self.state.telemetry = Telemetry(settings.otlp_endpoint, settings.model)
        self._exit_event = asyncio.Event()
        self._is_draining = False
        self._error: BaseException | None = None

    async def run(self) -> int:
        app = make_app(self.state)
        self._http_server = http_server = uvicorn.Server(_uvicorn_config(app, self.settings))
        # Signals are handled below. If uvicorn renames this method, drain is skipped and test_faults.py fails.
        http_server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        listening = asyncio.create_task(http_server.serve(sockets=[self._listener]))
        sampling = asyncio.create_task(self._sample_history())
        self.worker.start()
        await asyncio.wait(
            {listening, asyncio.create_task(self._exit_event.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        http_server.should_exit = True
        await listening
        await asyncio.sleep(CANCEL_S)
        app.close()
        sampling.cancel()
        self.worker.stop()
        if self.worker.swaps is not None:
            self.worker.swaps.stop()
        if self.state.telemetry is not None:
            self.state.telemetry.close()
        if self._error is not None and self.state.service is None:
            raise self._error
        return 1 if self._error is not None else 0

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
        self._on_ready(deployment, self.address)
        await build_grammar_tables_when_idle(service)

    @property
    def address(self) -> str:
        """The URL of the server, with the port that was bound."""
        port = self._listener.getsockname()[1]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        scheme = "https" if self.settings.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{self.settings.root_path}"

    def _on_engine_death(self, error: BaseException) -> None:
        self._error = error
        self.admission.close("dead")
        loop = asyncio.get_running_loop()
        loop.call_later(ERROR_DELIVERY_S, self._exit_event.set)

    def _on_signal(self) -> None:
        if self._is_draining:
            os._exit(1)
        self._is_draining = True
        self.admission.close("draining")
        # Idle connections are closed now, the others after their response. A client with a connection pool sends
        # its next request on a new connection, which a load balancer routes to another replica.
        for connection in list(self._http_server.server_state.connections):
            connection.shutdown()
        asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.settings.drain_timeout
        while self.admission.num_admitted and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        self.worker.fail_all(EngineDeadError("the server is shutting down", "shutting_down"))
        while self.admission.num_admitted and asyncio.get_running_loop().time() < deadline + 2 * ERROR_DELIVERY_S:
            await asyncio.sleep(DRAIN_POLL_S)
        self._exit_event.set()


def _record_canary(deployment: Deployment, settings: ServerSettings) -> CanarySchedule:
    """Record the canary right after the parity checks have passed.

    Raises CompileError with `canary_strict` if no case is repeatable.
    """
    from tcdeploy.engine.canary import Canary  # imports torch, which is loaded by now

    start = time.perf_counter()
    canary = Canary(deployment.engine)
    deployment.stage_seconds["canary"] = time.perf_counter() - start
    schedule = CanarySchedule(canary, deployment.engine, settings.canary_interval)
    if settings.canary_strict:
        schedule.require_cases()
    return schedule


def _uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app, interface="asgi3", http=http_protocol(settings.stall_timeout), ws="none", lifespan="off",
        log_level="warning", access_log=False, timeout_keep_alive=60, proxy_headers=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S, ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )  # fmt: skip
