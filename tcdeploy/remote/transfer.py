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
from tcdeploy.remote.address import Address, BundleName, bundle_name_of, check_plan_key
from tcdeploy.remote.fsspec_folder import open_folder
from tcdeploy.remote.local_folder import fsync_folder
from tcdeploy.remote.retry import Deadline, with_retries
from tcdeploy.remote.store import Body, Store

MAX_BUNDLE_BYTES = 8 << 30
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class PushResult:
    """What a push did. `url` is without secrets: it is printed and written down."""

    url: str
    bytes: int
    already_present: bool  # the same bytes stood there already, and none were sent


def push(file: Path, destination: str, plan_key: str) -> PushResult:
    """Store the bundle below the folder URL, under its own digest.

    Raises IntegrityError when other bytes stand under its name, NetworkError when the store does not answer or lets us
    not in, SpaceError when it is a disk and full, UsageError for a file, a URL or a key that is none.
    """
    name, size, folder = bundle_name_of(file, plan_key), file.stat().st_size, Address.parse(destination)
    address, deadline = folder.child(str(name)), Deadline()
    store = open_store(folder, deadline)
    already_present = with_retries(lambda: _push_once(store, name, file, size, address, deadline), address, deadline)
    return PushResult(address.redacted, size, already_present)


def pull(source: str, to: Path) -> Path:
    """Fetch one bundle by its full URL; `to` is replaced when all its bytes came and are the right ones.

    Raises IntegrityError when they are not, or are too many; SpaceError, before the first byte where the store says a
    length; NetworkError when it is not there, not for us, or the store does not answer; UsageError for a URL or a
    place that is none. Whatever happens, `to` is as it was or the bundle, and nothing lies beside it.
    """
    address = Address.parse(source)
    folder, name = address.split()
    if to.is_dir() or not to.parent.is_dir():
        raise UsageError(f"cannot write {to}: " + ("it is a folder" if to.is_dir() else "its folder is missing"))
    deadline = Deadline()
    store = open_store(folder, deadline)
    with _atomic_replace(to) as staging:
        with_retries(lambda: _pull_once(store, name, address, staging, deadline), address, deadline)
    return to


def find(source: str, plan_key: str) -> list[str]:
    """URLs of the plan's bundles below the folder URL: the newest first, those without a time last, by name.

    They can be pulled, so they hold what secrets `source` holds: show them through `redacted`. A folder that is not there
    has none. Raises NetworkError and UsageError.
    """
    check_plan_key(plan_key)
    folder, deadline = Address.parse(source), Deadline()
    store = open_store(folder, deadline)
    entries = with_retries(lambda: store.list(plan_key), folder, deadline)
    entries.sort(key=lambda entry: (-(entry.time or 0), entry.name))
    return [folder.child(str(entry.name)).url for entry in entries]


def redacted(url: str) -> str:
    """The URL without user, password and query. Raises UsageError when it is none."""
    return Address.parse(url).redacted


def open_store(folder: Address, deadline: Deadline) -> Store:
    """The store behind a folder's address. Raises UsageError."""
    if folder.scheme == "oci":
        from tcdeploy.remote.oci import open_repository

        return open_repository(folder, deadline)
    return open_folder(folder, deadline)


def _push_once(store: Store, name: BundleName, file: Path, size: int, address: Address, deadline: Deadline) -> bool:
    """Whether the same bytes were there. Each attempt looks first: the one before may have arrived after all."""
    found = store.stat(name)
    if found is None:
        try:
            store.write(name, file)
            return False
        except FileExistsError:  # another job was faster
            found = store.stat(name)
    if found is None:
        raise ConnectionError("the name was taken, and now it is free")
    if found.size not in (size, None) or (found.sha256 or _stored_sha256(store, name, size, deadline)) != name.sha256:
        raise IntegrityError(
            f"other bytes stand at {address.redacted}, which is named after what {file} holds",
            "they are damaged or were tampered with: remove them there, and push again",
        )
    return True


def _stored_sha256(store: Store, name: BundleName, size: int, deadline: Deadline) -> str:
    """sha256 of what the store holds, read to one byte beyond the size that is right."""
    digest, seen = hashlib.sha256(), 0
    with store.read(name) as body:
        for chunk in body.chunks:
            deadline.check()
            digest.update(chunk)
            seen += len(chunk)
            if seen > size:
                return "longer"
    _check_complete(body, seen)
    return digest.hexdigest()


def _pull_once(store: Store, name: BundleName, address: Address, staging: Path, deadline: Deadline) -> None:
    """One attempt, from the first byte to the last fsync."""
    digest, seen = hashlib.sha256(), 0
    with store.read(name) as body, _open_unbuffered(staging) as file:
        most = _max_download_bytes(body.size, address, staging.parent)
        for chunk in body.chunks:
            deadline.check()
            seen += len(chunk)
            if seen > most:
                raise _damaged_error(address, f"it goes on after the {most} bytes that it may have")
            digest.update(chunk)
            with _translate_local_errors(staging.parent):
                _write_all(file, chunk)
        _check_complete(body, seen)
        if digest.hexdigest() != name.sha256:
            raise _damaged_error(address, f"its sha256 is {digest.hexdigest()}")
        with _translate_local_errors(staging.parent):
            os.fsync(file.fileno())


def _max_download_bytes(content_length: int | None, address: Address, folder: Path) -> int:
    """How many bytes may come. Raises IntegrityError above MAX_BUNDLE_BYTES, SpaceError where they have no room."""
    if content_length is None:
        return MAX_BUNDLE_BYTES
    if content_length > MAX_BUNDLE_BYTES:
        raise _damaged_error(address, f"it has {content_length} bytes, and a bundle has {MAX_BUNDLE_BYTES} at most")
    free = shutil.disk_usage(folder).free
    if content_length > free:
        raise SpaceError(
            f"the bundle needs {content_length} bytes ({content_length / MEBIBYTE:.1f} MiB), and {folder} has {free} free",
            "free some room, or pull to another folder",
        )
    return content_length


def _check_complete(body: Body, seen: int) -> None:
    if body.size is not None and seen != body.size:
        raise ConnectionError(f"cut after {seen} of {body.size} bytes")


def _damaged_error(address: Address, detail: str) -> IntegrityError:
    return IntegrityError(
        f"{address.redacted} is not the bundle of that name: {detail}", "remove it from the store, and push it again"
    )


@contextlib.contextmanager
def _atomic_replace(to: Path) -> Iterator[Path]:
    """A name beside `to` for what is on its way; it takes the place of `to` when all went well."""
    staging = to.parent / f".pull-{secrets.token_hex(6)}.tmp"
    try:
        yield staging
        with _translate_local_errors(to.parent):
            os.replace(staging, to)
        fsync_folder(to.parent)
    finally:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_unbuffered(staging: Path) -> Iterator[FileIO]:
    """Opened for writing from the start, without a buffer: its flush could fail in a close, where nobody looks."""
    with _translate_local_errors(staging.parent):
        file = FileIO(staging, "w")
    with file:
        yield file


def _write_all(file: FileIO, chunk: bytes) -> None:
    """An unbuffered write may take a part only, as it does on a disk that is nearly full."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


@contextlib.contextmanager
def _translate_local_errors(folder: Path) -> Iterator[None]:
    """This disk's errors, kept apart from those of the remote, which are tried again."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(f"the disk of {folder} is full", "free some room, or pull to another folder") from error
        raise UsageError(f"cannot write in {folder}: {error.strerror}", "name a folder that can be written") from error
