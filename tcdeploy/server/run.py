"""From a recipe to a listening process, and from a signal to its end.

The socket answers from the first second: /health says that the process lives, /ready that it may be used, which is
when every bucket is warm and checked. The first SIGTERM or Ctrl-C drains: nothing new comes in, what runs may finish
within the drain time-out, the rest gets an error event. The second ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import uvicorn

try:
    import uvloop
except ImportError:  # it is not made for every system
    uvloop = None  # type: ignore[assignment]

from tcdeploy.errors import UsageError
from tcdeploy.server.admission import Admission
from tcdeploy.server.api import make_app
from tcdeploy.server.http import http_protocol
from tcdeploy.server.service import Service
from tcdeploy.server.warmup_requests import send_warmup_requests
from tcdeploy.server.worker import EngineDeadError, Worker

if TYPE_CHECKING:  # torch takes seconds, in which the socket already answers
    from tcdeploy.pipeline import Deployment

DRAIN_POLL_S = 0.05
ERROR_DELIVERY_S = 1.0  # for a client to be told of an end
GRACEFUL_SHUTDOWN_S = 3  # for connections to close by themselves
OnReady: TypeAlias = "Callable[[Deployment, str], None]"


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model: str = ""
    max_queued: int = 256
    drain_timeout: float = 30.0
    stall_timeout: float = 30.0


def run_server(settings: ServerSettings, deploy: Callable[[], Deployment], on_ready: OnReady) -> int:
    """Serve until a signal or the engine's death; gives the exit code.

    Raises what `deploy` raised where it never came to be ready, and UsageError where it cannot listen.
    """
    listener = _listen(settings.host, settings.port)

    async def run() -> int:
        return await _Server(settings, listener, deploy, on_ready).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        return runner.run(run())


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host} port {port}: {error}", "--port 0 takes one that is free") from error


class _Server:
    def __init__(
        self, settings: ServerSettings, listener: socket.socket, deploy: Callable[[], Deployment], on_ready: OnReady
    ) -> None:
        self.settings, self._listener, self._on_ready = settings, listener, on_ready
        self.worker = Worker(deploy, self._attach, self._on_engine_ready, self._on_engine_death)
        self.admission = Admission(settings.max_queued)
        self.service = Service(self.worker, self.admission, settings.model, settings.api_key)
        self.service.stall_timeout = settings.stall_timeout
        self._exit_event = asyncio.Event()
        self._is_draining = False
        self._error: BaseException | None = None

    async def run(self) -> int:
        config = uvicorn.Config(
            make_app(self.service), interface="asgi3", http=http_protocol(), ws="none", lifespan="off",
            log_level="warning", access_log=False, timeout_keep_alive=60, proxy_headers=False,
            timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        )  # fmt: skip
        http = uvicorn.Server(config)
        http.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        http.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        listening = asyncio.create_task(http.serve(sockets=[self._listener]))
        self.worker.start()
        await asyncio.wait(
            {listening, asyncio.create_task(self._exit_event.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        http.should_exit = True
        await listening
        self.worker.stop()
        if self._error is not None and self.worker.deployment is None:
            raise self._error
        return 1 if self._error is not None else 0

    def _attach(self, deployment: Deployment) -> None:
        self.service.attach(deployment)

    def _on_engine_ready(self) -> None:
        self._warm_up_task = asyncio.create_task(self._warm_up_and_open())

    async def _warm_up_and_open(self) -> None:
        deployment, start = self.worker.deployment, time.perf_counter()
        assert deployment is not None
        await send_warmup_requests(self.service)
        deployment.stage_seconds["warmup_requests"] = time.perf_counter() - start
        self.admission.open(deployment.plan.decode_buckets[-1].size)
        self._on_ready(deployment, self.address)

    @property
    def address(self) -> str:
        """With the port that was given, where any was asked for (0)."""
        port = self._listener.getsockname()[1]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _on_engine_death(self, error: BaseException) -> None:
        self._error = error
        self.admission.close("dead")
        asyncio.get_running_loop().call_later(
            ERROR_DELIVERY_S, self._exit_event.set
        )  # the streams tell their clients first

    def _on_signal(self) -> None:
        if self._is_draining:
            os._exit(1)
        self._is_draining = True
        self.admission.close("draining")
        asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.settings.drain_timeout
        while self.admission.num_admitted and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        self.worker.fail_all(EngineDeadError("the server is shutting down", "shutting_down"))
        while self.admission.num_admitted and asyncio.get_running_loop().time() < deadline + 2 * ERROR_DELIVERY_S:
            await asyncio.sleep(DRAIN_POLL_S)
        self._exit_event.set()
