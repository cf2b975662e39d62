"""Temporary files and folders that are removed even if their process is killed.

The process that creates one holds a flock on it, which the kernel releases even after `kill -9`. The next process that
creates one in the same folder removes those that are not locked. Their names contain a digest of the host name, and
only those of this host are removed: on a network file system, the locks of other hosts may be invisible.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
FILE_PATTERN = re.compile(rf"\..*-{HOST}-[0-9a-f]{{12}}\.tmp", re.DOTALL)
FOLDER_PATTERN = re.compile(rf"tcdeploy-[a-z]+-{HOST}-[0-9a-f]{{12}}")


@contextlib.contextmanager
def temporary_file(target: Path) -> Iterator[Path]:
    """Create an empty file in the folder of `target`. Deletes it at the end, unless it was renamed. Raises OSError."""

    def create() -> tuple[Path, int]:
        path = target.with_name(f".{target.name}-{HOST}-{secrets.token_hex(6)}.tmp")
        return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)

    _remove_abandoned(target.parent, FILE_PATTERN)
    path, descriptor = _create_locked(create)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def temporary_folder(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """As `create_temporary_folder`. Deletes the folder at the end, unless it was renamed."""
    path, descriptor = create_temporary_folder(purpose, parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def create_temporary_folder(purpose: str, parent: Path | None = None) -> tuple[Path, int]:
    """Create a private folder in TMPDIR, named after `purpose`: returns its path and the descriptor that locks it.

    In `parent` it has the permissions of other new folders, because it will be renamed. The folder is in use until the
    descriptor is closed, or the process ends. Raises OSError.
    """

    def create() -> tuple[Path, int]:
        path = root / f"tcdeploy-{purpose}-{HOST}-{secrets.token_hex(6)}"
        path.mkdir(mode=0o700 if parent is None else 0o777)
        return path, os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    root = parent or Path(tempfile.gettempdir())
    _remove_abandoned(root, FOLDER_PATTERN)
    return _create_locked(create)


def _create_locked(create: Callable[[], tuple[Path, int]]) -> tuple[Path, int]:
    """Call `create` until the new file is locked, because another process may remove it before this one locks it."""
    while True:
        path, descriptor = create()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError:  # a file system without locks, where `_remove_if_abandoned` fails too
            return path, descriptor
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return path, descriptor
        os.close(descriptor)


def _remove_abandoned(folder: Path, pattern: re.Pattern[str]) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for name in [entry.name for entry in entries if pattern.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):  # removed by another process, or of another user
                _remove_if_abandoned(folder / name)


def _remove_if_abandoned(path: Path) -> None:
    """Remove this user's file or folder unless a process holds its lock. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path) if stat.S_ISDIR(status.st_mode) else path.unlink()
    finally:
        os.close(descriptor)
