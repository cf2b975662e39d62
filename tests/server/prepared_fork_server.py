"""Fast server starts for tests: one process prepares the embedded model, and each server is a fork of it.

A warm start takes 5 s of CPU time, 4 s of them in `prepare`. A server that is forked after `prepare` runs all other
steps of a start: it binds its socket, loads the tokenizer and sends its warm-up requests. Its model and its buckets
cannot be selected, and its stderr has no lines about buckets.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from tests.conftest import TINY, TINY_BATCH_SIZES, TINY_BUCKETS
from tests.fork_server import ForkServer, exit_without_finalizing, run_command, serve_forks

PREPARE_TIMEOUT_S = 120


class PreparedForkServer(ForkServer):
    """A fork of `fork_server` that prepares the embedded model from `cache` and is then a fork server itself."""

    def __init__(self, fork_server: ForkServer, environ: dict[str, str], cache: Path) -> None:
        super().__init__(environ)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # an abstract address that the kernel selects
            listener.listen()
            listener.settimeout(PREPARE_TIMEOUT_S)
            call = f"prepare_and_fork({listener.getsockname()!r}, {str(cache)!r})"
            script = f"from tests.server.prepared_fork_server import prepare_and_fork; {call}"
            self._server: Any = fork_server.popen(environ=environ, script=script)
            try:
                self._control, _ = listener.accept()
            except TimeoutError:
                self._server.kill_group()
                raise RuntimeError(f"the model could not be prepared: {self._server.stderr.read()}") from None


def prepare_and_fork(control_address: bytes, cache: str) -> None:
    """Prepare the model, then fork for each request. In the forks, `prepare` returns this deployment."""
    from tcdeploy.planning.recipe import build_recipe
    from tcdeploy.start import model_code
    from tcdeploy.start.deployment import Deployment
    from tcdeploy.start.planned import StartRequest
    from tcdeploy.start.prepare import prepare

    options = {"model": TINY, "buckets": TINY_BUCKETS, "batch_sizes": TINY_BATCH_SIZES, "cache_dir": cache}
    prepared_recipe = build_recipe(options, environ={})
    deployment = prepare(prepared_recipe)

    def start_from_code(request: StartRequest, *_: Any, **__: Any) -> Deployment:
        assert request.recipe == prepared_recipe, (
            "a prepared server cannot have another model, other buckets or another cache"
        )
        return deployment

    model_code.start_from_code = start_from_code
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(control_address)
    exit_without_finalizing(run_command(serve_forks(control)))
