"""One replica: a ModelServer in a process of Ray. Does not import Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tcdeploy import errors
from tcdeploy.errors import TcdeployError
from tcdeploy.host.gc_policy import relax_gc_for_startup
from tcdeploy.host.progress import Progress, StageProgress
from tcdeploy.planning.recipe import Recipe
from tcdeploy.remote.address import CacheSource
from tcdeploy.server.model_server import ERROR_DELIVERY_S, ModelServer
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


async def start_server(settings: ReplicaSettings) -> ModelServer:
    """Load the model; returns once every bucket is warm and checked. Raises ReplicaStartError.

    Call it in the event loop that calls the server's `app`. If the engine stops later, the process ends.
    """
    relax_gc_for_startup()
    start_renderer()
    loop = asyncio.get_running_loop()
    started: asyncio.Future[Deployment] = loop.create_future()

    def fail(error: BaseException) -> None:
        if not started.done():
            started.set_exception(error)
        else:  # Ray replaces the replica at once if its process ends
            log.error("the engine has stopped: %s", error)
            loop.call_later(ERROR_DELIVERY_S, os._exit, 1)

    progress = StageProgress()
    deploy = partial(_deploy, settings, progress)
    server = ModelServer(settings.server, deploy, started.set_result, fail, progress)
    server.start()
    try:
        await started
    except BaseException as error:
        close_server(server)
        if isinstance(error, TcdeployError):
            raise ReplicaStartError.from_cause(error) from error
        raise
    return server


def _deploy(settings: ReplicaSettings, progress: Progress) -> Deployment:
    """Runs in the engine thread."""
    from tcdeploy.start.prepare import begin_start, prepare

    trusted_keys = Path(settings.trusted_keys) if settings.trusted_keys else None
    if settings.cache is not None:
        begin_start(settings.recipe)  # the next line imports torch
        from tcdeploy.bundle.fetch import fetch

        progress.stage("fetch")
        fetch(settings.recipe, settings.cache, trusted_keys, progress)
    eager = settings.server.start == "eager"
    return prepare(settings.recipe, progress, trusted_keys=trusted_keys, needs_tokenizer=True, eager=eager, serves=True)


def close_server(server: ModelServer) -> None:
    """Stop the engine thread. Ray has already waited for the replica's requests."""
    server.close()
    from tcdeploy.cache.staging.folder import remove_own_staging_folders

    remove_own_staging_folders()
