"""`tcdeploy compile`: what torch.compile does to this model on this machine, for a person who decides."""

from __future__ import annotations

from typing import Annotated

import typer

from tcdeploy.cli.options import recipe_command
from tcdeploy.recipe import Recipe


@recipe_command
def compile_model(
    recipe: Recipe,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop")] = False,
    explain_breaks: Annotated[
        bool, typer.Option("--explain-breaks", help="Show where and why tracing breaks, and stop")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
) -> None:
    """Compile MODEL and compare it with eager, bucket by bucket."""
    from tcdeploy import pipeline
    from tcdeploy.cli import display

    if dry_run:
        display.show_plan(pipeline.decide(recipe).plan, json)
        return
    if explain_breaks:
        with display.reporting() as progress:
            breaks = pipeline.explain_breaks(recipe, progress)
        display.show_breaks(breaks, json)
        return
    with display.reporting() as progress:
        deployment = pipeline.prepare(recipe, progress, measure=True)
    display.show_compile_report(deployment, json)
