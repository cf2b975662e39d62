"""The interface of a bundle store (stat, read, write once, list), and the store of local and mounted file systems.

transfer.py implements retries, digests and local files on top of these four methods. A store raises its library's own
errors, which retry.py classifies, and FileExistsError when an exclusive write finds the name taken.

A write to a `LocalFolder` goes to a temporary file, which is synced and then linked to its name. `os.link` fails if the
name is taken, so exactly one of several writers succeeds. On file systems without hard links, an existence check and a
rename replace the link; two writers that pass the check at once write the same bytes, since a bundle is named after its
content.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from tcdeploy.host.durable import sync
from tcdeploy.host.regular_file import open_regular
from tcdeploy.host.temporary_files import temporary_file
from tcdeploy.remote.address import CHUNK_BYTES, BundleName, parse_bundle_name

NO_HARD_LINK_ERRNOS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class ObjectInfo(NamedTuple):
    """A stored object. A field that the store does not report is None."""

    size: int | None  # bytes
    sha256: str | None = None  # only from content-addressed stores


class Body(NamedTuple):
    """A bundle being downloaded: the announced size, and its content in chunks of bounded size."""

    size: int | None  # bytes
    chunks: Iterator[bytes]


class RemoteBundle(NamedTuple):
    name: BundleName
    time: float | None  # of the upload, seconds since 1970


class Store(Protocol):
    def stat(self, name: BundleName) -> ObjectInfo | None:
        """The object of that name, or None."""

    def read(self, name: BundleName) -> AbstractContextManager[Body]:
        """Stream a bundle; the connection closes with the context."""

    def write(self, name: BundleName, file: Path) -> None:
        """Store a file atomically. Raises FileExistsError if the name is taken."""

    def list(self, plan_key: str) -> list[RemoteBundle] | None:
        """The plan's bundles in this folder, in any order; None if the folder does not exist."""


class LocalFolder:
    """A local folder; the first write creates it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stat(self, name: BundleName) -> ObjectInfo | None:
        try:
            return ObjectInfo(os.stat(self.path / str(name)).st_size)
        except (FileNotFoundError, NotADirectoryError):
            return None

    @contextlib.contextmanager
    def read(self, name: BundleName) -> Iterator[Body]:
        with open_regular(self.path / str(name), follows_links=True) as file:
            yield Body(os.fstat(file.fileno()).st_size, iter(lambda: file.read(CHUNK_BYTES), b""))

    def write(self, name: BundleName, file: Path) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with temporary_file(self.path / str(name)) as staging:
            with open_regular(file, follows_links=True) as source, open_regular(staging, "r+b") as target:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
                target.flush()
                os.fsync(target.fileno())
            _link_or_rename(staging, self.path / str(name))
        with contextlib.suppress(OSError):  # the bundle itself is flushed
            sync(self.path)

    def list(self, plan_key: str) -> list[RemoteBundle] | None:
        try:
            files = list(os.scandir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        bundles = ((parse_bundle_name(file.name), file) for file in files)
        return [
            RemoteBundle(name, file.stat().st_mtime) for name, file in bundles if name and name.plan_key == plan_key
        ]


def _link_or_rename(staging: Path, final: Path) -> None:
    try:
        os.link(staging, final)
    except OSError as error:
        if error.errno not in NO_HARD_LINK_ERRNOS:
            raise
        if final.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from error
        os.rename(staging, final)
