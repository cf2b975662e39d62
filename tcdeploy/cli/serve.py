"""`tcdeploy serve`: an OpenAI-compatible server on the warmed programs."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from tcdeploy import __version__
from tcdeploy.cli.options import options_command
from tcdeploy.cli.process import LOGGER_NAME, enable_access_log
from tcdeploy.cli.remote_cache import AllowRollback, AllowUnsigned, CacheFrom, TrustedKeys, cache_source, fetch_cache
from tcdeploy.cli.report_options import Budget, DryRun, Json, enforce_budget, parse_budget
from tcdeploy.cli.standard_streams import drop_unread_messages
from tcdeploy.errors import UsageError
from tcdeploy.planning.dry_run import PlanFinding
from tcdeploy.planning.extras import require_extra
from tcdeploy.planning.recipe import Recipe
from tcdeploy.remote.address import CacheSource
from tcdeploy.server.settings import ServerSettings, check_package_build, check_settings
from tcdeploy.text.chat_template import start_renderer

if TYPE_CHECKING:
    from tcdeploy.start.deployment import Deployment

SERVING, TRACING = "serve a model", "export traces (--otlp-endpoint)"  # what extras are needed for


@options_command
def serve(
    recipe: Recipe,
    settings: ServerSettings,
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
    cache = cache_source(cache_from, allow_unsigned, allow_rollback)
    budget_seconds = parse_budget(budget)
    settings = complete_settings(settings, recipe)
    logging.getLogger(LOGGER_NAME).setLevel(settings.log_level.upper())
    if not dry_run:
        _run(recipe, settings, cache, trusted_keys, budget_seconds, json)
        return
    if budget_seconds or cache:
        raise UsageError("--dry-run excludes --budget and --cache-from", "remove --dry-run")
    from tcdeploy.cli import display

    with display.show_progress():
        from tcdeploy.start.decide import decide
        from tcdeploy.start.planned import StartRequest

        jit_reason = StartRequest(recipe, eager=settings.start == "eager").jit_reason
        planned = decide(recipe, needs_tokenizer=True, is_dry_run=True, jit_reason=jit_reason)
    display.show_plan(planned.plan, [*planned.findings, *_missing_extras(settings)], json)


def complete_settings(settings: ServerSettings, recipe: Recipe) -> ServerSettings:
    """The settings with the names of the model, checked. Raises UsageError."""
    names = [*dict.fromkeys(filter(None, settings.model_aliases))] or [recipe.model]
    settings = dataclasses.replace(settings, model=names[0], model_aliases=tuple(names[1:]))
    if not settings.api_keys and "TCDEPLOY_API_KEY" in os.environ:
        # A variable without a key, perhaps from an empty file, must not open the server.
        settings = dataclasses.replace(settings, api_keys=("",))
    check_settings(settings)
    check_package_build(settings, recipe)
    return settings


def _run(
    recipe: Recipe, settings: ServerSettings, cache: CacheSource | None, trusted_keys: Path | None,
    budget_seconds: float | None, json: bool,
) -> None:  # fmt: skip
    """Serve until a signal, and exit the process."""
    from tcdeploy.cli import display

    require_extra("serve", SERVING)
    if settings.otlp_endpoint:
        require_extra("otel", TRACING)
    if settings.log_requests != "off":
        enable_access_log()
    with display.show_progress() as progress:
        progress.message(f"tcdeploy {__version__} loads {recipe.model}")
        from tcdeploy.server.run import run_server

        def deploy() -> Deployment:
            fetch_seconds = 0.0 if cache is None else fetch_cache(recipe, cache, trusted_keys, progress)
            from tcdeploy.start.prepare import prepare

            deployment = prepare(
                recipe, progress, trusted_keys=trusted_keys, needs_tokenizer=True, eager=settings.start == "eager",
                serves=True,
            )  # fmt: skip
            enforce_budget({**deployment.stage_seconds, "fetch": fetch_seconds}, budget_seconds)
            return deployment

        def on_ready(deployment: Deployment, address: str) -> None:
            example = example_request(settings, address)
            display.show_server_is_ready(deployment, address, example, progress.seconds, json)

        start_renderer()
        drop_unread_messages()
        code = run_server(settings, deploy, on_ready, progress)
    sys.stdout.flush()
    from tcdeploy.cache.staging.folder import remove_own_staging_folders

    remove_own_staging_folders()  # os._exit runs no exit handlers
    os._exit(code)  # the engine thread may be inside a step, so a normal exit could hang


def _missing_extras(settings: ServerSettings) -> list[PlanFinding]:
    """The packages that a server needs and that are not installed, as findings of a dry run."""
    purposes = {"serve": SERVING}
    if settings.otlp_endpoint:
        purposes["otel"] = TRACING
    findings = []
    for extra, purpose in purposes.items():
        try:
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
