"""`tcdeploy warm`: fill the persistent cache, prove every bucket, and say whether it was warm already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcdeploy.cli.options import recipe_command
from tcdeploy.cli.remote_cache import AllowUnsigned, CacheFrom, TrustedKeys, fetch_cache, parse_seconds, push_cache
from tcdeploy.errors import ThresholdError, UsageError
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:
    from tcdeploy.pipeline import Deployment


@recipe_command
def warm(
    recipe: Recipe,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop")] = False,
    missed_shapes: Annotated[
        str | None, typer.Option("--from", help="Add buckets for the shapes that a server missed", metavar="FILE")
    ] = None,
    require_hit: Annotated[bool, typer.Option("--require-hit", help="Exit 6 if anything had to compile")] = False,
    budget: Annotated[str | None, typer.Option(help="Exit 6 if the start took longer: 6s", metavar="SECONDS")] = None,
    cache_from: CacheFrom = None,
    cache_to: Annotated[
        str | None,
        typer.Option("--cache-to", help="Pack the plan and push it to this folder of bundles", metavar="URL"),
    ] = None,
    key: Annotated[Path | None, typer.Option("--sign", help="Sign what is pushed", metavar="NAME.key")] = None,
    allow_unsigned: AllowUnsigned = False,
    trusted_keys: TrustedKeys = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
) -> None:
    """Compile, capture and check every bucket of MODEL into the cache folder; safe to repeat, also in parallel."""
    from tcdeploy.cli import display

    if dry_run and (require_hit or budget or cache_from or cache_to):
        raise UsageError("a dry run starts nothing", "leave out --dry-run, or what belongs to a start")
    if key is not None and cache_to is None:
        raise UsageError("--sign is for what is pushed", "add --cache-to URL")
    if cache_from is None and allow_unsigned:
        raise UsageError("nothing is fetched that could be signed", "add --cache-from URL")
    budget_seconds, fetch_seconds = None if budget is None else parse_seconds(budget), 0.0
    with display.show_progress() as progress:
        from tcdeploy import pipeline

        if missed_shapes is not None:
            from tcdeploy.server.missed_shapes import read_missed_shapes, with_missed_shapes

            recipe = with_missed_shapes(recipe, pipeline.decide(recipe).plan, read_missed_shapes(missed_shapes))
        if cache_from is not None:
            fetch_seconds = fetch_cache(recipe, cache_from, trusted_keys, allow_unsigned)
        if dry_run:
            plan = pipeline.decide(recipe).plan
        else:
            deployment = pipeline.prepare(recipe, progress)
    if dry_run:
        display.show_plan(plan, json)
        return
    display.show_warm_report(deployment, json)
    if require_hit:
        _enforce_hits(deployment)
    if budget_seconds is not None:
        _enforce_budget(fetch_seconds + sum(deployment.stage_seconds.values()), budget_seconds)
    if cache_to is not None:
        cache_dir, plan_key = deployment.cache_dir, deployment.plan.key
        del deployment
        pipeline.release_memory()  # the start that proves it needs the memory
        push_cache(cache_dir, plan_key, cache_to, key)


def _enforce_hits(deployment: Deployment) -> None:
    compiled = [
        record.bucket if record.cache_misses else f"{record.bucket} ({record.kernels_compiled} kernels of its programs)"
        for record in deployment.records
        if record.outcome == "miss"
    ]
    unknown = [record.bucket for record in deployment.records if record.outcome == "unknown"]
    if unknown:
        raise ThresholdError(
            f"cache hits cannot be counted with this version of torch, so {', '.join(unknown)} may have compiled",
            "the warnings above name what is missing; install a tested version of torch",
        )
    if compiled:
        raise ThresholdError(
            f"{len(compiled)} of {len(deployment.records)} buckets had to compile: {', '.join(compiled)}",
            "they are in the cache now; in CI, restore the cache folder that an earlier warm filled",
        )


def _enforce_budget(seconds: float, budget_seconds: float) -> None:
    if seconds > budget_seconds:
        raise ThresholdError(
            f"the start took {seconds:.1f} s, and {budget_seconds:g} s was the most",
            "the stages above tell where it went",
        )
