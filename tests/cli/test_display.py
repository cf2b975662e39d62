"""Tables print their cells unchanged."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.cli.display import next_after_compile, show_table
from tcdeploy.cli.tables import Column, Table


def test_brackets_and_colons_in_a_cell_are_no_markup() -> None:
    out = io.StringIO()
    row = ("/cache/[bold]/:warning:", "pip install '/src[compile]'")
    show_table(Table((Column("file", "name"), Column("hint", "text")), [row]), out)
    assert "/cache/[bold]/:warning:" in out.getvalue() and "'/src[compile]'" in out.getvalue()


@pytest.mark.parametrize(
    ("outcomes", "command"),
    [(("hit", "hit"), "serve"), (("hit", "miss"), "warm"), (("hit", "uncached"), "warm"), (("hit", "unknown"), "warm")],
)
def test_compile_suggests_a_warm_start_only_if_it_compiled(
    outcomes: tuple[str, ...], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: Any = [SimpleNamespace(outcome=outcome) for outcome in outcomes]
    monkeypatch.setattr("sys.argv", ["tcdeploy", "compile", "builtin:tiny", "--budget", "9s", "--buckets", "32"])
    assert next_after_compile(records) == f"next: tcdeploy {command} builtin:tiny --buckets 32"
