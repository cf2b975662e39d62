"""What push, pull and find ask of a place, whichever kind it is: look, read, write once, list.

Four verbs are all that the kinds share; retries, digests and the disk are the business of transfer.py. A place raises
its library's own errors, which patience.py judges, and FileExistsError when an exclusive write came too late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from tcdeploy.remote.address import BundleName


class ObjectInfo(NamedTuple):
    """What stands under a name. A None was not told."""

    size: int | None  # bytes
    sha256: str | None = None  # only from a store that addresses by content


class Body(NamedTuple):
    """A bundle on its way: the length that was announced, and the bytes in pieces of bounded size."""

    size: int | None  # bytes
    chunks: Iterator[bytes]


class StoredBundle(NamedTuple):
    name: BundleName
    time: float | None  # seconds since 1970 at which it was put there


class Store(Protocol):
    def stat(self, name: BundleName) -> ObjectInfo | None:
        """What is under the name, or None."""

    def read(self, name: BundleName) -> AbstractContextManager[Body]:
        """Stream it; the connection closes with the context."""

    def write(self, name: BundleName, file: Path) -> None:
        """Put it there, whole or not at all. Raises FileExistsError when the name is taken."""

    def list(self, plan_key: str) -> list[StoredBundle]:
        """The plan's bundles in this folder, in any order; none where the folder is not there."""
