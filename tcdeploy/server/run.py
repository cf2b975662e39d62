"""Runs the server: from a recipe to a listening process, and from a signal to its exit code.

The socket accepts connections before the model is loaded. The first SIGTERM or SIGINT drains: new requests are
rejected, running ones may finish within the drain time-out, and the rest end with an error event. A second signal exits
at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import uvicorn

try:
    import uvloop
except ImportError:  # not available on every platform
    uvloop = None  # type: ignore[assignment]

from tcdeploy.errors import UsageError
from tcdeploy.host.progress import StageProgress
from tcdeploy.server.http.listener import Listener, connection_limit, http_protocol
from tcdeploy.server.model_server import ERROR_DELIVERY_S, ModelServer
from tcdeploy.server.settings import ServerSettings

if TYPE_CHECKING:  # importing torch takes seconds; the socket answers before
    from tcdeploy.start.deployment import Deployment

GRACEFUL_SHUTDOWN_S = 3  # uvicorn's time for open connections
CANCEL_S = 0.05  # time for cancelled requests to end, for which uvicorn does not wait
OnReady: TypeAlias = "Callable[[Deployment, str], None]"  # (deployment, address)


def run_server(
    settings: ServerSettings, deploy: Callable[[], Deployment], on_ready: OnReady, progress: StageProgress | None = None
) -> int:
    """Serve until a signal or the death of the engine. Returns the exit code. Raises UsageError if the address cannot
    be bound, and the exception of `deploy` if the model cannot be loaded. `progress`: that of `deploy`; gets what
    follows `deploy`, and the shutdown.
    """
    _check_certificate(settings)
    listener = Listener(_listen(settings.host, settings.port), connection_limit())

    async def run() -> int:
        return await _Process(settings, listener, deploy, on_ready, progress or StageProgress()).run()

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
        hosts = "--host 127.0.0.1 listens on this machine only, --host 0.0.0.0 on all interfaces; " if is_host else ""
        reason = getattr(error, "strerror", None) or error
        hint = f"{hosts}--port 0 selects a free port"
        raise UsageError(f"cannot listen on {host} port {port}: {reason}", hint) from error


class _Process:
    """The process of `tcdeploy serve`: the socket, uvicorn, signals and the exit code of one ModelServer."""

    def __init__(
        self, settings: ServerSettings, listener: Listener, deploy: Callable[[], Deployment], on_ready: OnReady,
        progress: StageProgress,
    ) -> None:  # fmt: skip
        self.settings, self._listener, self._progress = settings, listener, progress
        self._server = ModelServer(
            settings, deploy, lambda deployment: on_ready(deployment, self.address), self._fail, progress
        )
        self._exit_event = asyncio.Event()
        self._is_draining = False
        self._error: BaseException | None = None

    async def run(self) -> int:
        settings = self.settings
        config = uvicorn.Config(
            self._server.app, interface="asgi3", http=http_protocol(settings.stall_timeout, self._listener), ws="none",
            lifespan="off", log_level="warning", access_log=False, timeout_keep_alive=60, proxy_headers=False,
            timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S, ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )  # fmt: skip
        config.load()
        self._http_server = http_server = uvicorn.Server(config)
        # Signals are handled below. If uvicorn renames this method, drain is skipped and test_faults.py fails.
        http_server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        uses_listener = not isinstance(config.http, str)  # False: uvicorn's own class, which it cannot observe
        serving = asyncio.create_task(http_server.serve(sockets=[] if uses_listener else [self._listener.socket]))
        if uses_listener:
            new_connection: Any = config.http_protocol_class
            self._listener.start(lambda: new_connection(config, http_server.server_state, app_state={}), config.ssl)
        self._server.start()
        await asyncio.wait({serving, asyncio.create_task(self._exit_event.wait())}, return_when=asyncio.FIRST_COMPLETED)
        http_server.should_exit = True
        if uses_listener:
            self._listener.close()
        await serving
        await asyncio.sleep(CANCEL_S)
        self._server.close()
        if self._error is not None and self._server.state.service is None:
            raise self._error
        self._progress.message("stopped" if self._error is None else f"stopped: the engine died: {self._error}")
        return 1 if self._error is not None else 0

    @property
    def address(self) -> str:
        """The URL of the server, with the port that was bound."""
        port = self._listener.port
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        scheme = "https" if self.settings.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{self.settings.root_path}"

    def _fail(self, error: BaseException) -> None:
        self._error = error
        asyncio.get_running_loop().call_later(ERROR_DELIVERY_S, self._exit_event.set)

    def _on_signal(self) -> None:
        if self._is_draining:
            self._progress.message("stopped at once, by a second signal")
            os._exit(1)
        self._is_draining = True
        self._server.admission.close("draining")
        # Idle connections are closed now, the others after their response. A client with a connection pool sends its
        # next request on a new connection, which a load balancer routes to another replica.
        for connection in list(self._http_server.server_state.connections):
            getattr(connection, "drain", connection.shutdown)()  # uvicorn's own class has no `drain`
        asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._server.drain()
        self._exit_event.set()
