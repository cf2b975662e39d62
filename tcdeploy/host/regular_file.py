"""Opens files whose names another user or program may have changed, such as those of a cache folder.

A name in such a folder may be a FIFO, and opening that waits for another process; a device such as /dev/zero, which has
no end; a link to a private file; or a file of another user. `open_regular` follows no link and does not wait. It
examines the descriptor and not the name, so nothing can be replaced between the check and the use. Every module that
opens files of a cache folder calls it; tests/cache/test_opened_files.py lists the exceptions. Does not import torch.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Literal

Mode = Literal["rb", "r+b", "ab", "xb"]
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # the error numbers of a write without room
MAX_DOCUMENT_BYTES = 64 << 20  # of a JSON document in a cache folder; the largest are manifests and start records
_FLAGS: dict[Mode, int] = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


class UnsafeFileError(OSError):
    """The name leads to something that must not be opened. `strerror` completes the sentence "PATH cannot be read:"."""


def open_regular(
    path: str | Path,
    mode: Mode = "rb",
    *,
    creates: bool = False,
    follows_links: bool = False,
    must_own: bool = False,
    permissions: int = 0o666,
) -> IO[bytes]:
    """Open a regular file. Raises UnsafeFileError for anything else, and other OSErrors as `open` does.

    creates: create a missing file, also with the modes "rb" and "r+b".
    follows_links: for files that the user names, which may be links.
    must_own: refuse a file of another user than this one and root, and a file that has another hard link. Required for
        writing to an existing file, because the link may lead to a private file.
    permissions: of a file that is created, before the umask is applied.
    """
    flags = _FLAGS[mode] | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    flags |= os.O_CREAT if creates else 0
    flags |= 0 if follows_links else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, permissions)
    except OSError as error:
        if error.errno == errno.ELOOP and not follows_links:
            raise _unsafe(path, "it is a symbolic link") from error
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket, a FIFO without a reader, or a folder
            raise _unsafe(path, "it is not a regular file") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unsafe(path, "it is not a regular file")
        if must_own and status.st_uid not in (0, os.geteuid()):
            raise _unsafe(path, f"it belongs to another user, with the id {status.st_uid}")
        if must_own and status.st_nlink > 1:
            raise _unsafe(path, f"it has {status.st_nlink} hard links")
        return os.fdopen(descriptor, mode.replace("x", "w"))
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, max_bytes: int = MAX_DOCUMENT_BYTES, *, follows_links: bool = False) -> bytes:
    """The content of a file. Raises UnsafeFileError if it is not regular or too large, and other OSErrors."""
    with open_regular(path, follows_links=follows_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise _unsafe(path, f"it has {size} bytes, and the limit is {max_bytes}")
        content = file.read(size + 1)
    if len(content) > size:
        raise _unsafe(path, f"it was written while its {size} bytes were read")
    return content


def _unsafe(path: str | Path, reason: str) -> UnsafeFileError:
    return UnsafeFileError(errno.EPERM, reason, os.fspath(path))
