"""The report of `tcdeploy doctor` on stdout: the worst finding, a table of all checks, and text for a bug report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tcdeploy.cli.display import json_document, show_sentence, show_table
from tcdeploy.cli.tables import Column, Table

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
        show_sentence(f"{worst.check}: {worst.summary}")
    else:
        print(f"no findings: {counts['ok']} checks ok, {counts['note']} notes, which need no action")
    print()
    columns = (Column("", "name"), Column("check", "name"), Column("result", "text"))
    show_table(Table(columns, [row for result in results for row in _rows(result)]))
    if report:
        print(f"\n{report}")


def _rows(result: Result) -> list[tuple[str, str, str]]:
    """A row, and one with the cure below it."""
    label = "cure" if result.state == "finding" else "hint"
    cures = [("", "", f"{label}: {result.cure}")] if result.cure else []
    return [(result.state, result.check, result.summary), *cures]
