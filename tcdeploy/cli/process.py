"""Process-wide settings of the command line, and checks of its input.

`prepare()` changes none of the settings, so that it can be called as a library. A command that keeps serving tokens
(`generate`, `serve`, `bench`) also calls `gc_policy.freeze_gc_after_startup()` once its deployment is ready.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from tcdeploy.cli.standard_streams import replace_standard_streams
from tcdeploy.errors import UsageError
from tcdeploy.host.gc_policy import relax_gc_for_startup
from tcdeploy.models.unused_packages import enable_fast_transformers_import
from tcdeploy.planning.kubernetes import is_service_variable
from tcdeploy.planning.option import ENVIRONMENT_PREFIX

LOGGER_NAME, ACCESS_LOGGER_NAME = "tcdeploy", "tcdeploy.access"


class _StderrFormatter(logging.Formatter):
    """`warning: message`, as the CLI prints its own warnings and errors."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


def enable_access_log() -> None:
    """Send the lines of the access log to stderr as they are, at any log level."""
    logger, handler = logging.getLogger(ACCESS_LOGGER_NAME), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def _ignore_service_links() -> None:
    """Kubernetes sets TCDEPLOY_PORT=tcp://ADDRESS:PORT in all pods beside a service of the name tcdeploy."""
    if is_service_variable("TCDEPLOY_PORT", os.environ.get("TCDEPLOY_PORT", "")):
        del os.environ["TCDEPLOY_PORT"]


def configure_process() -> None:
    """Set up garbage collection, imports, the standard streams and logging, before anything large is imported.

    Garbage collection is deferred until startup is over. transformers is imported with fewer file reads, and without
    packages that are not needed. Log records of this package are sent to stderr.
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


def check_encoding(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raises UsageError for an argument, or a variable of this program, that is not valid UTF-8.

    Python decodes bad bytes as lone surrogates, which tokenizers, JSON and HTTP reject deep inside a command.
    """
    for number, word in enumerate(arguments, 1):
        _check(f"argument {number}", word)
    for name, value in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX):
            _check(f"the variable {name}", value)


def read_text(stream: TextIO) -> str:
    """All of stdin. Raises UsageError if it is not valid UTF-8."""
    try:
        text = stream.read()
    except UnicodeDecodeError as error:
        raise _not_utf8("stdin", error.object[error.start : error.start + 1], error.start) from None
    _check("stdin", text)
    return text


def _check(source: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        with contextlib.suppress(UnicodeDecodeError):
            os.fsencode(text).decode()
            raise UsageError(
                f"{source} has characters outside of ASCII, and Python reads arguments and paths as "
                f"{sys.getfilesystemencoding()} here, because of the locale",
                "set PYTHONUTF8=1, or LC_ALL=C.UTF-8",
            ) from None
        bad = text[error.start].encode(errors="surrogateescape") if "\udc80" <= text[error.start] <= "\udcff" else b"?"
        raise _not_utf8(source, bad, len(text[: error.start].encode())) from None


def _not_utf8(source: str, byte: bytes, position: int) -> UsageError:
    return UsageError(
        f"{source} is not valid UTF-8: byte 0x{byte.hex()} at position {position}",
        "convert the text to UTF-8, or rename the file or folder",
    )
