"""Process-wide settings of the command line. `prepare()` changes none of them, so that it can be called as a library.

A command that keeps serving tokens after startup (`generate`, `serve`, `bench`) also calls
`gc_policy.freeze_gc_after_startup()` once its deployment is ready.
"""

from __future__ import annotations

import logging

from tcdeploy.cli.standard_streams import replace_standard_streams
from tcdeploy.gc_policy import relax_gc_for_startup

LOGGER_NAME = "tcdeploy"


class _StderrFormatter(logging.Formatter):
    """`warning: message`, as the CLI prints its own warnings and errors."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


def configure_process() -> None:
    """Defer garbage collection until startup is over, guard stdout and stderr, and send log records to stderr.

    The command line calls it once, before it imports anything large.
    """
    relax_gc_for_startup()
    replace_standard_streams()
    logger = logging.getLogger(LOGGER_NAME)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_StderrFormatter())
        logger.addHandler(handler)
