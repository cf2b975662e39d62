"""`tcdeploy deploy`: replicas of a model on Ray Serve."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcdeploy.cli.report_options import Json
from tcdeploy.errors import Interrupted, UsageError
from tcdeploy.planning.extras import require_extra

if TYPE_CHECKING:
    from tcdeploy.scale.ray_cluster import Deployed
    from tcdeploy.scale.ray_config import ModelEntry
    from tcdeploy.scale.replica import ReplicaSettings

ENTRY_HINT = "an entry is, for example: {serve: 'builtin:tiny --device cpu', num_replicas: 2}"
PARSE_ERROR: Any = typer.BadParameter.__base__  # the UsageError of click, which typer does not export
FIELDS = ("models", "http_options", "proxy_location", "route_prefix", "ingress")
# Further options of `serve` that Ray replaces, or that are for the command's own output.
REFUSED = {"root_path", "budget", "dry_run", "json"}


def deploy(
    config: Annotated[Path, typer.Argument(help="YAML file with the model", metavar="FILE", show_default=False)],
    ray: Annotated[bool, typer.Option("--ray", help="Deploy on Ray Serve")] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of the Ray cluster; auto: the one on this machine; default: Ray is started on this machine",
            metavar="HOST:PORT",
            envvar="RAY_ADDRESS",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until the model must have a replica")] = 600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the config for `serve deploy`, and exit")] = False,
    json: Json = False,
) -> None:
    """Run the model of FILE as replicas behind one address, until Ctrl-C or SIGTERM.

    FILE is a config of Ray Serve with `models` in place of `applications`. Its entry has `serve`, the arguments of
    `tcdeploy serve`, and fields of Ray Serve's deployments, such as num_replicas and autoscaling_config.
    """
    if not ray:
        raise UsageError("deploy needs --ray", "tcdeploy deploy FILE --ray")
    require_extra("serve", "serve a model")
    require_extra("ray", "deploy on Ray Serve")
    from tcdeploy.scale.ray_config import serve_config, use_haproxy

    content = read_file(config)
    use_haproxy(content.get("http_options") or {})
    serve_file = serve_config(read_entry(config, content), content)
    from tcdeploy.scale import ray_cluster

    ray_cluster.check_config(serve_file)
    if dry_run:
        import yaml

        print(yaml.safe_dump(serve_file, sort_keys=False, width=120), end="")
        return
    _run(serve_file, address, timeout, json)


def _run(serve_file: dict[str, Any], address: str | None, timeout: float, json: bool) -> None:
    from tcdeploy.scale import ray_cluster

    with ray_cluster.connection(address) as logs:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # after Ray has set a handler of its own
        try:
            if lacking := ray_cluster.lacking_resources(serve_file):
                if not address:
                    raise UsageError(
                        lacking, "use a larger machine or a cluster, or set ray_actor_options of the model"
                    )
                print(f"warning: {lacking}; waiting until nodes join", file=sys.stderr)
            deployed = ray_cluster.deploy_application(serve_file, timeout, logs)
        except KeyboardInterrupt:
            hint = "the model of this file may be left on the cluster: see `serve status`" if address else ""
            raise Interrupted("interrupted", hint) from None
        try:
            _report(deployed, json)
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):  # until the model is removed
                signal.signal(number, signal.SIG_IGN)
            ray_cluster.remove_application(deployed.name)


def _report(deployed: Deployed, json: bool) -> None:
    from tcdeploy.cli import display
    from tcdeploy.cli.tables import Column, Table
    from tcdeploy.scale import ray_cluster

    metrics_urls = ray_cluster.metrics_urls()
    if json:
        print(display.json_document("deploy", models=[deployed._asdict()], metrics_urls=metrics_urls))
    else:
        columns = (Column("model", "name"), Column("URL", "name"), Column("seconds", "number"))
        display.show_table(Table(columns, [(deployed.name, f"{deployed.url}/v1", f"{deployed.seconds:.1f}")]))
        if len(metrics_urls) == 1:  # the nodes of a cluster are found by Ray's service discovery
            print(f"metrics of all replicas: {metrics_urls[0]}")
    sys.stdout.flush()


def read_file(path: Path) -> dict[str, Any]:
    """The content of the YAML file, with one model. Raises UsageError."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # an invalid date raises ValueError
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(f"{path} cannot be read: {reason}", "FILE is a YAML file with the model to deploy") from error
    models = content.get("models") if isinstance(content, dict) else None
    if not isinstance(models, list) or not models:
        raise UsageError(f"{path} has no list `models`", ENTRY_HINT)
    if len(models) > 1:
        from tcdeploy.scale.ray_config import GATEWAY_HINT

        raise UsageError(f"{path} names {len(models)} models, and a deployment has one", GATEWAY_HINT)
    if unknown := sorted(set(content) - set(FIELDS)):
        raise UsageError(
            f"{path} has the unknown field {unknown[0]}; known: {', '.join(FIELDS)}",
            "for other fields, print the config with --dry-run, add them, and deploy it with Ray's own `serve deploy`",
        )
    _check_mappings(str(path), content, "http_options")
    if not str(content.get("route_prefix", "/")).startswith("/"):
        raise UsageError(f"{path}: route_prefix must begin with /", "route_prefix: /NAME")
    return content


def _check_mappings(place: str, values: dict[str, Any], *keys: str) -> None:
    for key in keys:
        if not isinstance(values.get(key, {}), dict):
            raise UsageError(f"{place}: {key} must be a mapping", f"{key}: {{FIELD: VALUE}}")


def read_entry(path: Path, content: dict[str, Any]) -> ModelEntry:
    """The model of the file. Raises UsageError."""
    from tcdeploy.scale.ray_config import REQUEST_ROUTER, ModelEntry

    [entry] = content["models"]
    if not isinstance(entry, dict) or not isinstance(entry.get("serve"), str):
        raise UsageError(f"{path}: the model has no text `serve`", ENTRY_HINT)
    if "name" in entry:
        raise UsageError(f"{path}: the model has a name", "name it with --served-model-name in `serve`")
    _check_mappings(f"{path}: model", entry, "ray_actor_options", "autoscaling_config", REQUEST_ROUTER)
    if "ingress" in content:
        _check_ingress(path, content, REQUEST_ROUTER in entry)
    replica = _read_replica(f"{path}: model", entry["serve"])
    options = {key: value for key, value in entry.items() if key != "serve"}
    return ModelEntry(_application_name(replica.server.model), replica, options)


def _check_ingress(path: Path, content: dict[str, Any], is_routed: bool) -> None:
    """Raises UsageError for fields that cannot have an effect."""
    if not is_routed:
        from tcdeploy.scale.ray_config import GATEWAY_HINT

        raise UsageError(
            f"{path}: ingress has no effect without request_router_config, because requests reach the model directly",
            f"remove ingress; for several models, {GATEWAY_HINT}",
        )
    _check_mappings(str(path), content, "ingress")
    if "name" in content["ingress"]:
        raise UsageError(f"{path}: ingress has a name", "remove it: the name of its deployment is fixed")
    _check_mappings(f"{path}: ingress", content["ingress"], "ray_actor_options", "autoscaling_config")


def _application_name(model: str) -> str:
    """A name for a path: the part of a Hub id or of a path after the last slash, without characters such as `:`."""
    return re.sub(r"[^\w.-]", "-", model.rstrip("/").rsplit("/", 1)[-1])


def _read_replica(place: str, arguments: str) -> ReplicaSettings:
    """Raises UsageError, whose message begins with `place`."""
    from typer.main import get_command

    from tcdeploy.cli.commands import Command
    from tcdeploy.cli.options import arguments_of
    from tcdeploy.cli.remote_cache import cache_source
    from tcdeploy.cli.serve import TRACING, complete_settings, serve
    from tcdeploy.scale.replica import ReplicaSettings

    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise UsageError(f"{place}: serve cannot be split into words: {error}", ENTRY_HINT) from error
    app = typer.Typer(rich_markup_mode=None)
    app.command(cls=Command)(serve)
    try:
        context = get_command(app).make_context("serve", words)
    except PARSE_ERROR as error:
        raise UsageError(f"{place}: {error.format_message()}", "tcdeploy serve --help lists the options") from error
    except UsageError as error:  # an option that was renamed
        raise UsageError(f"{place}: {error.message}", error.hint) from error
    _refuse_options(place, context)
    values = arguments_of(serve, context.params)
    settings = complete_settings(values["settings"], values["recipe"])
    if settings.otlp_endpoint:
        require_extra("otel", TRACING)
    cache = cache_source(values["cache_from"], values["allow_unsigned"], values["allow_rollback"])
    trusted_keys = None if values["trusted_keys"] is None else str(values["trusted_keys"])
    return ReplicaSettings(values["recipe"], settings, cache, trusted_keys)


def _refuse_options(place: str, context: Any) -> None:
    """Raises UsageError for options that have no effect on Ray Serve."""
    from tcdeploy.planning.option import flag_name, variable_name
    from tcdeploy.scale.ray_config import NOT_SENT

    for name in context.params:
        source = context.get_parameter_source(name)
        if name in REFUSED | NOT_SENT and source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            option = flag_name(name) if source.name == "COMMANDLINE" else variable_name(name)
            raise UsageError(f"{place}: {option} has no effect on Ray Serve", f"omit {option}")
