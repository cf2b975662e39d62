"""Options that several commands share: what they print, and the time that a start may take.

With `--json` a command prints one JSON document instead of tables and sentences. `bench` prints the document without
`--json` too if stdout is not a terminal, which scripts rely on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tcdeploy.errors import ThresholdError, UsageError
from tcdeploy.host.resources import cpu_contention

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and what this machine lacks for it, and exit with 0")
]
TargetGPU = Annotated[
    str | None,
    typer.Option(
        "--target-gpu",
        help="Build for this GPU, which the machine need not have; with --dry-run, only plan for it. A known name such "
        "as h100, or a file with the output of `tcdeploy doctor --describe-gpu`",
        metavar="NAME|FILE",
    ),
]
Winners = Annotated[
    Path | None,
    typer.Option(
        help="With --target-gpu: bundle or cache folder of such a GPU, whose measured kernel configurations are used",
        metavar="BUNDLE",
        show_default=False,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(help="Exit with code 6 if the start took longer, imports included; for example 6s", metavar="SECONDS"),
]


def warn_if_busy() -> None:
    """Warn that the timings of this command are not reliable now. Call it before the command computes."""
    if reason := cpu_contention():
        print(f"warning: {reason}; timings are not reliable on a busy machine", file=sys.stderr)


def parse_budget(text: str | None) -> float | None:
    """Parse `6s` or `6`; None without a budget. Raises UsageError."""
    if text is None:
        return None
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--budget is {text!r}, expected a positive number of seconds", "--budget 6s")
    return seconds


def enforce_budget(stage_seconds: Mapping[str, float], budget: float | None) -> None:
    """Raise ThresholdError, which names the slowest stage, if the stages together took longer than the budget."""
    seconds = sum(stage_seconds.values())
    if budget is not None and seconds > budget:
        slowest = max(stage_seconds, key=stage_seconds.__getitem__)
        raise ThresholdError(
            f"startup took {seconds:.1f} s, over the budget of {budget:g} s",
            f"the slowest stage was {slowest!r} with {stage_seconds[slowest]:.1f} s; raise --budget or warm the cache",
        )
