"""Runs a config on Ray Serve: connects to Ray or starts it, deploys, and waits until the model has a replica."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import (
    ApplicationStatus,
    DeploymentSchema,
    HTTPOptionsSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from tcdeploy.errors import ModelError, ThresholdError, UsageError
from tcdeploy.scale.ray import build_application
from tcdeploy.scale.ray_config import REQUEST_ROUTER, proxy_url, url_host
from tcdeploy.scale.ray_session import ADDRESS_VARIABLE, own_cluster, private_session, warn_of_shared_token
from tcdeploy.scale.replica import start_error

POLL_S = 0.2
REMOVAL_TIMEOUT_S = 300
CONNECT_TIMEOUT_S = 5
LAST_LINES = 3  # of a replica's error that are shown
CLUSTER_LOGS = "/tmp/ray/session_latest/logs/serve"  # of replicas, unless the cluster has another folder
LOGS_HINT = "the logs of its replicas are in {} on their machines"
PROXY_HINT = (
    "http_options.port, and with HAProxy the ports of RAY_SERVE_HAPROXY_METRICS_PORT (9101) and "
    "RAY_SERVE_HAPROXY_STATS_PORT (8404), must be free"
)
FIELDS_HINT = "the fields are described at https://docs.ray.io/en/latest/serve/api/#serve-rest-api"
PATH_HINT = "give the model a path of its own: route_prefix: /NAME"
log = logging.getLogger("tcdeploy.scale")


class Deployed(NamedTuple):
    name: str
    url: str
    seconds: float  # from the deployment to the first running replica


@contextlib.contextmanager
def connection(address: str | None) -> Iterator[str]:
    """Connect to the cluster at `address` ("auto": the one on this machine), or start Ray on this machine.

    Yields the folder of the replicas' logs, on their machines. If Ray was started, it ends with the block. Raises
    UsageError if there is no cluster at `address`, and TrustError if other users could run code in Ray or in this
    process.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with contextlib.ExitStack() as stack:
        folder = None if address else stack.enter_context(private_session())
        _initialize(address, folder)
        stack.callback(ray.shutdown)
        yield str(folder / "session_latest/logs/serve") if folder else CLUSTER_LOGS


def _initialize(address: str | None, folder: Path | None) -> None:
    """`folder`: for the sessions of the Ray that is started."""
    options: dict[str, Any] = {"address": address}
    if folder is not None:
        options = {"address": "local", "_temp_dir": str(folder), "include_dashboard": False}
    else:
        warn_of_shared_token()
    if address == "auto" and os.environ.get(ADDRESS_VARIABLE, "") in ("", "auto"):
        os.environ[ADDRESS_VARIABLE] = own_cluster()  # Ray would also take a process of another user
    try:
        if match := re.fullmatch(r"([^:/]+):(\d+)", address or ""):  # Ray would try for minutes
            socket.create_connection((match[1], int(match[2])), CONNECT_TIMEOUT_S).close()
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError) as error:  # ConnectionError of Ray included
        raise UsageError(
            f"there is no Ray cluster at {address}: {str(error).splitlines()[0]}",
            "without --address and RAY_ADDRESS, Ray is started on this machine; `ray start --head` starts a cluster",
        ) from error


def lacking_resources(config: Mapping[str, Any]) -> str:
    """What the cluster lacks for the replicas that start at once, as a sentence; "" if nothing."""
    needed: dict[str, float] = {"CPU": 0, "GPU": 0}
    for application in config["applications"]:
        for options in application["deployments"]:
            replicas = options.get("autoscaling_config", {}).get("min_replicas", options.get("num_replicas", 1))
            actor = options["ray_actor_options"]
            count = replicas if isinstance(replicas, int) else 1  # "auto" starts with one
            needed["CPU"] += count * actor["num_cpus"]
            needed["GPU"] += count * actor["num_gpus"]
    total = ray.cluster_resources()
    lacking = [
        f"the replicas need {needed[name]:g} of the resource {name}, and the cluster has {total.get(name, 0):g}"
        for name in needed
        if needed[name] > total.get(name, 0)
    ]
    return "; ".join(lacking)


def check_config(config: Mapping[str, Any]) -> None:
    """Raises UsageError for a config that Ray Serve rejects, and for unknown fields, which it would ignore."""
    _check_fields(config["http_options"], HTTPOptionsSchema)
    for application in config["applications"]:
        for options in application["deployments"]:
            _check_fields(options, DeploymentSchema)
            _check_fields(options["ray_actor_options"], RayActorOptionsSchema)
            _check_fields(options.get("autoscaling_config", {}), AutoscalingConfig)
            _check_fields(options.get(REQUEST_ROUTER, {}), RequestRouterConfig)
    try:
        ServeDeploySchema.model_validate(config)
    except (ValueError, ImportError, AttributeError) as error:  # the last two: a class in the config cannot be imported
        reason = " ".join(line.strip() for line in str(error).splitlines()[1:3]) or str(error)
        raise UsageError(f"Ray Serve rejects the config: {reason}", FIELDS_HINT) from error


def _check_fields(config: Mapping[str, Any], schema: type[BaseModel]) -> None:
    if unknown := sorted(set(config) - set(schema.model_fields)):
        raise UsageError(f"Ray Serve has no field {unknown[0]} in {schema.__name__}", FIELDS_HINT)


def deploy_application(config: Mapping[str, Any], timeout: float, logs: str = CLUSTER_LOGS) -> Deployed:
    """Deploy the application of the config, and wait at most `timeout` seconds until it is running.

    `logs`: the folder that `connection` yields.

    If it fails and did not exist before, it is removed. Raises the error of the replica, ThresholdError after the time,
    and UsageError if the proxy cannot start, or if another application has its path.
    """
    http = HTTPOptions(**config["http_options"])
    try:
        serve.start(proxy_location=config["proxy_location"], http_options=http)
    except (RayError, RuntimeError) as error:  # of the proxy
        reason = " ".join(line.strip() for line in str(error).splitlines()[-LAST_LINES:])
        raise UsageError(f"the proxy of Ray Serve cannot start: {reason}", PROXY_HINT) from error
    schema = ServeApplicationSchema.model_validate(config["applications"][0])
    is_new, start = schema.name not in serve.status().applications, time.monotonic()
    try:
        _run(schema)
        while (status := serve.status().applications[schema.name]).status != ApplicationStatus.RUNNING:
            _raise_if_failed(schema.name, status, logs)
            if time.monotonic() - start > timeout:
                reason = _deployment_message(status) or "no replica has started"
                message = f"{schema.name} is not running after {timeout:g} s: {reason}"
                raise ThresholdError(message, f"--timeout allows more time; {LOGS_HINT.format(logs)}")
            time.sleep(POLL_S)
    except BaseException:
        if is_new:
            remove_application(schema.name)
        raise
    path = (schema.route_prefix or "/").rstrip("/")
    return Deployed(schema.name, f"{proxy_url(config['http_options'])}{path}", time.monotonic() - start)


def _run(schema: ServeApplicationSchema) -> None:
    """Raises UsageError if its path belongs to another application."""
    options = {
        deployment.name: deployment.model_dump(exclude_unset=True, exclude={"name"})
        for deployment in schema.deployments
    }
    application = build_application(schema.import_path, schema.args, options)
    target = serve.RunTarget(application, name=schema.name, route_prefix=schema.route_prefix)
    try:
        serve.run_many([target], wait_for_applications_running=False)
    except RayServeException as error:
        raise UsageError(f"Ray Serve rejects the model: {str(error).splitlines()[-1]}", PATH_HINT) from error


def metrics_urls() -> list[str]:
    """`/metrics` URLs for Prometheus, one for each live node of the cluster."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [f"http://{url_host(node['NodeManagerAddress'])}:{node['MetricsExportPort']}/metrics" for node in nodes]


def remove_application(name: str) -> None:
    """Remove an application once its requests have ended, at most its drain time-out later.

    Warns if it is left after REMOVAL_TIMEOUT_S.
    """
    serve.delete(name, _blocking=False)
    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    while name in serve.status().applications:
        if time.monotonic() > deadline:
            log.warning("%s: not removed after %d s; `serve status` shows the state", name, REMOVAL_TIMEOUT_S)
            return
        time.sleep(POLL_S)


def _raise_if_failed(name: str, status: Any, logs: str) -> None:
    """Raise the error of a replica's start, or ModelError with what Ray says."""
    if status.status not in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
        return
    message = _deployment_message(status) or status.message
    cause = start_error(message)
    if cause is not None:
        raise type(cause)(f"{name} cannot be served: {cause.message}", cause.hint)
    last_lines = " ".join(line.strip() for line in message.splitlines()[-LAST_LINES:])
    raise ModelError(f"{name} cannot be served: {last_lines}", LOGS_HINT.format(logs))


def _deployment_message(status: Any) -> str:
    return "\n".join(deployment.message for deployment in status.deployments.values()).strip()
