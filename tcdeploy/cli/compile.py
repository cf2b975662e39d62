"""`tcdeploy compile`: report what torch.compile brings for a model on this machine, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from tcdeploy.cli.budget import Budget, enforce_budget, parse_budget
from tcdeploy.cli.options import recipe_command
from tcdeploy.cli.report_options import DryRun, Json
from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import Recipe


@recipe_command
def compile_model(
    recipe: Recipe,
    dry_run: DryRun = False,
    explain_breaks: Annotated[
        bool, typer.Option("--explain-breaks", help="Print each graph break with its location and reason, and exit")
    ] = False,
    budget: Budget = None,
    json: Json = False,
) -> None:
    """Compile MODEL and report the speed-up, the difference from eager execution and the memory of each bucket."""
    from tcdeploy.cli import display

    if budget and (dry_run or explain_breaks):
        raise UsageError("--budget excludes --dry-run and --explain-breaks", "remove --budget")
    budget_seconds = parse_budget(budget)
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
    if not (dry_run or explain_breaks):
        enforce_budget(result.stage_seconds, budget_seconds)
