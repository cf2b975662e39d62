"""Lays out tables for the width of a terminal. display.py prints them.

Numbers and names are never broken over two lines. A table that is too wide first omits optional columns, the one with
the highest rank first, and a line below the table names them. If the other columns do not fit either, each row is
printed as a block of `name: value` lines. A table that is not printed to a terminal has all columns.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

GAP = 2  # spaces between columns
MIN_TEXT_WIDTH = 24  # of a column of sentences or of shortened names, unless its content is shorter
PLAIN_WIDTH = 160  # columns, if the output is not a terminal and no table is wider
CUT, NO_VALUE = "...", "-"
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|us|min|h|d|[kMG]i?B|GB/s|TFLOP/s|tok/s)\b)")


class Column(NamedTuple):
    """`text` wraps at spaces, and `long name` is shortened with CUT; cells of the other kinds are kept on one line.

    `rank`: 0 for a column that is always shown. Of the others, those with the highest rank are omitted first.
    """

    header: str
    kind: Literal["name", "number", "text", "long name"] = "number"
    rank: int = 0

    def cut(self, cell: str, width: int) -> str:
        return shorten(cell, width) if self.kind == "long name" else cell


@dataclass(frozen=True)
class Table:
    """`title`: a line above the table; empty for none."""

    columns: tuple[Column, ...]
    rows: Sequence[Sequence[str]]
    title: str = ""


Cell: TypeAlias = tuple[Column, Callable[[Any], str]]  # a column, and its cell of an item
Cells: TypeAlias = Sequence[Cell]


def tabulate(items: Iterable[Any], cells: Cells, title: str = "") -> Table:
    """A table with a row for each item."""
    rows = [[cell(item) for _, cell in cells] for item in items]
    return Table(tuple(column for column, _ in cells), rows, title)


class Layout(NamedTuple):
    """The shown columns by index, with their widths, and the headers of the omitted ones."""

    widths: dict[int, int]
    omitted: tuple[str, ...] = ()


def fit(table: Table, width: int | None, cell_width: Callable[[str], int] = len) -> Layout | None:
    """The layout for a terminal of `width` columns; None if the rows have to be printed as blocks of lines.

    `width`: None if the output is not a terminal: all columns, with headers on one line. Text wraps at PLAIN_WIDTH.
    """
    shown = list(range(len(table.columns)))
    widths = {index: _least_width(table, index, width is None, cell_width) for index in shown}
    while width is not None and _total(widths) > width:
        optional = [index for index in widths if table.columns[index].rank]
        if not optional:
            return None
        del widths[max(optional, key=lambda index: table.columns[index].rank)]
    spare = max((width or PLAIN_WIDTH) - _total(widths), 0)
    # Text gains first, since a wrapped cell takes a line per row, and a wrapped header one line.
    for index in sorted(widths, key=lambda index: table.columns[index].kind not in ("text", "long name")):
        gain = min(spare, _longest(_texts(table, index), cell_width) - widths[index])
        widths[index] += gain
        spare -= gain
    return Layout(widths, tuple(table.columns[index].header for index in shown if index not in widths))


def as_blocks(table: Table, width: int) -> list[str]:
    """Each row as `name: value` lines, with an empty line between rows. Only text wraps, and at spaces."""
    lines: list[str] = []
    for row in table.rows:
        if lines:
            lines.append("")
        for column, cell in zip(table.columns, row, strict=True):
            line = f"{column.header}: {cell}" if column.header else cell
            lines += wrap(line, width) if column.kind == "text" else [line]
    return lines


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, unless a word is longer; all but the first are indented.

    A number stays on the line of its unit.
    """
    joined = BEFORE_UNIT.sub(NO_BREAK_SPACE, text)
    lines = textwrap.wrap(joined, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [line.replace(NO_BREAK_SPACE, " ") for line in lines]


def shorten(name: str, width: int) -> str:
    """The name, cut to `width` characters with a sign if it is longer."""
    return name if len(name) <= width else name[: width - len(CUT)] + CUT


def optional(value: float | None, form: str, text: str = "{}") -> str:
    """The value in `text`, or NO_VALUE."""
    return NO_VALUE if value is None else text.format(f"{value:{form}}")


def _least_width(table: Table, index: int, is_plain: bool, cell_width: Callable[[str], int]) -> int:
    header, *cells = _texts(table, index)
    header_width, longest_cell = (
        _longest([header] if is_plain else header.split(), cell_width),
        _longest(cells, cell_width),
    )
    kind = table.columns[index].kind
    if kind == "text":
        words = [word for cell in cells for word in cell.split()]
        return max(header_width, _longest(words, cell_width), min(longest_cell, MIN_TEXT_WIDTH))
    if kind == "long name" and not is_plain:
        return max(header_width, min(longest_cell, MIN_TEXT_WIDTH))
    return max(header_width, longest_cell)


def _texts(table: Table, index: int) -> list[str]:
    """The header and the cells of a column."""
    return [table.columns[index].header, *(row[index] for row in table.rows)]


def _longest(texts: Sequence[str], cell_width: Callable[[str], int]) -> int:
    return max(map(cell_width, texts), default=0)


def _total(widths: dict[int, int]) -> int:
    return sum(width + GAP for width in widths.values()) - GAP
