"""The progress bar: on a terminal only, after two seconds, on one line of at most its width."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.llm import progress_bar as bar_module
from tcdeploy.llm.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only item is the time."""
    now = [100.0]
    monkeypatch.setattr(bar_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setenv("COLUMNS", "80")
    return now


def run(bar: ProgressBar, clock: list[float], seconds: float, num_answers: int = 4) -> None:
    for _ in range(num_answers):
        clock[0] += seconds / num_answers
        bar.add(10, True)
    bar.close()


def test_a_long_batch_is_counted_on_one_line(clock: list[float]) -> None:
    terminal = Terminal()
    run(ProgressBar(4, stream=terminal), clock, 8.0)
    *lines, end = terminal.getvalue().split("\r")[1:]
    assert [line.split("]")[1].strip() for line in lines] == [
        "1/4 answers, 10 tokens, 5 tokens/s, 2 s", "2/4 answers, 20 tokens, 5 tokens/s, 4 s",
        "3/4 answers, 30 tokens, 5 tokens/s, 6 s", "4/4 answers, 40 tokens, 5 tokens/s, 8 s",
    ]  # fmt: skip
    assert lines[1].startswith("[############............] ")
    assert end.endswith("\n") and {len(line) for line in (*lines, end[:-1])} == {79}


@pytest.mark.parametrize(
    ("stream", "is_on", "seconds"), [(Terminal(), True, 1.9), (Terminal(), False, 9.0), (io.StringIO(), True, 9.0)]
)
def test_nothing_is_drawn_for_a_short_batch_or_without_a_terminal(
    stream: Any, is_on: bool, seconds: float, clock: list[float]
) -> None:
    run(ProgressBar(4, is_on, stream), clock, seconds)
    assert stream.getvalue() == ""
