"""Runs a config on Ray Serve: connects to Ray or starts it, deploys, and waits until every model has a replica."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from pydantic import BaseModel
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import ApplicationStatus, DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from tcdeploy.errors import ModelError, ThresholdError, UsageError
from tcdeploy.scale.ray import build
from tcdeploy.scale.replica import ReplicaStartError

POLL_S = 0.2
CONNECT_TIMEOUT_S = 5
LAST_LINES = 3  # of a replica's error that are shown
FIELDS = "Ray's documentation has the fields: Serve Config Files"


class Deployed(NamedTuple):
    name: str
    url: str
    seconds: float  # from the deployment to the first running replica


def connect(address: str | None) -> None:
    """Connect to the cluster at `address` ("auto": the one on this machine), or start Ray on this machine.

    Raises UsageError if there is no cluster at `address`.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        if match := re.fullmatch(r"([^:/]+):(\d+)", address or ""):  # Ray would try for minutes
            socket.create_connection((match[1], int(match[2])), CONNECT_TIMEOUT_S).close()
        ray.init(
            address=address or "local", include_dashboard=None if address else False, log_to_driver=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
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
            needed["CPU"] += replicas * actor.get("num_cpus", 1)
            needed["GPU"] += replicas * actor.get("num_gpus", 0)
    total = ray.cluster_resources()
    lacking = [
        f"the replicas need {needed[name]:g} of the resource {name}, and the cluster has {total.get(name, 0):g}"
        for name in needed
        if needed[name] > total.get(name, 0)
    ]
    return "; ".join(lacking)


def check_config(config: Mapping[str, Any]) -> None:
    """Raises UsageError for a config that Ray Serve rejects, and for unknown fields, which it would ignore."""
    _check_fields(config, ServeDeploySchema)
    for application in config["applications"]:
        for options in application["deployments"]:
            _check_fields(options, DeploymentSchema)
    try:
        ServeDeploySchema.model_validate(config)
    except ValueError as error:
        raise UsageError(
            f"Ray Serve rejects the config: {' '.join(line.strip() for line in str(error).splitlines()[1:3])}", FIELDS
        ) from error


def _check_fields(config: Mapping[str, Any], schema: type[BaseModel]) -> None:
    if unknown := sorted(set(config) - set(schema.model_fields)):
        raise UsageError(f"Ray Serve has no field {unknown[0]} in {schema.__name__}", FIELDS)


def deploy_applications(config: Mapping[str, Any], timeout: float) -> list[Deployed]:
    """Deploy the applications, and wait at most `timeout` seconds until each is running.

    If one fails, those that did not exist before are removed. Raises ModelError with the replica's error, and
    ThresholdError after the time.
    """
    http = HTTPOptions(**config.get("http_options", {}))
    serve.start(proxy_location=config.get("proxy_location", "EveryNode"), http_options=http)
    schemas = [ServeApplicationSchema.model_validate(application) for application in config["applications"]]
    existing = set(serve.status().applications)
    start = time.monotonic()
    seconds: dict[str, float] = {}
    try:
        serve.run_many([_target(schema) for schema in schemas], wait_for_applications_running=False)
        while len(seconds) < len(schemas):
            statuses = serve.status().applications
            for schema in schemas:
                _raise_if_failed(schema.name, statuses[schema.name])
                if statuses[schema.name].status == ApplicationStatus.RUNNING and schema.name not in seconds:
                    seconds[schema.name] = time.monotonic() - start
            waiting = [schema.name for schema in schemas if schema.name not in seconds]
            if waiting and time.monotonic() - start > timeout:
                reason = _deployment_message(statuses[waiting[0]])
                raise ThresholdError(
                    f"{waiting[0]} is not running after {timeout:g} s: {reason or 'no replica has started'}",
                    "the logs of its replicas are in /tmp/ray/session_latest/logs/serve; --timeout allows more time",
                )
            if waiting:
                time.sleep(POLL_S)
    except BaseException:
        remove_applications([schema.name for schema in schemas if schema.name not in existing])
        raise
    host = "127.0.0.1" if http.host in ("0.0.0.0", None) else http.host
    paths = {schema.name: (schema.route_prefix or "/").rstrip("/") for schema in schemas}
    return [Deployed(name, f"http://{host}:{http.port}{path}", seconds[name]) for name, path in paths.items()]


def replica_states(name: str) -> dict[str, int]:
    """Number of replicas of an application by state, such as {"RUNNING": 2, "STARTING": 1}."""
    [deployment] = serve.status().applications[name].deployments.values()
    return {state.value: count for state, count in deployment.replica_states.items() if count}


def remove_applications(names: Sequence[str]) -> None:
    """Remove applications once their requests have ended, at most their drain time-outs later."""
    for name in names:
        serve.delete(name)


def _target(schema: ServeApplicationSchema) -> serve.RunTarget:
    options = schema.deployments[0].model_dump(exclude_unset=True, exclude={"name"})
    application = build(schema.args, options)
    return serve.RunTarget(application, name=schema.name, route_prefix=schema.route_prefix)


def _raise_if_failed(name: str, status: Any) -> None:
    if status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
        raise ModelError(
            f"{name} cannot be served: {_deployment_message(status) or status.message}",
            "the logs of its replicas are in /tmp/ray/session_latest/logs/serve",
        )


def _deployment_message(status: Any) -> str:
    """The error of a replica's constructor; otherwise the last lines of the deployment's message."""
    messages = [deployment.message for deployment in status.deployments.values() if deployment.message]
    text = "\n".join(messages).strip()
    _, _, start_error = text.rpartition(f"{ReplicaStartError.__name__}: ")
    return start_error.strip() if start_error != text else " ".join(text.splitlines()[-LAST_LINES:])
