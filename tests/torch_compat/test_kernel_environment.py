"""No environment variable is added while C++ compilers are started in threads."""

from __future__ import annotations

import os
from pathlib import Path

from tests.conftest import TINY, cli_environment
from tests.fork_server import ForkServer

# Reports each compiler that a thread starts, and each variable that is added after the first. The hook runs before the
# variable is set. It cannot be removed, so it needs a process of its own.
REPORT_ADDED_VARIABLES = """
import os, sys, threading

def report(event, arguments):
    if event == "subprocess.Popen" and threading.current_thread() is not threading.main_thread():
        compilers.append(arguments[0])
        print("compiler", file=report_file, flush=True)
    elif event == "os.putenv" and compilers and arguments[0] not in os.environb:
        print("added", os.fsdecode(arguments[0]), file=report_file, flush=True)

compilers, report_file = [], open(%r, "w")
sys.addaudithook(report)
"""


def test_no_variable_is_added_while_kernels_are_compiled(tmp_path: Path, fork_server: ForkServer) -> None:
    report = tmp_path / "report"
    done = fork_server.run(
        "warm", TINY, "--buckets", "16", "--batch-sizes", "1", "--programs", "jit",
        "--cache-dir", str(tmp_path / "cache"),
        environ=cli_environment(tmp_path), script=REPORT_ADDED_VARIABLES % os.fspath(report),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = report.read_text().splitlines()
    assert "compiler" in lines
    assert [line for line in lines if line != "compiler"] == []
