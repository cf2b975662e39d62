"""The report of `tcdeploy doctor` on stdout: the worst finding, a table of all checks, and text for a bug report."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tcdeploy.cli.display import json_document, show_table

if TYPE_CHECKING:
    from tcdeploy.doctor.result import Result


def show_results(results: Sequence[Result], report: str, json: bool) -> None:
    """`results`: the worst first. `report`: the text for a bug report; "" if it is not printed."""
    counts = Counter(result.state for result in results)
    if json:
        documents = [dataclasses.asdict(result) for result in results]
        print(json_document("doctor", findings=counts["finding"], results=documents, report=report))
        return
    worst = results[0]
    if worst.state == "finding":
        print(_wrap(f"{worst.check}: {worst.summary}"))
    else:
        print(f"no findings: {counts['ok']} checks ok, {counts['note']} notes, which need no action")
    print()
    show_table(("", "check", "result"), [_row(result) for result in results], right=False)
    if report:
        print(f"\n{report}")


def _wrap(text: str) -> str:
    """Between words, to the width of a terminal. One line in a file or a pipe."""
    return textwrap.fill(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text


def _row(result: Result) -> tuple[str, str, str]:
    label = "cure" if result.state == "finding" else "hint"
    cure = f"\n{label}: {result.cure}" if result.cure else ""
    return result.state, result.check, f"{result.summary}{cure}"
