"""`tcdeploy deploy`: replicas of one or more models on Ray Serve."""

from __future__ import annotations

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
# Further options of `serve` that Ray replaces, or that are for the command's own output.
REFUSED = {"root_path", "budget", "dry_run", "json"}


def deploy(
    config: Annotated[Path, typer.Argument(help="YAML file with the models", metavar="FILE", show_default=False)],
    ray: Annotated[bool, typer.Option("--ray", help="Deploy on Ray Serve")] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of the Ray cluster; auto: the one on this machine; default: Ray is started on this machine",
            metavar="HOST:PORT",
            envvar="RAY_ADDRESS",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until every model must have a replica")] = 600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the config for `serve deploy`, and exit")] = False,
    json: Json = False,
) -> None:
    """Run the models of FILE as replicas behind one address, until Ctrl-C or SIGTERM.

    FILE is a config of Ray Serve with `models` in place of `applications`. An entry has `serve`, the arguments of
    `tcdeploy serve`, and fields of Ray Serve's deployments, such as num_replicas and autoscaling_config. Several models
    share one base URL.
    """
    if not ray:
        raise UsageError("deploy needs --ray", "tcdeploy deploy FILE --ray")
    require_extra("serve", "serve a model")
    require_extra("ray", "deploy on Ray Serve")
    from tcdeploy.scale.ray_config import serve_config, use_haproxy

    content = read_file(config)
    use_haproxy(content.get("http_options") or {})
    serve_file = serve_config(read_entries(config, content), content)
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
        signal.signal(signal.SIGTERM, _interrupt)  # after Ray has set a handler of its own
        try:
            if lacking := ray_cluster.lacking_resources(serve_file):
                if not address:
                    raise UsageError(
                        lacking, "use a larger machine or a cluster, or set ray_actor_options of the models"
                    )
                print(f"warning: {lacking}; waiting until nodes join", file=sys.stderr)
            deployed = ray_cluster.deploy_applications(serve_file, timeout, logs)
        except KeyboardInterrupt:
            hint = "models of this file may be left on the cluster: see `serve status`" if address else ""
            raise Interrupted("interrupted", hint) from None
        try:
            _report(deployed, json)
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):  # until the models are removed
                signal.signal(number, signal.SIG_IGN)
            ray_cluster.remove_applications([item.name for item in deployed])


def _report(deployed: list[Deployed], json: bool) -> None:
    from tcdeploy.cli import display
    from tcdeploy.cli.tables import Column, Table
    from tcdeploy.scale import ray_cluster
    from tcdeploy.scale.ray_config import INGRESS

    metrics_urls = ray_cluster.metrics_urls()
    models = [item for item in deployed if item.name != INGRESS]
    ingress_url = next((item.url for item in deployed if item.name == INGRESS), None)
    if json:
        document = {"models": [item._asdict() for item in models], "ingress_url": ingress_url}
        print(display.json_document("deploy", **document, metrics_urls=metrics_urls))
    else:
        columns = (Column("model", "name"), Column("URL", "name"), Column("seconds", "number"))
        rows = [(item.name, f"{item.url}/v1", f"{item.seconds:.1f}") for item in models]
        display.show_table(Table(columns, rows))
        if ingress_url:
            print(f"all models: {ingress_url}/v1")
        if len(metrics_urls) == 1:  # the nodes of a cluster are found by Ray's service discovery
            print(f"metrics of all replicas: {metrics_urls[0]}")
    sys.stdout.flush()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def read_file(path: Path) -> dict[str, Any]:
    """The content of the YAML file, with at least one model. Raises UsageError."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # an invalid date raises ValueError
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(f"{path} cannot be read: {reason}", "FILE is a YAML file with the models to deploy") from error
    models = content.get("models") if isinstance(content, dict) else None
    if not isinstance(models, list) or not models:
        raise UsageError(f"{path} has no list `models`", ENTRY_HINT)
    if unknown := sorted(set(content) - {"models", "http_options", "proxy_location", "ingress"}):
        raise UsageError(
            f"{path} has the unknown field {unknown[0]}; known: models, http_options, proxy_location, ingress",
            "for other fields, print the config with --dry-run, add them, and deploy it with Ray's own `serve deploy`",
        )
    if not isinstance(content.get("http_options", {}), dict):
        raise UsageError(f"{path}: http_options must be a mapping", "http_options: {host: 0.0.0.0, port: 8000}")
    ingress = content.get("ingress", False)
    if ingress is not False and not isinstance(ingress, dict):
        raise UsageError(f"{path}: ingress must be a mapping or false", "ingress: {num_replicas: 2}, or ingress: false")
    if isinstance(ingress, dict):
        _check_ingress(path, ingress, models)
    return content


def _check_ingress(path: Path, ingress: dict[str, Any], models: list[Any]) -> None:
    """Raises UsageError for fields that cannot have an effect."""
    from tcdeploy.scale.ray_config import REQUEST_ROUTER

    if "name" in ingress:
        raise UsageError(f"{path}: ingress has a name", "remove it: the name of its deployment is fixed")
    for key in ("ray_actor_options", "autoscaling_config"):
        if not isinstance(ingress.get(key, {}), dict):
            raise UsageError(f"{path}: ingress: {key} must be a mapping", f"{key}: {{FIELD: VALUE}}")
    if len(models) == 1 and not (isinstance(models[0], dict) and REQUEST_ROUTER in models[0]):
        raise UsageError(f"{path}: ingress has no effect, because the only model is served at /", "remove ingress")


def read_entries(path: Path, content: dict[str, Any]) -> list[ModelEntry]:
    """The models, with their names in the API. Raises UsageError."""
    from tcdeploy.scale.ray_config import REQUEST_ROUTER, ModelEntry

    replicas = []
    for number, entry in enumerate(content["models"], 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("serve"), str):
            raise UsageError(f"{path}: model {number} has no text `serve`", ENTRY_HINT)
        if "name" in entry:
            raise UsageError(f"{path}: model {number} has a name", "name it with --served-model-name in `serve`")
        for key in ("ray_actor_options", "autoscaling_config", REQUEST_ROUTER):
            if not isinstance(entry.get(key, {}), dict):
                raise UsageError(f"{path}: model {number}: {key} must be a mapping", f"{key}: {{FIELD: VALUE}}")
        replicas.append(_read_replica(f"{path}: model {number}", entry["serve"]))
    names = [_application_name(replica.server.model) for replica in replicas]
    options = [{key: value for key, value in entry.items() if key != "serve"} for entry in content["models"]]
    prefixes = ["/"] if len(names) == 1 else [f"/{name}" for name in names]
    entries = [
        ModelEntry(name, prefix, replica, fields)
        for name, prefix, replica, fields in zip(names, prefixes, replicas, options, strict=True)
    ]
    _check_names(path, entries)
    return entries


def _check_names(path: Path, entries: list[ModelEntry]) -> None:
    """Raises UsageError if a name is not unique, or reserved."""
    from tcdeploy.scale.ray_config import INGRESS, ROUTE_NAMES

    hidden = [entry.name for entry in entries if entry.route_prefix != "/" and entry.name in ROUTE_NAMES]
    if hidden:
        raise UsageError(f"{path}: the name {hidden[0]} is reserved", "name the model with --served-model-name NAME")
    in_api = [name for entry in entries for name in set(entry.model_names)]
    for names in ([INGRESS, *(entry.name for entry in entries)], in_api):
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            problem = f"the name {name} is reserved" if name == INGRESS else f"two models have the name {name}"
            raise UsageError(f"{path}: {problem}", "name a model with --served-model-name NAME")


def _application_name(model: str) -> str:
    """A name for a path: the part of a Hub id or of a path after the last slash, without characters such as `:`."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    return "".join(character if character.isalnum() or character in "-_." else "-" for character in last)


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
