"""Writes that survive a power failure: files and folders are flushed to disk before others refer to them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from tcdeploy.host.regular_file import open_regular

SYNC_THREADS = 4


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait if the name leads to a FIFO now
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path, paths: Iterable[str]) -> None:
    """Flush files, several in parallel, because an fsync mostly waits. Raises OSError."""
    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        list(pool.map(lambda path: sync(folder / path), paths))


def sync_folders(root: Path, paths: Iterable[str]) -> None:
    """Flush `root`, and all folders between it and these files. Raises OSError."""
    folders = {parent for path in paths for parent in Path(path).parents}
    sync_files(root, (folder.as_posix() for folder in folders))


def copy_regular(source: str, target: str) -> None:
    """Copy a regular file to a new one, as a `copy_function` of shutil. Raises OSError, for a link or a FIFO too."""
    with open_regular(source) as read, open_regular(target, "xb") as written:
        shutil.copyfileobj(read, written)
        status = os.fstat(read.fileno())
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))  # start records are ordered by it


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file so that `target` is complete or unchanged at any time. Raises OSError."""
    with open_regular(source) as read, _replacing(target) as written:
        shutil.copyfileobj(read, written)


def write_durably(target: Path, content: bytes) -> None:
    """Write a file so that `target` is complete or unchanged at any time. Raises OSError."""
    with _replacing(target) as written:
        written.write(content)


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """A temporary file, which is flushed and renamed to `target` at the end, and removed after an exception."""
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")  # target.name may be too long for a suffix
    try:
        with open_regular(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
