"""Push a bundle to a remote, pull it, find those of a plan.

    push(file, "s3://bucket/bundles", plan_key)      a bundle is written once and never over another
    find("s3://bucket/bundles", plan_key)            URLs, the newest first
    pull(url, Path("bundle.tcb"))                    the whole bundle or nothing

The one idea: a bundle is stored under the digest of its bytes, PLANKEY-SHA256.tcb. So a push that finds the name taken
has only to compare, two jobs that push the same bytes at once both succeed, and a pull checks what came against the
URL it was given, whoever kept it in between. That says that the bytes are those that the URL names, not who made them.

A pull streams into a temporary beside `to`, hashing as it goes; an attempt that was cut starts from the first byte
again, since a bundle is small (1 to 100 MB) and a resumed one may be sewn from two. Nothing here keeps more than a few
chunks in memory. The storage libraries are imported when a URL asks for them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from tcdeploy.errors import IntegrityError, SpaceError, UsageError
from tcdeploy.remote.address import Address, BundleName, check_plan_key, name_of
from tcdeploy.remote.local_folder import sync_folder
from tcdeploy.remote.fsspec_folder import open_folder
from tcdeploy.remote.retry import Deadline, with_retries
from tcdeploy.remote.store import Body, Store

MOST_BYTES = 8 << 30
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Pushed:
    """What a push did. `url` is without secrets: it is printed and written down."""

    url: str
    bytes: int
    was_there: bool  # the same bytes stood there already, and none were sent


def push(file: Path, destination: str, plan_key: str) -> Pushed:
    """Store the bundle below the folder URL, under its own digest.

    Raises IntegrityError when other bytes stand under its name, NetworkError when the store does not answer or lets us
    not in, SpaceError when it is a disk and full, UsageError for a file, a URL or a key that is none.
    """
    name, size, folder = name_of(file, plan_key), file.stat().st_size, Address.parse(destination)
    where, deadline = folder.child(str(name)), Deadline()
    store = open_store(folder, deadline)
    was_there = with_retries(lambda: _put(store, name, file, size, where, deadline), where, deadline)
    return Pushed(where.shown, size, was_there)


def pull(source: str, to: Path) -> Path:
    """Fetch one bundle by its full URL; `to` is replaced when all its bytes came and are the right ones.

    Raises IntegrityError when they are not, or are too many; SpaceError, before the first byte where the store says a
    length; NetworkError when it is not there, not for us, or the store does not answer; UsageError for a URL or a
    place that is none. Whatever happens, `to` is as it was or the bundle, and nothing lies beside it.
    """
    where = Address.parse(source)
    folder, name = where.split()
    if to.is_dir() or not to.parent.is_dir():
        raise UsageError(f"cannot write {to}: " + ("it is a folder" if to.is_dir() else "its folder is missing"))
    deadline = Deadline()
    store = open_store(folder, deadline)
    with _staged(to) as staging:
        with_retries(lambda: _fetch(store, name, where, staging, deadline), where, deadline)
    return to


def find(source: str, plan_key: str) -> list[str]:
    """URLs of the plan's bundles below the folder URL: the newest first, those without a time last, by name.

    They can be pulled, so they hold what secrets `source` holds: show them through `shown`. A folder that is not there
    has none. Raises NetworkError and UsageError.
    """
    check_plan_key(plan_key)
    folder, deadline = Address.parse(source), Deadline()
    store = open_store(folder, deadline)
    entries = with_retries(lambda: store.list(plan_key), folder, deadline)
    entries.sort(key=lambda entry: (-(entry.time or 0), entry.name))
    return [folder.child(str(entry.name)).url for entry in entries]


def shown(url: str) -> str:
    """The URL without user, password and query. Raises UsageError when it is none."""
    return Address.parse(url).shown


def open_store(folder: Address, deadline: Deadline) -> Store:
    """The store behind a folder's address. Raises UsageError."""
    if folder.scheme == "oci":
        from tcdeploy.remote.oci import open_repository

        return open_repository(folder, deadline)
    return open_folder(folder, deadline)


def _put(store: Store, name: BundleName, file: Path, size: int, where: Address, deadline: Deadline) -> bool:
    """Whether the same bytes were there. Each attempt looks first: the one before may have arrived after all."""
    found = store.look(name)
    if found is None:
        try:
            store.write(name, file)
            return False
        except FileExistsError:  # another job was faster
            found = store.look(name)
    if found is None:
        raise ConnectionError("the name was taken, and now it is free")
    if found.size not in (size, None) or (found.sha256 or _digest(store, name, size, deadline)) != name.sha256:
        raise IntegrityError(
            f"other bytes stand at {where.shown}, which is named after what {file} holds",
            "they are damaged or were tampered with: remove them there, and push again",
        )
    return True


def _digest(store: Store, name: BundleName, size: int, deadline: Deadline) -> str:
    """sha256 of what the store holds, read to one byte beyond the size that is right."""
    digest, seen = hashlib.sha256(), 0
    with store.read(name) as body:
        for chunk in body.chunks:
            deadline.check()
            digest.update(chunk)
            seen += len(chunk)
            if seen > size:
                return "longer"
    _check_whole(body, seen)
    return digest.hexdigest()


def _fetch(store: Store, name: BundleName, where: Address, staging: Path, deadline: Deadline) -> None:
    """One attempt, from the first byte to the last fsync."""
    digest, seen = hashlib.sha256(), 0
    with store.read(name) as body, _opened(staging) as file:
        most = _accepted(body.size, where, staging.parent)
        for chunk in body.chunks:
            deadline.check()
            seen += len(chunk)
            if seen > most:
                raise _damaged(where, f"it goes on after the {most} bytes that it may have")
            digest.update(chunk)
            with _local_errors(staging.parent):
                _write_all(file, chunk)
        _check_whole(body, seen)
        if digest.hexdigest() != name.sha256:
            raise _damaged(where, f"its sha256 is {digest.hexdigest()}")
        with _local_errors(staging.parent):
            os.fsync(file.fileno())


def _accepted(announced: int | None, where: Address, folder: Path) -> int:
    """How many bytes may come. Raises IntegrityError above MOST_BYTES, SpaceError where they have no room."""
    if announced is None:
        return MOST_BYTES
    if announced > MOST_BYTES:
        raise _damaged(where, f"it has {announced} bytes, and a bundle has {MOST_BYTES} at most")
    free = shutil.disk_usage(folder).free
    if announced > free:
        raise SpaceError(
            f"the bundle needs {announced} bytes ({announced / MEBIBYTE:.1f} MiB), and {folder} has {free} free",
            "free some room, or pull to another folder",
        )
    return announced


def _check_whole(body: Body, seen: int) -> None:
    if body.size is not None and seen != body.size:
        raise ConnectionError(f"cut after {seen} of {body.size} bytes")


def _damaged(where: Address, fact: str) -> IntegrityError:
    return IntegrityError(
        f"{where.shown} is not the bundle of that name: {fact}", "remove it from the store, and push it again"
    )


@contextlib.contextmanager
def _staged(to: Path) -> Iterator[Path]:
    """A name beside `to` for what is on its way; it takes the place of `to` when all went well."""
    staging = to.parent / f".pull-{secrets.token_hex(6)}.tmp"
    try:
        yield staging
        with _local_errors(to.parent):
            os.replace(staging, to)
        sync_folder(to.parent)
    finally:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(staging: Path) -> Iterator[FileIO]:
    """Opened for writing from the start, without a buffer: its flush could fail in a close, where nobody looks."""
    with _local_errors(staging.parent):
        file = FileIO(staging, "w")
    with file:
        yield file


def _write_all(file: FileIO, chunk: bytes) -> None:
    """An unbuffered write may take a part only, as it does on a disk that is nearly full."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


@contextlib.contextmanager
def _local_errors(folder: Path) -> Iterator[None]:
    """This disk's errors, kept apart from those of the remote, which are tried again."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(f"the disk of {folder} is full", "free some room, or pull to another folder") from error
        raise UsageError(f"cannot write in {folder}: {error.strerror}", "name a folder that can be written") from error
