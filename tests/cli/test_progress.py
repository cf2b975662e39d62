"""Progress of a command on a terminal: lines above a line that moves, which a server stops before its report."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.cli.display import MovingProgress, show_progress

RECORD: Any = SimpleNamespace(
    outcome="hit", programs=2, kernels_compiled=0, cache_hits=2, captured=False, parity=SimpleNamespace(kl=0)
)
BUCKET_LINE = re.compile(r"\[2/3\] decode:4 +0\.\d s, hit, 2 programs, KL 0\.0e\+00")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report_a_start(progress: Any) -> None:
    progress.stage("load")
    progress.stage("compile")
    progress.step(2, 3, "decode:4")
    progress.detail("package 1 of 5")
    progress.bucket_finished(RECORD)


def test_a_server_stops_the_moving_line_before_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it moves, rich redirects stdout to the terminal of stderr."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stdout, stderr = Terminal(), Terminal()
    with redirect_stdout(stdout), redirect_stderr(stderr), show_progress() as progress:
        assert isinstance(progress, MovingProgress) and sys.stdout is not stdout
        report_a_start(progress)
        progress.finish()
        assert sys.stdout is stdout
        print("ready: http://127.0.0.1:8000")
        drawn = stderr.getvalue()
        report_a_start(progress)
    assert stdout.getvalue() == "ready: http://127.0.0.1:8000\n"
    assert "\x1b[" in drawn, "a line has moved"
    for stage in ("import", "load", "compile"):
        assert len(re.findall(rf"{stage} +0\.\d s", drawn)) == 1, "each stage has one line"
    assert BUCKET_LINE.search(drawn) and "ready" not in drawn
    after = stderr.getvalue()[len(drawn) :]
    assert "\x1b[" not in after and BUCKET_LINE.search(after)


@pytest.mark.parametrize("is_dumb", [False, True])
def test_without_a_terminal_that_can_redraw_a_line_there_are_only_lines(
    is_dumb: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb" if is_dumb else "xterm")
    stderr = Terminal() if is_dumb else io.StringIO()
    with redirect_stderr(stderr), show_progress() as progress:
        report_a_start(progress)
    assert "\r" not in stderr.getvalue() and "\x1b" not in stderr.getvalue()
    names = [re.split(r" {2,}", line)[0] for line in stderr.getvalue().splitlines()]
    assert names == ["import", "load", "[2/3] decode:4", "compile"]
