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
from tcdeploy.server.http import BoundedProtocol
from tcdeploy.server.warmup_requests import rehearse
from tcdeploy.server.service import Service
from tcdeploy.server.worker import EngineDied, Worker

if TYPE_CHECKING:  # torch takes seconds, in which the socket already answers
    from tcdeploy.pipeline import Deployment

POLL_SECONDS = 0.05
TOLD_SECONDS = 1.0  # for a client to be told of an end
SHUTDOWN_SECONDS = 3  # for connections to close by themselves
OnReady: TypeAlias = "Callable[[Deployment, str], None]"


@dataclass(frozen=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model: str = ""
    max_queued: int = 256
    drain_timeout: float = 30.0
    stall_timeout: float = 30.0


def run_server(settings: Settings, deploy: Callable[[], Deployment], on_ready: OnReady) -> int:
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
        self, settings: Settings, listener: socket.socket, deploy: Callable[[], Deployment], on_ready: OnReady
    ) -> None:
        self.settings, self._listener, self._on_ready = settings, listener, on_ready
        self.worker = Worker(deploy, self._take_up, self._ready, self._died)
        self.admission = Admission(settings.max_queued)
        self.service = Service(self.worker, self.admission, settings.model, settings.api_key)
        self.service.stall_timeout = settings.stall_timeout
        self._ended = asyncio.Event()
        self._is_draining = False
        self._error: BaseException | None = None

    async def run(self) -> int:
        config = uvicorn.Config(
            make_app(self.service), interface="asgi3", http=BoundedProtocol, ws="none", lifespan="off",
            log_level="warning", access_log=False, timeout_keep_alive=60, proxy_headers=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )  # fmt: skip
        http = uvicorn.Server(config)
        http.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        http.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        listening = asyncio.create_task(http.serve(sockets=[self._listener]))
        self.worker.start()
        await asyncio.wait({listening, asyncio.create_task(self._ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
        http.should_exit = True
        await listening
        self.worker.stop()
        if self._error is not None and self.worker.deployment is None:
            raise self._error
        return 1 if self._error is not None else 0

    def _take_up(self, deployment: Deployment) -> None:
        self.service.take_up(deployment)

    def _ready(self) -> None:
        self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        deployment, start = self.worker.deployment, time.perf_counter()
        assert deployment is not None
        await rehearse(self.service)
        deployment.stage_seconds["rehearse"] = time.perf_counter() - start
        self.admission.open(deployment.plan.decode_buckets[-1].size)
        self._on_ready(deployment, self.address)

    @property
    def address(self) -> str:
        """With the port that was given, where any was asked for (0)."""
        port = self._listener.getsockname()[1]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _died(self, error: BaseException) -> None:
        self._error = error
        self.admission.close("dead")
        asyncio.get_running_loop().call_later(TOLD_SECONDS, self._ended.set)  # the streams tell their clients first

    def _signalled(self) -> None:
        if self._is_draining:
            os._exit(1)
        self._is_draining = True
        self.admission.close("draining")
        asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.settings.drain_timeout
        while self.admission.inside and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        self.worker.abandon(EngineDied("the server is shutting down", "shutting_down"))
        while self.admission.inside and asyncio.get_running_loop().time() < deadline + 2 * TOLD_SECONDS:
            await asyncio.sleep(POLL_SECONDS)
        self._ended.set()
