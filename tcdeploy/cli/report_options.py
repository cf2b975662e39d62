"""Options that decide what a command prints, shared by all commands.

A command prints tables and sentences, and with `--json` one JSON document instead. `bench` prints the document without
`--json` too if stdout is not a terminal, which scripts rely on.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tcdeploy.host.resources import cpu_contention

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and what this machine lacks for it, and exit with 0")
]


def warn_if_busy() -> None:
    """Warn that the timings of this command are not reliable now. Call it before the command computes."""
    if reason := cpu_contention():
        print(f"warning: {reason}; timings are not reliable on a busy machine", file=sys.stderr)
