"""Replaces stdout and stderr with streams that report failed writes to stdout and ignore failed writes to stderr.

Python's own streams are None if the descriptor is closed, raise OSError from any print, and print a traceback if the
last flush fails. Stdout contains the result of a command, so a failed write raises OutputError, SpaceError if the disk
is full, or BrokenPipe if the reader of a pipe has exited. Stderr contains progress and warnings, so failed writes are
dropped: a server keeps serving after the reader of its log has exited. After `drop_unread_messages`, messages are also
dropped if a pipe is full because its reader does not read.

A closed descriptor is opened as /dev/null. Otherwise the next file that the process opens would get its number, and all
output with it.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any

from tcdeploy.errors import BrokenPipe, OutputError, SpaceError
from tcdeploy.host.regular_file import DISK_FULL

PIPE_WRITE_BYTES = 4096  # PIPE_BUF of Linux: a pipe that poll() calls writable takes this many bytes without blocking


# After a failed write, the descriptor is connected to /dev/null, so that further writes, also those of libraries and
# child processes, do not fail.
class _Stdout(io.FileIO):
    is_closed = False

    def write(self, data: Any) -> int:
        try:
            if self.is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            return super().write(data) or 0
        except OSError as error:
            self.is_closed = False  # report the error once
            _open_null(self.fileno())
            raise _translate_error(error) from error


class _Stderr(io.FileIO):
    may_block = True

    def write(self, data: Any) -> int:
        size = len(data)
        try:
            if self.may_block:
                return super().write(data) or size
            self._write_without_blocking(memoryview(data).cast("B"))
        except OSError:
            _open_null(self.fileno())
        return size

    def _write_without_blocking(self, data: memoryview) -> None:
        """Write as much as the pipe has room for, and drop the rest.

        The descriptor stays in blocking mode, because other processes share it.
        """
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        while data and poll.poll(0):
            data = data[super().write(data[:PIPE_WRITE_BYTES]) or 0 :]


def replace_standard_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr`, unless they have been replaced or redirected already."""
    is_closed = [_is_closed(number) for number in (0, 1, 2)]
    for number in (0, 1, 2):
        if is_closed[number]:
            _open_null(number)
    if sys.stdout is sys.__stdout__:
        stdout = _Stdout(1, "w", closefd=False)
        stdout.is_closed = is_closed[1]
        sys.stdout = _text_stream(stdout, sys.__stdout__, line_buffering=False)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text_stream(_Stderr(2, "w", closefd=False), sys.__stderr__, line_buffering=True)


def drop_unread_messages() -> None:
    """Make writes to stderr non-blocking, because a full pipe would block the server's event loop."""
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    if isinstance(raw, _Stderr):
        raw.may_block = False


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError as error:
        return error.errno == errno.EBADF
    return False


def _open_null(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)


def _text_stream(raw: io.FileIO, original: Any, line_buffering: bool) -> io.TextIOWrapper:
    """A text stream with the settings of Python's own, which is None if the descriptor was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(original, "encoding", "utf-8"),
        errors=getattr(original, "errors", "backslashreplace"),
        line_buffering=getattr(original, "line_buffering", line_buffering),
        write_through=getattr(original, "write_through", False),
    )


def _translate_error(error: OSError) -> OutputError | SpaceError:
    problem = f"the output cannot be written to stdout: {error.strerror}"
    if error.errno == errno.EPIPE:
        return BrokenPipe("stdout is a broken pipe: its reader has exited")
    if error.errno in DISK_FULL:
        return SpaceError(problem, "free some space, or redirect stdout to another disk")
    if error.errno == errno.EBADF:
        problem = "the output cannot be written: stdout is closed"
        return OutputError(problem, "redirect stdout to a file, or to /dev/null")
    return OutputError(problem, "redirect stdout to another file")
