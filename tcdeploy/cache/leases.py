"""Locks of a cache folder: a lease per plan for readers, and one lock of the whole folder for writers.

A process that runs from a plan holds a shared flock on the plan's lease file until it exits, so that garbage collection
keeps the plan. The kernel releases the lock even after `kill -9`, which a PID file would not survive. Unpacking,
garbage collection and discarding hold the folder's lock while they add or remove files. A lease is taken under that
lock, so it waits for a collection in progress.

Lease files are never deleted: a process that has opened the deleted file would hold a lock that no other process sees.
Does not import torch.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tcdeploy.cache.folder_error import folder_error
from tcdeploy.errors import TcdeployError

LEASES_DIR, LOCK_FILE = "leases", ".lock"
LOCK_TIMEOUT_S = 600.0  # how long to wait for another process that unpacks or removes
_leases: dict[Path, IO[bytes]] = {}


def acquire_lease(folder: str, plan_key: str) -> None:
    """Hold a lease on the plan until this process exits. Raises TcdeployError."""
    path = Path(folder) / LEASES_DIR / plan_key
    if path in _leases:
        return
    with folder_lock(folder):
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)  # read-only: works on another user's file too
        except OSError as error:
            raise folder_error(folder, error) from error
        _leases[path] = os.fdopen(descriptor, "rb")
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def is_leased(folder: str | Path, plan_key: str) -> bool:
    """Whether any process, this one included, holds a lease on the plan. Writes nothing.

    A lease that cannot be read counts as held, as on a file system without locks.
    """
    path = Path(folder) / LEASES_DIR / plan_key
    try:  # NFS refuses an exclusive lock on a file that is open for reading
        with open(path, "r+b" if os.access(path, os.W_OK) else "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Hold the exclusive lock for adding files to the folder or removing them.

    Raises TcdeployError after LOCK_TIMEOUT_S, and if the folder is not writable.
    """
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        file = os.fdopen(os.open(Path(folder) / LOCK_FILE, flags, 0o600), "ab")
    except OSError as error:
        raise folder_error(str(folder), error) from error
    with file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TcdeployError(
                        f"another process has held the cache folder {folder} for {LOCK_TIMEOUT_S:.0f} s",
                        f"run again once it has finished; to find it: fuser {Path(folder) / LOCK_FILE}",
                    ) from None
                time.sleep(0.05)
        yield
