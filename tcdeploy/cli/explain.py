"""`tcdeploy explain`: what torch.compile does with a model, what prevents compiling it, and the break-even point."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcdeploy.cli.options import options_command
from tcdeploy.cli.report_options import Json, warn_if_busy
from tcdeploy.errors import OutputError, ThresholdError, UsageError
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:
    from tcdeploy.cli.explain_display import WrittenTrace

TRACE_PREFIX, TRACE_SUFFIX = "tcdeploy-explain-", ".log"
MAX_TRACE_BYTES = 256 << 20  # of a file; the trace of an 8B model with ten buckets is a tenth of this
MAX_TRACES = 5  # the newest files that are kept


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

        with _writing_trace(trace) as written:
            explanation = explain_model(recipe, progress, measures=measure, profiles=kernels)
    show_explanation(explanation, written, json)
    findings = len(explanation.findings)
    if findings:
        count = f"{findings} finding{'s' if findings > 1 else ''}"
        raise ThresholdError(f"{count} in {recipe.model}", "apply the cure of each finding, and run the command again")


@contextlib.contextmanager
def _writing_trace(folder: Path | None) -> Iterator[WrittenTrace | None]:
    """Write the trace of the block to a new file in `folder`. None: write no trace. Raises OutputError."""
    from tcdeploy.cli.explain_display import WrittenTrace
    from tcdeploy.torch_compat.dynamo.compile_trace import write_trace

    if folder is None:
        yield None
        return
    written = WrittenTrace(new_trace_path(folder))
    with write_trace(written.path, MAX_TRACE_BYTES) as file:
        yield written
    written.omitted_records = file.num_omitted


def new_trace_path(folder: Path) -> Path:
    """Create an empty file, after removing the oldest files of earlier runs. Returns its path. Raises OutputError."""
    path = folder / f"{TRACE_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{TRACE_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(folder.glob(f"{TRACE_PREFIX}*{TRACE_SUFFIX}"), key=lambda file: file.stat().st_mtime)
        for file in files[: max(0, len(files) - MAX_TRACES + 1)]:
            file.unlink(missing_ok=True)
        path.touch()
    except OSError as error:
        hint = "pass another folder: --trace DIR"
        raise OutputError(f"the trace cannot be written to {folder}: {error}", hint) from None
    return path
