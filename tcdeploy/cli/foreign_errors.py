"""Translates errors of other libraries on the command line into errors of this program: `error: ...`, then `hint: ...`.

Two kinds are translated: errors of click's parser, and exceptions of torch or Triton, which reject invalid environment
variables while they are imported. torch's exception does not name the variable, so this module finds the name in the
source line that raised the exception.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import typer

from tcdeploy.errors import UsageError

PARSER_ERROR: Any = typer.BadParameter.__mro__[2]  # click's ClickException, which typer does not export
LIBRARIES = ("/torch/", "/triton/")
VARIABLE_PATTERN = re.compile(r"\b(?:TORCH|PYTORCH|TRITON)[A-Z0-9]*(?:_[A-Z0-9]+)+")


def parser_error(error: Any) -> UsageError:
    """The UsageError for an error of the parser, whose text begins with a capital letter and ends with a period."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    context = getattr(error, "ctx", None)
    hint = f"{context.command_path} --help describes the arguments" if context else ""
    return UsageError(message[:1].lower() + message[1:], hint)


def variable_error(error: BaseException, environ: Mapping[str, str]) -> UsageError | None:
    """The UsageError for an exception that torch or Triton raised because of a variable; None for other exceptions.

    Only exceptions that were raised while a module of these libraries was imported: later ones, such as those of a
    graph break or of a lack of memory, recommend variables in their text.
    """
    if _is_raised_by_import(error.__traceback__):
        text = "\n".join([str(error), *_library_lines(error.__traceback__)])
        for name in VARIABLE_PATTERN.findall(text):
            if name in environ:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                reason = lines[0].rstrip(",:") if lines else type(error).__name__
                return UsageError(f"{name}={environ[name]} is invalid: {reason}", f"unset {name}, or correct it")
    return None if error.__cause__ is None else variable_error(error.__cause__, environ)


def _is_raised_by_import(trace: TracebackType | None) -> bool:
    frames = traceback.extract_tb(trace)
    return any(frame.name == "<module>" and any(part in frame.filename for part in LIBRARIES) for frame in frames)


def _library_lines(trace: TracebackType | None) -> Iterator[str]:
    """The statement that raised, if it is one of a library."""
    for frame in traceback.extract_tb(trace)[-1:]:
        if any(part in frame.filename for part in LIBRARIES) and frame.lineno is not None:
            for number in range(frame.lineno, (frame.end_lineno or frame.lineno) + 1):
                yield linecache.getline(frame.filename, number)
