"""`tcdeploy compile`: report what torch.compile brings for a model on this machine, bucket by bucket."""

from __future__ import annotations

from tcdeploy.cli.options import options_command
from tcdeploy.cli.report_options import Budget, DryRun, Json, enforce_budget, parse_budget, warn_if_busy
from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import Recipe


@options_command
def compile_model(recipe: Recipe, dry_run: DryRun = False, budget: Budget = None, json: Json = False) -> None:
    """Compile MODEL and report the speed-up, the difference from eager execution and the memory of each bucket."""
    from tcdeploy.cli import display

    if budget and dry_run:
        raise UsageError("--budget excludes --dry-run", "remove --budget")
    budget_seconds = parse_budget(budget)
    if not dry_run:
        warn_if_busy()
    with display.show_progress() as progress:
        if dry_run:
            from tcdeploy.start.decide import decide

            planned = decide(recipe, is_dry_run=True)
        else:
            from tcdeploy.start.prepare import prepare

            deployment = prepare(recipe, progress, measure=True)
    if dry_run:
        display.show_plan(planned.plan, planned.findings, json)
        return
    display.show_compile_report(deployment, json)
    enforce_budget(deployment.stage_seconds, budget_seconds)
