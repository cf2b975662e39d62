"""Tables print their cells unchanged."""

from __future__ import annotations

import io

from tcdeploy.cli.display import show_table
from tcdeploy.cli.tables import Column, Table


def test_brackets_and_colons_in_a_cell_are_no_markup() -> None:
    out = io.StringIO()
    row = ("/cache/[bold]/:warning:", "pip install 'tcdeploy[compile]'")
    show_table(Table((Column("file", "name"), Column("hint", "text")), [row]), out)
    assert "/cache/[bold]/:warning:" in out.getvalue() and "'tcdeploy[compile]'" in out.getvalue()
