"""Pushes, pulls and finds bundles.

    push(file, "s3://bucket/bundles", plan_key)      stores a bundle once; never overwrites
    find("s3://bucket/bundles", plan_key)            URLs of a plan's bundles, newest first
    pull(url, Path("bundle.tcb"))                    downloads a whole bundle or fails

A bundle is stored under the sha256 of its bytes, PLANKEY-SHA256.tcb. A push that finds the name taken only compares;
concurrent pushes of the same bytes all succeed; a pull verifies its bytes against the URL, whatever stored them. This
proves that the bytes are those the URL names, not who made them (cache/trust/signing.py).

A pull streams into a temporary file beside `to` and hashes on the way. An interrupted attempt starts again from byte 0:
a bundle is small (1 to 100 MB), and a resumed download could mix two versions. Memory is bounded by a few chunks.
Storage libraries are imported only for URLs that need them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from tcdeploy.errors import IntegrityError, SpaceError, UsageError
from tcdeploy.host.durable import sync
from tcdeploy.host.regular_file import DISK_FULL
from tcdeploy.host.temporary_files import temporary_file
from tcdeploy.remote.address import Address, BundleName, bundle_name_of, check_plan_key
from tcdeploy.remote.fsspec_folder import open_folder
from tcdeploy.remote.retry import Deadline, with_retries
from tcdeploy.remote.store import Body, Store

MAX_BUNDLE_BYTES = 8 << 30
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class PushResult:
    """`url` contains no secrets, so it may be printed and logged."""

    url: str
    bytes: int
    already_present: bool  # the store had the same bytes; nothing was sent


def push(file: Path, destination: str, plan_key: str) -> PushResult:
    """Store the bundle in the folder URL, named after its sha256.

    Raises IntegrityError if the name holds other bytes, NetworkError if the store fails or denies access, SpaceError if
    its disk is full, and UsageError for an unreadable file, an invalid URL or an invalid plan key.
    """
    name, size, folder = bundle_name_of(file, plan_key), file.stat().st_size, Address.parse(destination)
    address, deadline = folder.child(str(name)), Deadline()
    store = open_store(folder, deadline)
    already_present = with_retries(lambda: _push_once(store, name, file, size, address, deadline), address, deadline)
    return PushResult(address.redacted, size, already_present)


def pull(
    source: str, to: Path, check: Callable[[Path], None] | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Path:  # fmt: skip
    """Download one bundle by its full URL; `to` is replaced atomically once all bytes are verified.

    `check` is called with the path of the verified download before it replaces `to`. If `check` raises, `to` is kept.
    `report` is called with the MiB so far after each chunk.

    Raises IntegrityError for wrong or too many bytes; SpaceError, before the download if the store reports a size;
    NetworkError if the bundle does not exist, access is denied or the store fails; UsageError for an invalid URL or
    path. On any error `to` is unchanged and no temporary file remains.
    """
    address = Address.parse(source)
    folder, name = address.split()
    if to.is_dir() or not to.parent.is_dir():
        raise UsageError(
            f"cannot write {to}: " + ("it is a folder" if to.is_dir() else "its folder is missing"),
            "choose a file in an existing folder",
        )
    deadline = Deadline()
    store = open_store(folder, deadline)
    with _atomic_replace(to) as staging:
        with_retries(lambda: _pull_once(store, name, address, staging, deadline, report), address, deadline)
        if check is not None:
            check(staging)
    return to


def find(source: str, plan_key: str) -> list[str]:
    """URLs of the plan's bundles in a folder URL: newest first, then those without a time, by name.

    The URLs can be passed to `pull`, so they contain the secrets of `source`: print them through `Address.redacted`. A
    folder that does not exist has no bundles. Raises NetworkError and UsageError.
    """
    check_plan_key(plan_key)
    folder, deadline = Address.parse(source), Deadline()
    store = open_store(folder, deadline)
    bundles = with_retries(lambda: store.list(plan_key), folder, deadline) or []
    bundles.sort(key=lambda bundle: (-(bundle.time or 0), bundle.name))
    return [folder.child(str(bundle.name)).url for bundle in bundles]


def exists(source: str) -> bool:
    """Whether a folder URL exists. In an object store, a folder exists as long as it has an object."""
    folder, deadline = Address.parse(source), Deadline()
    store = open_store(folder, deadline)
    return with_retries(lambda: store.list("") is not None, folder, deadline)  # no plan has this key: reads names only


def open_store(folder: Address, deadline: Deadline) -> Store:
    """The store of a folder's address. Raises UsageError."""
    if folder.scheme == "oci":
        from tcdeploy.remote.oci import open_repository

        return open_repository(folder, deadline)
    return open_folder(folder, deadline)


def _push_once(store: Store, name: BundleName, file: Path, size: int, address: Address, deadline: Deadline) -> bool:
    """Whether the store already had the same bytes. Every attempt checks: a failed one may have stored them."""
    stored = store.stat(name)
    if stored is None:
        try:
            store.write(name, file)
            return False
        except FileExistsError:  # another job wrote it since the stat
            stored = store.stat(name)
    if stored is None:
        raise ConnectionError("the bundle was deleted during the push")
    if stored.size not in (size, None) or (stored.sha256 or _stored_sha256(store, name, size, deadline)) != name.sha256:
        raise IntegrityError(
            f"{address.redacted} holds other bytes than {file}, although its name is the sha256 of that file",
            "the stored bundle is damaged or was tampered with; delete it there and push again",
        )
    return True


def _stored_sha256(store: Store, name: BundleName, size: int, deadline: Deadline) -> str | None:
    """sha256 of the stored bundle; None if it exceeds `size`."""
    with store.read(name) as body:
        return _receive(body, size, deadline, lambda chunk: None)


def _pull_once(
    store: Store, name: BundleName, address: Address, staging: Path, deadline: Deadline, report: Callable[[str], None]
) -> None:
    """One attempt: download, verify and fsync."""
    with _translate_local_errors(staging.parent):
        file = FileIO(staging, "w")  # unbuffered: flushing in `close` could raise outside the error translation
    received = 0
    with file, store.read(name) as body:
        total = "" if body.size is None else f" of {body.size / MEBIBYTE:.1f}"

        def write(chunk: bytes) -> None:
            nonlocal received
            received += len(chunk)
            report(f"{received / MEBIBYTE:.1f}{total} MiB")
            remaining = memoryview(chunk)
            with _translate_local_errors(staging.parent):
                while remaining:  # an unbuffered write may be partial, as on a nearly full disk
                    remaining = remaining[file.write(remaining) :]

        max_bytes = _max_download_bytes(body.size, address, staging.parent)
        sha256 = _receive(body, max_bytes, deadline, write)
        if sha256 != name.sha256:
            fact = f"its sha256 is {sha256}" if sha256 else f"it is longer than {max_bytes} bytes"
            raise _damaged_error(address, fact)
        with _translate_local_errors(staging.parent):
            os.fsync(file.fileno())


def _receive(body: Body, max_bytes: int, deadline: Deadline, write: Callable[[bytes], None]) -> str | None:
    """sha256 of the bytes, which `write` gets; None for more than `max_bytes`. Raises ConnectionError for too few."""
    digest, received = hashlib.sha256(), 0
    for chunk in body.chunks:
        deadline.check()
        received += len(chunk)
        if received > max_bytes:
            return None
        digest.update(chunk)
        write(chunk)
    if body.size is not None and received != body.size:
        raise ConnectionError(f"the transfer ended after {received} of {body.size} bytes")
    return digest.hexdigest()


def _max_download_bytes(content_length: int | None, address: Address, folder: Path) -> int:
    """The byte limit of a download. Raises IntegrityError above MAX_BUNDLE_BYTES, SpaceError without enough disk."""
    if content_length is None:
        return MAX_BUNDLE_BYTES
    if content_length > MAX_BUNDLE_BYTES:
        raise _damaged_error(address, f"it has {content_length} bytes; the limit is {MAX_BUNDLE_BYTES}")
    free = shutil.disk_usage(folder).free
    if content_length > free:
        raise SpaceError(
            f"the bundle needs {content_length} bytes ({content_length / MEBIBYTE:.1f} MiB); {folder} has {free} free",
            "free some space, or pull to another folder",
        )
    return content_length


def _damaged_error(address: Address, detail: str) -> IntegrityError:
    return IntegrityError(
        f"{address.redacted} does not match its name: {detail}", "delete it from the store and push it again"
    )


@contextlib.contextmanager
def _atomic_replace(to: Path) -> Iterator[Path]:
    """Yield a temporary path beside `to`; replace `to` with it if the block succeeds."""
    with contextlib.ExitStack() as stack:
        with _translate_local_errors(to.parent):
            staging = stack.enter_context(temporary_file(to))
        yield staging
        with _translate_local_errors(to.parent):
            os.replace(staging, to)
        with contextlib.suppress(OSError):  # the bundle itself is flushed
            sync(to.parent)


@contextlib.contextmanager
def _translate_local_errors(folder: Path) -> Iterator[None]:
    """Translate local disk errors, so that they are not retried as errors of the remote."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise SpaceError(f"the disk of {folder} is full", "free some space, or pull to another folder") from error
        raise UsageError(f"cannot write to {folder}: {error.strerror}", "choose a writable folder") from error
