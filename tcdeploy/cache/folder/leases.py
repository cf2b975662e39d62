"""Locks of a cache folder: a lease per plan for readers, and one lock of the whole folder for writers.

A process that runs from a plan holds a shared flock on the plan's lease file until it exits, so that garbage collection
keeps the plan. The kernel releases the lock even after `kill -9`, which a PID file would not survive. Unpacking,
publishing, garbage collection and discarding hold the folder's lock while they add or remove files; verification shares
it. A lease is taken under that lock, so it waits for a collection in progress. Of the servers that could build packages
while idle, the one that does holds a lock of its own.

Lease files are never deleted: a process that has opened the deleted file would hold a lock that no other process sees.
Does not import torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

from tcdeploy.cache.folder.access import folder_error
from tcdeploy.cache.folder.layout import LEASES_DIR, LOCK_FILE
from tcdeploy.errors import TcdeployError
from tcdeploy.host.regular_file import open_regular

LOCK_TIMEOUT_S = 600.0  # how long to wait for another process that unpacks or removes
WARN_AFTER_S = 3.0
log = logging.getLogger("tcdeploy.cache")
_leases: dict[Path, IO[bytes]] = {}


def acquire_lease(folder: str, plan_key: str) -> None:
    """Hold a lease on the plan until this process exits. Raises TcdeployError."""
    path = Path(folder) / LEASES_DIR / plan_key
    if path in _leases:
        return
    with folder_lock(folder):
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file = open_regular(path, creates=True, permissions=0o644)  # for reading: another user may own it
        except OSError as error:
            raise folder_error(folder, error) from error
        _leases[path] = file
        fcntl.flock(file, fcntl.LOCK_SH)


def is_leased(folder: str | Path, plan_key: str) -> bool:
    """Whether any process, this one included, holds a lease on the plan. Writes nothing.

    A lease that cannot be read counts as held, as on a file system without locks.
    """
    return is_locked(Path(folder) / LEASES_DIR / plan_key, fcntl.LOCK_EX, if_unknown=True)


def is_locked(path: Path, operation: int, if_unknown: bool) -> bool:
    """Whether a process holds a lock of the file that excludes `operation` of flock; False if there is no file.

    `if_unknown`: the result where locks cannot be seen or do not exist.
    """
    try:  # NFS refuses an exclusive lock on a file that is open for reading
        with open_regular(path, "r+b" if os.access(path, os.W_OK) else "rb") as file:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError) or if_unknown
    return False


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Hold the lock for adding or removing files. Raises TcdeployError: after LOCK_TIMEOUT_S, or if not writable."""
    try:
        file = open_regular(Path(folder) / LOCK_FILE, "ab", permissions=0o600)
    except OSError as error:
        raise folder_error(str(folder), error) from error
    with file:
        _lock(file, fcntl.LOCK_EX, folder)
        yield


def is_folder_locked(folder: str | Path, if_unknown: bool = False) -> bool:
    """Whether a process holds `folder_lock`. `if_unknown`: as in `is_locked`."""
    return is_locked(Path(folder) / LOCK_FILE, fcntl.LOCK_SH, if_unknown)


@contextmanager
def build_lock(folder: str | Path, plan_key: str) -> Iterator[bool]:
    """Whether this process may build the packages that belong to a plan: no other process builds them in this block.

    False also if the lock cannot be taken, for example in a folder that cannot be written.
    """
    path = Path(folder) / LEASES_DIR / f"{plan_key}.packages"
    with ExitStack() as cleanup:
        try:
            file = cleanup.enter_context(open_regular(path, "ab", permissions=0o600))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


@contextmanager
def shared_folder_lock(folder: str | Path) -> Iterator[None]:
    """Wait until no process adds or removes files, and keep it so. Several processes can hold this lock.

    Does not lock a folder whose lock file this process cannot read or create, for example in an image. Raises
    TcdeployError after LOCK_TIMEOUT_S.
    """
    with _open_lock_file(folder) or nullcontext() as file:
        if file is not None:
            with suppress(OSError):  # a file system without locks
                _lock(file, fcntl.LOCK_SH, folder)
        yield


def _open_lock_file(folder: str | Path) -> IO[bytes] | None:
    """Open the lock file for reading; None if that fails. Creates it only in a folder of this user.

    The owner of a folder could not use a lock file that another user, such as root, has created in it.
    """
    try:
        creates = os.stat(folder).st_uid == os.geteuid()
        return open_regular(Path(folder) / LOCK_FILE, creates=creates, permissions=0o600)
    except OSError:
        return None


def _lock(file: IO[bytes], operation: int, folder: str | Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    warn_at = time.monotonic() + WARN_AFTER_S
    while True:
        try:
            return fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TcdeployError(
                    f"another process has held the cache folder {folder} for {LOCK_TIMEOUT_S:.0f} s",
                    f"run again once it has finished; to find it: fuser {Path(folder) / LOCK_FILE}",
                ) from None
            if time.monotonic() > warn_at:
                warn_at = deadline + 1.0  # once
                log.warning("waiting for another process, which adds or removes files in the cache folder %s", folder)
            time.sleep(0.05)
