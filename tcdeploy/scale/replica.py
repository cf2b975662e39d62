"""One replica: a ModelServer in a process of Ray. Does not import Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tcdeploy import errors
from tcdeploy.bundle.cache_source import CacheSource
from tcdeploy.errors import TcdeployError
from tcdeploy.host.gc_policy import relax_gc_for_startup
from tcdeploy.planning.recipe import Recipe
from tcdeploy.server.model_server import ERROR_DELIVERY_S, ModelServer
from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.observe.request_log import RequestLog
from tcdeploy.server.settings import ServerSettings
from tcdeploy.text.chat_template import start_renderer

if TYPE_CHECKING:  # importing torch takes seconds
    from tcdeploy.start.deployment import Deployment


HINT = " Hint: "
log = logging.getLogger("tcdeploy.scale")


@dataclass(frozen=True)
class ReplicaSettings:
    """What a replica needs: all of it is sent to the machine that runs it."""

    recipe: Recipe
    server: ServerSettings
    cache: CacheSource | None = None
    trusted_keys: str | None = None  # folder on the replica's machine; None: the default folder of its user


class ReplicaStartError(RuntimeError):
    """The model cannot be served. Ray passes on only the text, from which `start_error` reads the cause."""

    @classmethod
    def from_cause(cls, error: TcdeployError) -> ReplicaStartError:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return cls(f"{kind.__name__}: {error.message}{HINT}{error.hint}")


def start_error(text: str) -> TcdeployError | None:
    """The cause of a ReplicaStartError, from a text that ends with one, such as a traceback. None for other texts."""
    match = re.search(rf"{ReplicaStartError.__name__}: (\w+): (.*){HINT}(.*)", text, re.DOTALL)
    if match is None:
        return None
    name, message, hint = match.groups()
    kind: type[TcdeployError] = getattr(errors, name)
    return kind(message, hint.strip())


class ReplicaUnhealthyError(RuntimeError):
    """The engine has stopped, or a canary has differed with `canary_strict`."""


class Replica:
    """A loaded model. Create it with `await Replica.start(settings)` in the event loop that calls `app`."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._started: asyncio.Future[Deployment] = asyncio.get_running_loop().create_future()
        self._server = ModelServer(settings.server, self._deploy, self._started.set_result, self._fail)

    @classmethod
    async def start(cls, settings: ReplicaSettings) -> Replica:
        """Load the model; returns once every bucket is warm and checked. Raises ReplicaStartError."""
        relax_gc_for_startup()
        start_renderer()
        replica = cls(settings)
        replica._server.start()
        try:
            await replica._started
        except BaseException as error:
            replica.close()
            if isinstance(error, TcdeployError):
                raise ReplicaStartError.from_cause(error) from error
            raise
        return replica

    @property
    def app(self) -> RequestLog:
        """The ASGI app, with the routes of `tcdeploy serve`."""
        return self._server.app

    @property
    def metrics(self) -> Metrics:
        return self._server.metrics

    def check_health(self) -> None:
        """Raises ReplicaUnhealthyError."""
        if not self._server.state.is_healthy:
            raise ReplicaUnhealthyError(self._server.state.unready_reason)

    def close(self) -> None:
        """Stop the engine thread. Ray has already waited for the replica's requests."""
        self._server.close()
        from tcdeploy.cache.staging.folder import remove_own_staging_folders

        remove_own_staging_folders()

    def _deploy(self) -> Deployment:
        """Runs in the engine thread."""
        settings = self._settings
        trusted_keys = Path(settings.trusted_keys) if settings.trusted_keys else None
        if settings.cache is not None:
            from tcdeploy.bundle.fetch import fetch
            from tcdeploy.cache.trust.signing import default_trusted_keys_folder

            cache = settings.cache
            fetch(
                settings.recipe, cache.source, trusted_keys or default_trusted_keys_folder(), cache.allow_unsigned,
                cache.allow_rollback,
            )  # fmt: skip
        from tcdeploy.start.prepare import prepare

        eager = settings.server.start == "eager"
        return prepare(settings.recipe, trusted_keys=trusted_keys, needs_tokenizer=True, eager=eager)

    def _fail(self, error: BaseException) -> None:
        """A replica that cannot run further ends its process, so that it is replaced at once."""
        if not self._started.done():
            self._started.set_exception(error)
        else:
            log.error("the engine has stopped: %s", error)
            asyncio.get_running_loop().call_later(ERROR_DELIVERY_S, os._exit, 1)
