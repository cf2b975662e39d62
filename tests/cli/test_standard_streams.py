"""Stdout and stderr that are closed, full, or without a reader."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import PACKAGES

STREAMS = "from tcdeploy.cli.standard_streams import *; replace_standard_streams(); import sys\n"


def run(redirection: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """`tcdeploy recipes`, or Python code after `replace_standard_streams`, with a redirection of the shell."""
    command = ["-m", "tcdeploy", "recipes"] if not code else ["-c", STREAMS + code]
    return subprocess.run(
        ["bash", "-c", f'"$0" "$@" {redirection}', sys.executable, *command],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": PACKAGES},
    )  # fmt: skip


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(reading end, writing end)"""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_report_to_a_pipe_without_a_reader_ends_quietly_as_by_sigpipe() -> None:
    result = run("| head -c 0; exit ${PIPESTATUS[0]}")
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(
    ("redirection", "code", "error"),
    [
        (">&-", 1, "error: the output cannot be written: stdout is closed"),
        (">/dev/full", 7, "error: the output cannot be written to stdout: No space left on device"),
    ],
)
def test_a_report_that_cannot_be_written_is_an_error(redirection: str, code: int, error: str) -> None:
    result = run(redirection)
    message, hint, *rest = result.stderr.splitlines()
    assert (result.returncode, message, rest) == (code, error, [])
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2> >(true)"])
def test_messages_that_cannot_be_written_are_dropped(redirection: str) -> None:
    code = "import logging, time, subprocess; from tcdeploy.cli.process import configure_process; configure_process()\n"
    code += "for number in range(3): print('x' * 9000, file=sys.stderr); logging.getLogger('tcdeploy').warning('y')\n"
    code += "subprocess.run(['sh', '-c', 'echo z >&2'], check=True); print('done')"
    result = run(redirection, code)
    assert (result.returncode, result.stdout) == (0, "done\n")
    assert "Traceback" not in result.stderr


def test_a_file_does_not_get_the_number_of_a_closed_stream() -> None:
    """What a library prints to its descriptor 1 or 2 would otherwise end up in that file."""
    code = "opened = open('/dev/null').fileno(); sys.stderr.write(str(opened))"
    assert int(run("<&- >&-", code).stderr) > 2


def test_a_server_does_not_wait_for_the_reader_of_its_messages(pipe: tuple[int, int]) -> None:
    """A pipe holds 64 KiB. `timeout` would end the process at the first write that blocks."""
    code = "drop_unread_messages()\nfor number in range(100): print('x' * 9000, file=sys.stderr)\nprint('served')"
    process = subprocess.run(
        [sys.executable, "-c", STREAMS + code], stdout=subprocess.PIPE, stderr=pipe[1], text=True, timeout=20,
        env={**os.environ, "PYTHONPATH": PACKAGES},
    )  # fmt: skip
    assert (process.returncode, process.stdout) == (0, "served\n")
    assert os.read(pipe[0], 9000) == b"x" * 9000, "messages are written while there is room"


def test_text_that_is_left_in_the_buffer_is_no_second_error() -> None:
    """The interpreter flushes stdout once more when it ends, and its own error would set the exit code to 120."""
    code = "from tcdeploy.errors import SpaceError\nprint('x' * 100)\ntry: sys.stdout.flush()\nexcept SpaceError: pass"
    result = run(">/dev/full", code)
    assert (result.returncode, result.stderr) == (0, "")
