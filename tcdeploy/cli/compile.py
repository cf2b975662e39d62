"""`tcdeploy compile`: what torch.compile does to this model on this machine, for a person who decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from tcdeploy.cli.options import recipe_command
from tcdeploy.planning.recipe import Recipe


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
    from tcdeploy.cli import display

    with display.show_progress() as progress:
        from tcdeploy import pipeline

        show: Callable[[Any, bool], None]
        result: Any
        if dry_run:
            show, result = display.show_plan, pipeline.decide(recipe).plan
        elif explain_breaks:
            show, result = display.show_breaks, pipeline.explain_breaks(recipe, progress)
        else:
            show, result = display.show_compile_report, pipeline.prepare(recipe, progress, measure=True)
    show(result, json)
