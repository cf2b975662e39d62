"""Deployments of the ingress on Ray Serve: one in front of several models, and one in front of a single model.

`IngressReplica` forwards requests over HTTP to the path of each model at Ray's proxy, or through a deployment handle if
the model has a request router of its own. `SingleModelIngressReplica` is in the application of such a model: HAProxy
chooses the replicas of an application's ingress itself, so the model must not be the ingress.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.types import ASGIApp, Message

from tcdeploy.scale import ingress
from tcdeploy.scale.forwarded_request import ForwardedRequest, PromptRequest, forward_over_http, http_session
from tcdeploy.scale.ray_config import DEPLOYMENT, read_arguments, read_ingress_arguments
from tcdeploy.server.apis.openai.protocol import ApiError


class IngressReplica:
    """A replica of the ingress of several models. `arguments`: see `ray_config.IngressSettings`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._settings = read_ingress_arguments(arguments)
        self._session: aiohttp.ClientSession | None = None
        self._handles: dict[str, Any] = {}

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray calls it after the constructor."""
        return ingress.Ingress(self._settings.models, self._forward, self._settings.max_body_bytes).app

    def _forward(self, application: str, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        if self._settings.models[application].needs_prompt:
            return self._forward_by_handle(application, request)
        if self._session is None:
            self._session = http_session()
        return forward_over_http(self._session, f"{self._settings.proxy_url}/{application}", request)

    async def _forward_by_handle(
        self, application: str, request: ForwardedRequest
    ) -> AsyncGenerator[list[Message], None]:
        if application not in self._handles:
            try:
                handle = await asyncio.to_thread(serve.get_deployment_handle, DEPLOYMENT, application)
            except RayServeException as error:
                raise _unreachable(error) from error
            self._handles[application] = handle
        async with contextlib.aclosing(forward_by_handle(self._handles[application], request)) as batches:
            async for events in batches:
                yield events


class SingleModelIngressReplica:
    """A replica of the ingress of one model. `arguments`: of the model. `model`: its handle."""

    def __init__(self, arguments: dict[str, Any], model: Any) -> None:
        self._max_body_bytes, self._model = read_arguments(arguments).server.max_body_bytes, model

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray calls it after the constructor."""

        def forward(_: str, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
            return forward_by_handle(self._model, request)

        return ingress.single_model_ingress("", forward, self._max_body_bytes)


async def forward_by_handle(model: Any, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
    """Events of the response of the replica that the model's request router chooses. Raises ApiError.

    Request routers read the prompt from positional arguments. Ray's prefix-aware one fails for one without a prompt.
    """
    respond = model.options(method_name="respond", stream=True).remote
    response = respond(request) if isinstance(request, PromptRequest) else respond(request=request)
    is_complete = False
    try:
        async for events in response:
            yield events
        is_complete = True
    except BackPressureError as error:
        raise ApiError(503, str(error), code="queue_full", retry_after=ingress.RETRY_AFTER_S) from error
    except (RayError, RayServeException) as error:
        raise _unreachable(error) from error
    finally:
        if not is_complete:
            response.cancel()


def _unreachable(error: Exception) -> ApiError:
    reason = str(error).strip().splitlines()[-1]
    return ApiError(503, f"the replica of the model cannot be reached: {reason}", code="unreachable")
