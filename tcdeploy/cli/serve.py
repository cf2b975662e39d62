"""`tcdeploy serve`: an OpenAI-compatible server on the warmed programs."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from tcdeploy.bundle.cache_source import CacheSource
from tcdeploy.cli.budget import Budget, enforce_budget, parse_budget
from tcdeploy.cli.options import recipe_command
from tcdeploy.cli.process import enable_access_log, set_log_level
from tcdeploy.cli.remote_cache import (
    AllowRollback,
    AllowUnsigned,
    CacheFrom,
    TrustedKeys,
    fetch_cache,
    require_cache_from,
)
from tcdeploy.cli.report_options import DryRun, Json
from tcdeploy.cli.standard_streams import drop_unread_messages
from tcdeploy.errors import UsageError
from tcdeploy.planning.dry_run import PlanFinding
from tcdeploy.planning.extras import require_extra
from tcdeploy.planning.recipe import Recipe
from tcdeploy.server.settings import RequestLogFormat, ServerSettings, StartTier, check_settings
from tcdeploy.text.chat_template import read_chat_template, start_renderer
from tcdeploy.text.tool_formats import REASONING_PARSERS, TOOL_PARSERS

if TYPE_CHECKING:
    from tcdeploy.start.deployment import Deployment

LOG_LEVELS = ("debug", "info", "warning", "error")
SERVING, TRACING = "serve a model", "export traces (--otlp-endpoint)"  # what extras are needed for
ChoiceT = TypeVar("ChoiceT", bound=str)


@recipe_command
def serve(
    recipe: Recipe,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 listens on all interfaces", envvar="TCDEPLOY_HOST")
    ] = ServerSettings.host,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 selects a free one", envvar="TCDEPLOY_PORT")
    ] = ServerSettings.port,
    api_key: Annotated[
        list[str],
        typer.Option(
            metavar="KEY",
            help="API key that requests must send; repeat it for several keys; default: none required",
            envvar="TCDEPLOY_API_KEY",
        ),
    ] = [],  # noqa: B006 - typer copies it
    served_model_name: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="Model name in the API, default: MODEL; repeat it for further names",
            envvar="TCDEPLOY_SERVED_MODEL_NAME",
        ),
    ] = [],  # noqa: B006
    allowed_origins: Annotated[
        list[str],
        typer.Option(
            "--allowed-origins",
            metavar="ORIGIN",
            help="Origin of web pages that may call the server (CORS), such as https://app.example.com, or * for all; "
            "repeat it for several",
            envvar="TCDEPLOY_ALLOWED_ORIGINS",
        ),
    ] = [],  # noqa: B006
    root_path: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Path below which a proxy serves this server, such as /llm",
            envvar="TCDEPLOY_ROOT_PATH",
        ),
    ] = ServerSettings.root_path,
    ssl_certfile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="PEM file with the certificate chain; the server then speaks HTTPS",
            envvar="TCDEPLOY_SSL_CERTFILE",
        ),
    ] = ServerSettings.ssl_certfile,
    ssl_keyfile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="PEM file with the private key; default: it is in --ssl-certfile",
            envvar="TCDEPLOY_SSL_KEYFILE",
        ),
    ] = ServerSettings.ssl_keyfile,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Jinja file with the chat template; default: the tokenizer's",
            envvar="TCDEPLOY_CHAT_TEMPLATE",
        ),
    ] = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Format of the model's tool calls; auto: the tokenizer's response template, else detected from the "
            f"chat template. {', '.join(TOOL_PARSERS[1:])}",
            envvar="TCDEPLOY_TOOL_PARSER",
        ),
    ] = ServerSettings.tool_parser,
    reasoning_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Format of the model's reasoning, which is returned as reasoning_content; auto: detected from the "
            f"chat template; none: reasoning is content. {', '.join(REASONING_PARSERS[2:])}",
            envvar="TCDEPLOY_REASONING_PARSER",
        ),
    ] = ServerSettings.reasoning_parser,
    served_name: Annotated[str | None, typer.Option(help="Deprecated: use --served-model-name", hidden=True)] = None,
    max_queued: Annotated[
        int, typer.Option(help="Completions that may wait for a decode row; more get 503", envvar="TCDEPLOY_MAX_QUEUED")
    ] = ServerSettings.max_queued,
    stall_timeout: Annotated[
        float,
        typer.Option(help="Seconds until a client that reads nothing is dropped", envvar="TCDEPLOY_STALL_TIMEOUT"),
    ] = ServerSettings.stall_timeout,
    drain_timeout: Annotated[
        float,
        typer.Option(help="Seconds for running requests to finish after SIGTERM", envvar="TCDEPLOY_DRAIN_TIMEOUT"),
    ] = ServerSettings.drain_timeout,
    canary_interval: Annotated[
        float,
        typer.Option(
            help="Seconds between canary rounds, which rerun fixed prompts while the server is idle; 0 disables them",
            envvar="TCDEPLOY_CANARY_INTERVAL",
        ),
    ] = ServerSettings.canary_interval,
    canary_strict: Annotated[
        bool,
        typer.Option(
            "--canary-strict",
            help="Make /health and /ready return 503 after a canary result has differed",
            envvar="TCDEPLOY_CANARY_STRICT",
        ),
    ] = ServerSettings.canary_strict,
    start: Annotated[
        str,
        typer.Option(
            metavar="warm|eager",
            help="warm: answer once all programs are compiled or loaded; eager: answer with uncompiled steps at once, "
            "and replace them by programs while serving",
            envvar="TCDEPLOY_START",
        ),
    ] = ServerSettings.start,
    log_requests: Annotated[
        str,
        typer.Option(
            metavar="off|text|json",
            help="Write a line to stderr for each HTTP request: client, method, path, status, time, tokens, request id",
            envvar="TCDEPLOY_LOG_REQUESTS",
        ),
    ] = ServerSettings.log_requests,
    log_prompts: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Add the first N characters of each prompt to the lines of --log-requests; 0: none",
            envvar="TCDEPLOY_LOG_PROMPTS",
        ),
    ] = ServerSettings.log_prompts,
    log_level: Annotated[
        str,
        typer.Option(
            metavar="debug|info|warning|error", help="Lowest level of messages on stderr", envvar="TCDEPLOY_LOG_LEVEL"
        ),
    ] = "warning",
    metrics_prefix: Annotated[
        str,
        typer.Option(
            metavar="PREFIX",
            help="Prefix of the names in /metrics; vllm: makes the dashboards of vLLM work",
            envvar="TCDEPLOY_METRICS_PREFIX",
        ),
    ] = ServerSettings.metrics_prefix,
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Base URL of an OpenTelemetry collector (OTLP over HTTP), such as http://localhost:4318, which gets a "
            "span and the latencies of each generation request",
            envvar="TCDEPLOY_OTLP_ENDPOINT",
        ),
    ] = ServerSettings.otlp_endpoint,
    cache_from: CacheFrom = None,
    allow_unsigned: AllowUnsigned = False,
    allow_rollback: AllowRollback = False,
    trusted_keys: TrustedKeys = None,
    budget: Budget = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Serve MODEL with OpenAI's and Anthropic's APIs. /ready returns 200 once every bucket is warm and checked.

    With --start eager it returns 200 earlier, and /ready?level=warm once every bucket is warm.
    """
    options = {name: value for name, value in locals().items() if name not in ("recipe", "dry_run", "json")}
    run(read_arguments(recipe, **options), dry_run, json)


@dataclass(frozen=True)
class ServeArguments:
    """The arguments of `tcdeploy serve`, checked."""

    recipe: Recipe
    settings: ServerSettings
    cache: CacheSource | None  # where the cache is fetched from
    trusted_keys: Path | None
    budget_seconds: float | None
    log_level: str


def read_arguments(
    recipe: Recipe,
    *,
    api_key: list[str],
    served_model_name: list[str],
    served_name: str | None,
    allowed_origins: list[str],
    root_path: str,
    chat_template: Path | None,
    tool_parser: str,
    reasoning_parser: str,
    start: str,
    log_requests: str,
    log_level: str,
    otlp_endpoint: str,
    cache_from: str | None,
    allow_unsigned: bool,
    allow_rollback: bool,
    trusted_keys: Path | None,
    budget: str | None,
    **same_named: Any,
) -> ServeArguments:
    """Check the values of the options. `same_named` are settings as they are. Raises UsageError and ModelError."""
    require_cache_from(cache_from, allow_unsigned, allow_rollback)
    budget_seconds = parse_budget(budget)
    if served_name is not None:
        print("warning: --served-name is deprecated; use --served-model-name", file=sys.stderr)
    if not api_key and "TCDEPLOY_API_KEY" in os.environ:
        api_key = [""]  # a variable without a key, perhaps from an empty file, must not open the server
    names = [*served_model_name, served_name or ""]
    model_names = list(dict.fromkeys(name for name in names if name)) or [recipe.model]
    settings = ServerSettings(
        **same_named, api_keys=tuple(api_key), model=model_names[0], model_aliases=tuple(model_names[1:]),
        allowed_origins=tuple(allowed_origins), root_path=root_path.rstrip("/"),
        start=_parse_choice("--start", start, get_args(StartTier)),
        log_requests=_parse_choice("--log-requests", log_requests, get_args(RequestLogFormat)),
        otlp_endpoint=otlp_endpoint.rstrip("/"), tool_parser=_parse_choice("--tool-parser", tool_parser, TOOL_PARSERS),
        reasoning_parser=_parse_choice("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
        chat_template=None if chat_template is None else read_chat_template(chat_template),
    )  # fmt: skip
    check_settings(settings)
    _parse_choice("--log-level", log_level, LOG_LEVELS)
    cache = None if cache_from is None else CacheSource(cache_from, allow_unsigned, allow_rollback)
    return ServeArguments(recipe, settings, cache, trusted_keys, budget_seconds, log_level)


def run(arguments: ServeArguments, dry_run: bool, json: bool) -> None:
    """Serve until a signal, and exit the process; or print the plan."""
    from tcdeploy.cli import display

    recipe, settings, cache = arguments.recipe, arguments.settings, arguments.cache
    set_log_level(arguments.log_level)
    if dry_run and (arguments.budget_seconds or cache):
        raise UsageError("--dry-run excludes --budget and --cache-from", "remove --dry-run")
    if dry_run:
        with display.show_progress():
            from tcdeploy.start.model_code import decide

            planned = decide(recipe, needs_tokenizer=True, is_dry_run=True)
        display.show_plan(planned.plan, [*planned.findings, *_missing_extras(settings)], json)
        return
    require_extra("serve", SERVING)
    if settings.otlp_endpoint:
        require_extra("otel", TRACING)
    if settings.log_requests != "off":
        enable_access_log()
    with display.show_progress() as progress:
        from tcdeploy.server.http.hot_path import hot_path_from_environment
        from tcdeploy.server.run import run_server

        settings = dataclasses.replace(settings, hot_path=hot_path_from_environment(os.environ))

        def deploy() -> Deployment:
            fetch_seconds = 0.0
            if cache is not None:
                fetch_seconds = fetch_cache(
                    recipe, cache.source, arguments.trusted_keys, cache.allow_unsigned, cache.allow_rollback
                )
            from tcdeploy.start.prepare import prepare

            deployment = prepare(
                recipe, progress, trusted_keys=arguments.trusted_keys, needs_tokenizer=True,
                eager=settings.start == "eager",
            )  # fmt: skip
            enforce_budget({**deployment.stage_seconds, "fetch": fetch_seconds}, arguments.budget_seconds)
            return deployment

        def on_ready(deployment: Deployment, address: str) -> None:
            progress.finish()
            display.show_server_is_ready(deployment, address, example_request(settings, address), json)

        start_renderer()
        drop_unread_messages()
        code = run_server(settings, deploy, on_ready)
    sys.stdout.flush()
    from tcdeploy.cache.staging.folder import remove_own_staging_folders

    remove_own_staging_folders()  # os._exit runs no exit handlers
    os._exit(code)  # the engine thread may be inside a step, so a normal exit could hang


def _missing_extras(settings: ServerSettings) -> list[PlanFinding]:
    """The packages that a server needs and that are not installed, as findings of a dry run."""
    findings = []
    for extra, purpose, is_used in (("serve", SERVING, True), ("otel", TRACING, bool(settings.otlp_endpoint))):
        try:
            if is_used:
                require_extra(extra, purpose)
        except UsageError as error:
            findings.append(PlanFinding("packages", error.message, error.hint))
    return findings


def example_request(settings: ServerSettings, address: str) -> str:
    """A request to the server as a shell command, with a placeholder for the API key."""
    body = {"model": settings.model, "prompt": "This module provides", "max_tokens": 16}
    headers = ["content-type: application/json"]
    if settings.api_keys:
        headers.append("authorization: Bearer API_KEY")
    options = [word for header in headers for word in ("-H", header)]
    return shlex.join(["curl", f"{address}/v1/completions", *options, "-d", dumps(body)])


def _parse_choice(option: str, value: str, choices: tuple[ChoiceT, ...]) -> ChoiceT:
    """Raises UsageError for another value."""
    choice = next((choice for choice in choices if choice == value), None)
    if choice is None:
        raise UsageError(
            f"{option} is {value!r}; it must be {', '.join(choices[:-1])} or {choices[-1]}", f"{option} {choices[0]}"
        )
    return choice
