"""`tcdeploy compile`: report what torch.compile brings for a model on this machine, bucket by bucket."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tcdeploy.cli.budget import Budget, enforce_budget, parse_budget
from tcdeploy.cli.options import recipe_command
from tcdeploy.cli.report_options import DryRun, Json, warn_if_busy
from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import Recipe


@recipe_command
def compile_model(
    recipe: Recipe,
    dry_run: DryRun = False,
    explain_breaks: Annotated[
        bool, typer.Option("--explain-breaks", help="Deprecated: use `tcdeploy explain MODEL --no-measure`")
    ] = False,
    budget: Budget = None,
    json: Json = False,
) -> None:
    """Compile MODEL and report the speed-up, the difference from eager execution and the memory of each bucket."""
    from tcdeploy.cli import display

    if budget and (dry_run or explain_breaks):
        raise UsageError("--budget excludes --dry-run and --explain-breaks", "remove --budget")
    budget_seconds = parse_budget(budget)
    if explain_breaks:
        show_breaks(recipe, json)
        return
    if not dry_run:
        warn_if_busy()
    with display.show_progress() as progress:
        from tcdeploy.start import model_code

        if dry_run:
            planned = model_code.decide(recipe, is_dry_run=True)
        else:
            deployment = model_code.prepare(recipe, progress, measure=True)
    if dry_run:
        display.show_plan(planned.plan, planned.findings, json)
        return
    display.show_compile_report(deployment, json)
    enforce_budget(deployment.stage_seconds, budget_seconds)


def show_breaks(recipe: Recipe, json: bool) -> None:
    """The findings of `explain --no-measure`, with exit code 0 and the document of earlier releases."""
    from tcdeploy.cli.explain import run_explanation
    from tcdeploy.cli.explain_display import breaks_document, show_explanation

    print("warning: --explain-breaks is deprecated; use tcdeploy explain MODEL --no-measure", file=sys.stderr)
    explanation, _ = run_explanation(recipe)
    if json:
        print(breaks_document(explanation))
    else:
        show_explanation(explanation, None, as_json=False)
