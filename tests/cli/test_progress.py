"""Progress on a terminal: bars, which a server stops before it prints its report."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import Any

from tcdeploy.cli.display import BarProgress, PlainProgress, show_progress

RECORD: Any = SimpleNamespace(
    seconds=1.25,
    outcome="hit",
    programs=2,
    kernels_compiled=0,
    cache_hits=2,
    captured=False,
    parity=SimpleNamespace(kl=0),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_server_stops_the_bars_before_its_report() -> None:
    """While bars are drawn, rich redirects stdout to the terminal of stderr."""
    stdout, stderr = Terminal(), Terminal()
    with redirect_stdout(stdout), redirect_stderr(stderr), show_progress() as progress:
        assert isinstance(progress, BarProgress) and sys.stdout is not stdout
        progress.stage("load")
        progress.finish()
        assert sys.stdout is stdout
        print("ready: http://127.0.0.1:8000")
        drawn = stderr.getvalue()
        progress.bucket_started("decode:4", 2, 3)
        progress.bucket_finished(RECORD)
    assert stdout.getvalue() == "ready: http://127.0.0.1:8000\n"
    assert "load" in drawn and "ready" not in drawn
    assert stderr.getvalue()[len(drawn) :].startswith("[2/3] decode:4: 1.2 s, hit, 2 programs, KL 0.0e+00\n")


def test_progress_that_is_not_a_terminal_has_a_line_per_event() -> None:
    stderr = io.StringIO()
    with redirect_stderr(stderr), show_progress() as progress:
        assert isinstance(progress, PlainProgress)
        progress.finish()
        progress.stage("load")
    assert stderr.getvalue() == "import ...\nload ...\n"
