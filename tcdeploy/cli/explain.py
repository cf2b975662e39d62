"""`tcdeploy explain`: what torch.compile does with a model, what prevents compiling it, and the break-even point."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from tcdeploy.cli.options import options_command
from tcdeploy.cli.report_options import Json, warn_if_busy
from tcdeploy.errors import ThresholdError, UsageError
from tcdeploy.planning.recipe import Recipe


@options_command
def explain(
    recipe: Recipe,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure", help="Also compile the model, and report after how many tokens compiling pays"
        ),
    ] = True,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Also list the kernels of each bucket with their shares of its step time")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Also write torch's trace of all compilations to a file in this folder, for tlparse", metavar="DIR"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Explain what torch.compile does with MODEL, and what to do about it. Exits with code 6 if there is a finding.

    A finding is a graph break, a recompilation or a write to an input, with the line of the model that causes it, its
    cost and its cure. Without findings that prevent it, the model is compiled, and its steps are timed.
    """
    from tcdeploy.cli import display
    from tcdeploy.cli.explain_display import show_explanation

    if kernels and not measure:
        raise UsageError("--kernels excludes --no-measure", "remove --no-measure; --kernels profiles compiled steps")
    if measure:
        warn_if_busy()
    with display.show_progress() as progress, contextlib.redirect_stdout(sys.stderr):  # what the model prints
        from tcdeploy.explain.explain import explain as explain_model
        from tcdeploy.explain.trace_folder import writing_trace

        with writing_trace(trace) as written:
            explanation = explain_model(recipe, progress, measures=measure, profiles=kernels)
    show_explanation(explanation, written, json)
    findings = len(explanation.findings)
    if findings:
        count = f"{findings} finding{'s' if findings > 1 else ''}"
        raise ThresholdError(f"{count} in {recipe.model}", "apply the cure of each finding, and run the command again")
