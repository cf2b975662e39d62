"""Lines of progress: one for each stage, another one at least every QUIET_S, and by default in a terminal only."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
from pathlib import Path

import pytest

from tcdeploy.host import plain_progress
from tcdeploy.host.plain_progress import PlainProgress, default_progress
from tcdeploy.host.progress import NullProgress, StageProgress
from tests.conftest import TINY, TINY_BATCH_SIZES, TINY_BUCKETS, cli_environment
from tests.fork_server import ForkedProcess, ForkServer

PREPARE = """
import contextlib, io, sys
from tcdeploy import prepare
from tcdeploy.host.progress import NullProgress
from tcdeploy.planning.recipe import build_recipe
recipe = build_recipe({options!r}, environ={{}})
prepare(recipe)
print("prepared", file=sys.stderr)
prepare(recipe, NullProgress())
with contextlib.redirect_stderr(io.StringIO()) as log:
    prepare(recipe)
print("the log has", len(log.getvalue()), "characters", file=sys.stderr)
"""


def test_a_stage_has_one_line_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainProgress() as progress:
        assert capsys.readouterr().err == ""
        progress.stage("decide")
        progress.stage("decide")
        assert re.fullmatch(r"import +0\.\d s\n", capsys.readouterr().err)
        progress.stage("reference")
        progress.step(1, 2, "200 tokens")
        progress.step(2, 2, "64 tokens")
    assert re.fullmatch(r"decide +0\.\d s\nreference +0\.\d s, 2 of 2\n", capsys.readouterr().err)
    assert progress.position.stage == "", "no stage is running"


def test_a_stage_that_takes_long_says_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_progress, "QUIET_S", 0.2)
    monkeypatch.setattr(plain_progress, "POLL_S", 0.02)
    with PlainProgress("compile") as progress:
        progress.step(1, 4, "prefill:128")
        progress.detail("package 2 of 5")
        time.sleep(0.9)
        lines = capsys.readouterr().err.splitlines()
        progress.finish()
        time.sleep(0.4)
    assert 2 <= len(lines) <= 4
    for line in lines:
        assert re.fullmatch(r"compile \.\.\. +0\.\d s, \[1/4\] prefill:128, package 2 of 5", line)
    assert len(capsys.readouterr().err.splitlines()) == 1, "no line while nothing is running"
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_a_failed_start_leaves_the_line_of_its_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(ValueError), PlainProgress("load") as progress:
        progress.detail("weights")
        raise ValueError
    assert re.fullmatch(r"load \.\.\. +0\.\d s, weights\n", capsys.readouterr().err)


def test_the_seconds_left_are_those_of_the_stages_that_have_not_ended() -> None:
    progress = StageProgress()
    progress.stage("import")
    assert progress.seconds_left is None
    progress.stage("load")
    progress.expect({"decide": 1e6, "import": 1000.0, "load": 100.0, "compile": 10.0})  # this start has no `decide`
    assert progress.seconds_left == pytest.approx(110, abs=1)
    progress.stage("compile")
    assert progress.seconds_left == pytest.approx(10, abs=1)
    progress.stage("canary")
    assert progress.seconds_left is None, "the earlier start did not record this stage"


def test_prepare_shows_its_stages_in_a_terminal_only(tmp_path: Path, cache_dir: str, fork_server: ForkServer) -> None:
    environ = cli_environment(tmp_path)
    if not fork_server.supports(environ):
        pytest.skip("forks are not supported")
    options = {"model": TINY, "buckets": TINY_BUCKETS, "batch_sizes": TINY_BATCH_SIZES, "cache_dir": cache_dir}
    terminal, end = os.openpty()
    status = fork_server._spawn((), environ, PREPARE.format(options=options), end, end)
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the process has ended
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    assert ForkedProcess(status).wait(60) == 0, shown
    text, _, rest = shown.decode().replace("\r\n", "\n").partition("prepared\n")
    names = [re.split(r" {2,}", line)[0] for line in text.splitlines() if re.search(r" \d+\.\d s", line)]
    buckets = [
        f"[{number}/4] {name}" for number, name in enumerate(("prefill:128", "prefill:32", "decode:4", "decode:1"), 1)
    ]
    assert names == ["import", "decide", "load", "weights", "reference", *buckets, "compile", "record"]
    assert "\r" not in text and "\x1b" not in text
    assert rest == "the log has 0 characters\n"


def test_without_a_terminal_nothing_is_shown() -> None:
    with contextlib.redirect_stderr(io.StringIO()), default_progress() as progress:
        assert isinstance(progress, NullProgress)
