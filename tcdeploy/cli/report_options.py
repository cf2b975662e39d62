"""Options that decide what a command prints, shared by all commands.

A command prints tables and sentences, and with `--json` one JSON document instead. `bench` prints the document without
`--json` too if stdout is not a terminal, which scripts rely on.
"""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and exit")]
