"""The interface of a bundle store: stat, read, write once, list.

transfer.py implements retries, digests and local files on top of these four methods. A store raises its library's own
errors, which retry.py classifies, and FileExistsError when an exclusive write finds the name taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from tcdeploy.remote.address import BundleName


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

    def list(self, plan_key: str) -> list[RemoteBundle]:
        """The plan's bundles in this folder, in any order; empty if the folder does not exist."""
