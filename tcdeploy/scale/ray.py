"""Replicas on Ray Serve: the deployment classes, and the builders that configs of Ray Serve import.

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
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.metrics import Gauge
from starlette.types import ASGIApp, Message

from tcdeploy.errors import UsageError
from tcdeploy.scale.ingress import ForwardedRequest, ingress_app, respond
from tcdeploy.scale.ray_config import (
    DEPLOYMENT,
    GATEWAY_HINT,
    IMPORT_PATH,
    INGRESS_DEPLOYMENT,
    ROUTED_IMPORT_PATH,
    read_arguments,
)
from tcdeploy.scale.replica import close_server, start_server
from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.generate.admission import RETRY_AFTER_S
from tcdeploy.server.model_server import ModelServer
from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.observe.request_log import RequestLog

MAX_STARTS = 2  # of a replica; a model that cannot be loaded fails each time
REPORT_INTERVAL_VARIABLE = "RAY_metrics_report_interval_ms"  # set for Ray in the environment of `ray start`
DEFAULT_REPORT_INTERVAL_MS = 10_000
SHORTEST_REPORT_INTERVAL_MS = 1_000  # shorter ones have no effect in Ray
log = logging.getLogger("tcdeploy.scale")


class ReplicaUnhealthyError(RuntimeError):
    """The engine has stopped, or a canary has differed with `canary_strict`."""


class Model:
    """A replica of one model. `arguments`: see `ray_config.read_arguments`."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        """Returns once the model is ready. Raises ReplicaStartError."""
        self._server: ModelServer | None = None  # Ray calls __del__ also if the start fails
        self._server = await start_server(read_arguments(arguments))
        self._reporting = asyncio.create_task(report_metrics(self._server.metrics))

    def __serve_build_asgi_app__(self) -> RequestLog:
        """Ray calls it after the constructor. The app has the routes of `tcdeploy serve`."""
        assert self._server is not None
        return self._server.app

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """Answer a request of the ingress. See `ingress.respond`."""
        assert self._server is not None
        async with contextlib.aclosing(respond(self._server.app, request)) as batches:
            async for events in batches:
                yield events

    def check_health(self) -> None:
        """Ray replaces the replica if this raises."""
        if self._server is not None and not self._server.state.is_healthy:
            raise ReplicaUnhealthyError(self._server.state.unready_reason)

    def __del__(self) -> None:
        """Ray calls it once the replica's requests have ended."""
        if self._server is not None:
            close_server(self._server)


async def report_metrics(metrics: Metrics) -> None:
    """Copy the metrics of this replica to Ray's forever. Prometheus scrapes Ray's from one port of each node, while a
    request for `/metrics` through Ray's proxy reaches only one replica.

    Ray adds the labels `application`, `deployment` and `replica`. It reports a gauge only if it was set since the
    previous report, so they are set twice per report.
    """
    gauges: dict[str, Gauge] = {}
    milliseconds = DEFAULT_REPORT_INTERVAL_MS
    with contextlib.suppress(ValueError):
        milliseconds = int(os.environ.get(REPORT_INTERVAL_VARIABLE, milliseconds))
    while True:
        try:
            _set_gauges(metrics, gauges)
        except Exception:  # Ray then lacks this replica's metrics for a while, and the replica goes on
            log.exception("the metrics of this replica cannot be reported to Ray")
        await asyncio.sleep(max(milliseconds, SHORTEST_REPORT_INTERVAL_MS) / 2000)


def _set_gauges(metrics: Metrics, gauges: dict[str, Gauge]) -> None:
    """Each sample becomes a gauge with its name and labels. `gauges`: by name; missing ones are added.

    Ray allows no colon in a name and adds the prefix `ray_`, so `tcdeploy:prompt_tokens_total` becomes
    `ray_tcdeploy_prompt_tokens_total`. Counters are not copied to Ray's counters, whose series remain after the replica
    has ended, and histograms not to Ray's histograms, whose sums are computed from the middle of each bucket. `rate()`
    and `histogram_quantile()` do not depend on the type. Takes 2.5 ms for the 240 samples of a server without a model.
    """
    for family in metrics.registry.collect():
        if not family.name.startswith(metrics.prefix) or family.type == "info":
            continue  # Ray reports the CPU and the memory of its processes itself
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            if sample.name not in gauges:
                name = sample.name.replace(":", "_")
                gauges[sample.name] = Gauge(name, family.documentation, tuple(sample.labels))
            gauges[sample.name].set(sample.value, dict(sample.labels))


class Ingress:
    """A replica of the ingress of a model with a request router. `arguments`: of the model. `model`: its handle."""

    def __init__(self, arguments: dict[str, Any], model: Any) -> None:
        self._max_body_bytes, self._model = read_arguments(arguments).server.max_body_bytes, model

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray calls it after the constructor."""
        return ingress_app(self._forward, self._max_body_bytes)

    async def _forward(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """Events of the response of the replica that the model's request router chooses. Raises ApiError.

        Request routers read the prompt from positional arguments. Ray's prefix-aware one fails for one without text.
        """
        call = self._model.options(method_name="respond", stream=True).remote
        response = call(request) if request.prompt else call(request=request)
        is_complete = False
        try:
            async for events in response:
                yield events
            is_complete = True
        except BackPressureError as error:
            raise ApiError(503, str(error), code="queue_full", retry_after=RETRY_AFTER_S) from error
        except (RayError, RayServeException) as error:
            reason = f"the replica of the model cannot be reached: {str(error).strip().splitlines()[-1]}"
            raise ApiError(503, reason, code="unreachable") from error
        finally:
            if not is_complete:
                response.cancel()


_options = {"name": DEPLOYMENT, "max_constructor_retry_count": MAX_STARTS}
_model: Any = serve.deployment(**_options)(serve.ingress()(Model))
_routed_model: Any = serve.deployment(**_options)(Model)  # Ray allows one ingress in an application
_ingress: Any = serve.deployment(name=INGRESS_DEPLOYMENT)(serve.ingress()(Ingress))


def build(arguments: dict[str, Any]) -> Application:
    """The application of a model. Ray accepts only functions with one parameter in a config.

    Raises TcdeployError for invalid arguments, as the other functions do.
    """
    return build_application(IMPORT_PATH, arguments, {})


def build_routed(arguments: dict[str, Any]) -> Application:
    """As `build`, with an ingress that lets Ray's request router of the model choose the replica."""
    return build_application(ROUTED_IMPORT_PATH, arguments, {})


def build_ingress(arguments: dict[str, Any]) -> Application:
    """Refuse the application that configs of earlier versions have for several models."""
    raise UsageError("one application for several models, build_ingress, was removed", GATEWAY_HINT)


def build_application(
    import_path: str, arguments: dict[str, Any], options: Mapping[str, Mapping[str, Any]]
) -> Application:
    """The application that `import_path` builds, with deployment options by deployment name.

    Ray applies the `deployments` of a config file itself, so the builders that a config names pass no options.
    """
    read_arguments(arguments)
    if import_path == IMPORT_PATH:
        return _model.options(**options.get(DEPLOYMENT, {})).bind(arguments)
    model = _routed_model.options(**options.get(DEPLOYMENT, {})).bind(arguments)
    return _ingress.options(**options.get(INGRESS_DEPLOYMENT, {})).bind(arguments, model)
