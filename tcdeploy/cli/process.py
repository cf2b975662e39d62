"""Process-wide settings of the command line. `prepare()` changes none of them, so that it can be called as a library.

A command that keeps serving tokens after startup (`generate`, `serve`, `bench`) also calls
`gc_policy.freeze_gc_after_startup()` once its deployment is ready.
"""

from __future__ import annotations

import logging
import os

from tcdeploy.cli.standard_streams import replace_standard_streams
from tcdeploy.host.gc_policy import relax_gc_for_startup
from tcdeploy.models.unused_packages import enable_fast_transformers_import
from tcdeploy.planning.kubernetes import is_service_variable

LOGGER_NAME, ACCESS_LOGGER_NAME = "tcdeploy", "tcdeploy.access"


class _StderrFormatter(logging.Formatter):
    """`warning: message`, as the CLI prints its own warnings and errors."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


def set_log_level(level: str) -> None:
    """Set the lowest level of messages that this package sends to stderr: a name of logging, in lower case."""
    logging.getLogger(LOGGER_NAME).setLevel(level.upper())


def enable_access_log() -> None:
    """Send the lines of the access log to stderr as they are, at any log level."""
    logger, handler = logging.getLogger(ACCESS_LOGGER_NAME), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def _ignore_service_links() -> None:
    """Kubernetes sets TCDEPLOY_PORT=tcp://ADDRESS:PORT in all pods beside a service of the name tcdeploy."""
    name = "TCDEPLOY_PORT"
    if is_service_variable(name, os.environ.get(name, "")):
        del os.environ[name]


def configure_process() -> None:
    """Set up garbage collection, imports, the standard streams and logging of a command.

    Garbage collection is deferred until startup is over. transformers is imported with fewer file reads, and without
    packages that are not needed. Log records of this package are sent to stderr. The command line calls this function
    once, before it imports anything large.
    """
    _ignore_service_links()
    relax_gc_for_startup()
    enable_fast_transformers_import()
    replace_standard_streams()
    logger = logging.getLogger(LOGGER_NAME)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_StderrFormatter())
        logger.addHandler(handler)
