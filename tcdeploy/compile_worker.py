"""The process that fills a server's cache folder while the server answers with eager steps (compile_process.py).

It warms the model of its recipe, as `tcdeploy warm` does, and exits with that command's exit codes. It runs at low
priority, and the kernel kills it when the server ends. It reports its plan and each finished bucket as lines of JSON;
the files of a finished bucket are in the journal of its staging folder. Its messages go to stderr.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from typing import IO, TYPE_CHECKING, Any

from tcdeploy.errors import TcdeployError
from tcdeploy.gc_policy import relax_gc_for_startup
from tcdeploy.planning.recipe import Recipe
from tcdeploy.progress import NullProgress
from tcdeploy.start import prepare

if TYPE_CHECKING:
    from tcdeploy.cache.manifest import BucketRecord
    from tcdeploy.planning.plan import Plan

PRIORITY = 10  # added to the server's nice value
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
log = logging.getLogger("tcdeploy.pipeline")


class ReportedProgress(NullProgress):
    """Writes the plan's key and each finished bucket to `reports`."""

    def __init__(self, reports: IO[str]) -> None:
        self._reports = reports

    def planned(self, plan: Plan) -> None:
        self._write(plan=plan.key)

    def bucket_finished(self, record: BucketRecord) -> None:
        log.info("%s: %s, %.1f s", record.bucket, record.outcome, record.seconds)
        if record.parity.passed:
            self._write(bucket=record.bucket, compile_seconds=record.cold_seconds or record.compile_seconds)

    def _write(self, **fields: object) -> None:
        self._reports.write(json.dumps(fields) + "\n")
        self._reports.flush()


def main() -> None:
    """Read a request from stdin, and warm its recipe.

    It has "parent", the server's process id, "reports", the descriptor for reports, and "recipe", fields of a Recipe.
    """
    request = json.load(sys.stdin)
    _die_with(request["parent"])
    os.nice(PRIORITY)
    relax_gc_for_startup()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with open(request["reports"], "w", encoding="utf-8") as reports:
            prepare(_parse_recipe(request["recipe"]), ReportedProgress(reports))
    except TcdeployError as error:
        log.error("%s", error.message)
        sys.exit(error.exit_code)


def _parse_recipe(fields: dict[str, Any]) -> Recipe:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return Recipe(**values)


def _die_with(parent: int) -> None:
    """Make a Linux kernel kill this process when the parent ends. Exits if the parent has ended already."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(1)
