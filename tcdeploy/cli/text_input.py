"""Refuses text that is not valid UTF-8: arguments, environment variables and stdin.

Python decodes bad bytes as lone surrogates, which tokenizers, JSON and HTTP reject deep inside a command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from tcdeploy.errors import UsageError
from tcdeploy.planning.option import ENVIRONMENT_PREFIX


def check_encoding(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raises UsageError for an argument, or a variable of this program, that is not valid UTF-8."""
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
        if _is_utf8(os.fsencode(text)):
            raise UsageError(
                f"{source} has characters outside of ASCII, and Python reads arguments and paths as "
                f"{sys.getfilesystemencoding()} here, because of the locale",
                "set PYTHONUTF8=1, or LC_ALL=C.UTF-8",
            ) from None
        bad = text[error.start].encode(errors="surrogateescape") if "\udc80" <= text[error.start] <= "\udcff" else b"?"
        raise _not_utf8(source, bad, len(text[: error.start].encode())) from None


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _not_utf8(source: str, byte: bytes, position: int) -> UsageError:
    return UsageError(
        f"{source} is not valid UTF-8: byte 0x{byte.hex()} at position {position}",
        "convert the text to UTF-8, or rename the file or folder",
    )
