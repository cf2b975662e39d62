"""`tcdeploy compile`: report what torch.compile brings for a model on this machine, bucket by bucket."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from tcdeploy.bench.quality_settings import TextSettings
from tcdeploy.cli.options import options_command
from tcdeploy.cli.report_options import Budget, DryRun, Json, enforce_budget, parse_budget, warn_if_busy
from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:
    from tcdeploy.bench.quality import QualityRun  # imports torch
    from tcdeploy.host.progress import Progress


@options_command
def compile_model(
    recipe: Recipe, settings: TextSettings, dry_run: DryRun = False, budget: Budget = None, json: Json = False
) -> None:
    """Compile MODEL and report the speed-up, the difference from eager execution and the memory of each bucket."""
    from tcdeploy.cli import display

    if budget and dry_run:
        raise UsageError("--budget excludes --dry-run", "remove --budget")
    if settings.text is not None and dry_run:
        raise UsageError("--text excludes --dry-run", "remove --text and --against")
    budget_seconds = parse_budget(budget)
    if not dry_run:
        warn_if_busy()
    with display.show_progress() as progress:
        if dry_run:
            from tcdeploy.start.decide import decide

            planned = decide(recipe, is_dry_run=True)
        else:
            from tcdeploy.start.prepare import prepare

            with _quality_run(recipe, settings, progress) as quality_run:
                deployment = prepare(recipe, progress, measure=True)
                quality = quality_run.measure(deployment) if quality_run is not None else None
    if dry_run:
        display.show_plan(planned.plan, planned.findings, json)
        return
    display.show_compile_report(deployment, quality, json)
    enforce_budget(deployment.stage_seconds, budget_seconds)


def _quality_run(
    recipe: Recipe, settings: TextSettings, progress: Progress
) -> AbstractContextManager[QualityRun | None]:
    if settings.text is None:
        return nullcontext()
    from tcdeploy.bench.token_windows import read_text

    text = read_text(settings.text, settings.tokens)
    from tcdeploy.bench import quality  # imports torch

    return quality.quality_run(recipe, settings, text, progress)
