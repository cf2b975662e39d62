"""Replicas on Ray Serve: the deployment class, and `build`, which configs of Ray Serve import.

`tcdeploy deploy --ray` writes the config (ray_config.py):

    applications:
    - name: llama
      route_prefix: /
      import_path: tcdeploy.scale.ray:build
      args: {recipe: {model: meta-llama/Llama-3.1-8B-Instruct}, settings: {model: llama}}

Ray's proxies send the HTTP requests to the replicas, and each replica answers with the app of `tcdeploy serve`. Ray
counts a replica as running once its constructor has returned, which is when every bucket is warm and checked. Before
Ray removes one, it waits for the requests of the replica. Needs the extra `ray`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from ray.serve import Application

from tcdeploy.scale.ray_config import DEPLOYMENT, read_arguments
from tcdeploy.scale.ray_metrics import RayMetrics
from tcdeploy.scale.replica import Replica
from tcdeploy.server.request_log import RequestLog

MAX_STARTS = 2  # of a replica; a model that cannot be loaded fails each time


class Model:
    """A replica of one model. `arguments`: see `ray_config.read_arguments`."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        """Returns once the model is ready. Raises ReplicaStartError."""
        self._replica: Replica | None = None  # Ray calls __del__ also if the start fails
        self._replica = await Replica.start(read_arguments(arguments))
        self._reporting = asyncio.create_task(RayMetrics(self._replica.metrics).run())

    def __serve_build_asgi_app__(self) -> RequestLog:
        """Ray calls it after the constructor."""
        assert self._replica is not None
        return self._replica.app

    def check_health(self) -> None:
        """Ray replaces the replica if this raises."""
        if self._replica is not None:
            self._replica.check_health()

    def __del__(self) -> None:
        """Ray calls it once the replica's requests have ended."""
        if self._replica is not None:
            self._replica.close()


_deployment: Any = serve.deployment(name=DEPLOYMENT, max_constructor_retry_count=MAX_STARTS)(serve.ingress()(Model))


def build(arguments: dict[str, Any], options: dict[str, Any] | None = None) -> Application:
    """The application of one model. Raises TcdeployError for invalid arguments.

    `options`: fields of the deployment; a config has them under `deployments`.
    """
    read_arguments(arguments)
    return _deployment.options(**(options or {})).bind(arguments)
