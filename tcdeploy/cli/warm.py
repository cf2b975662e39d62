"""`tcdeploy warm`: fill the persistent cache, prove every bucket, and say whether it was warm already."""

from __future__ import annotations

from typing import Annotated

import typer

from tcdeploy.cli.options import recipe_command
from tcdeploy.errors import ThresholdError
from tcdeploy.recipe import Recipe


@recipe_command
def warm(
    recipe: Recipe,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop")] = False,
    missed: Annotated[
        str | None, typer.Option("--from", help="Add buckets for the shapes that a server missed", metavar="FILE")
    ] = None,
    require_hit: Annotated[bool, typer.Option("--require-hit", help="Exit 6 if anything had to compile")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
) -> None:
    """Compile, capture and check every bucket of MODEL into the cache folder; safe to repeat, also in parallel."""
    from tcdeploy.cli import display

    with display.reporting() as progress:
        from tcdeploy import pipeline

        if missed is not None:
            from tcdeploy.server.missed import read_missed, with_missed

            recipe = with_missed(recipe, pipeline.decide(recipe).plan, read_missed(missed))
        if dry_run:
            plan = pipeline.decide(recipe).plan
        else:
            deployment = pipeline.prepare(recipe, progress)
    if dry_run:
        display.show_plan(plan, json)
        return
    display.show_warm_report(deployment, json)
    compiled = [record.bucket for record in deployment.records if record.outcome == "miss"]
    if require_hit and compiled:
        raise ThresholdError(
            f"{len(compiled)} of {len(deployment.records)} buckets had to compile: {', '.join(compiled)}",
            "they are in the cache now; in CI, restore the cache folder that an earlier warm filled",
        )
