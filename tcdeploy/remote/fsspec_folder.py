"""Folders of bundles in any store that fsspec speaks to, each opened by its scheme.

What "write once" means, store by store:

    a path, file://   os.link: see disk.py
    s3://             If-None-Match: * on the put, and on the completion of a multipart upload: the second of two
                      writers is told 412. AWS and moto keep it; an S3-alike that ignores the header overwrites
    gs://             ifGenerationMatch=0 through gcsfs, the same promise; not tested, for want of a store
    hf://             no exclusive write in HfFileSystem: a check, then one commit, which is whole or not there
    memory:// and     no exclusive write: a check, an upload under another name, a check again, and a move to the right
    all the others    one, so that a torn upload never stands under a bundle's name

Where a check is all there is, two writers can pass it together. Both then write the bytes that the name is the digest
of, so the race is harmless. Reading goes through `open_async` where a store streams (s3, http): one request, memory of
one chunk. An s3fs file opened the plain way asks for ranges, and reads each answer whole, however long it is.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import secrets
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from tcdeploy.errors import UsageError
from tcdeploy.remote import retry as retry
from tcdeploy.remote.address import CHUNK_BYTES, LOCAL_SCHEMES, Address, BundleName, parse_bundle_name
from tcdeploy.remote.local_folder import LocalFolder
from tcdeploy.remote.retry import Deadline
from tcdeploy.remote.store import Body, ObjectInfo, StoredBundle

PIP_EXTRAS = {
    "s3": "tcdeploy[s3]",
    "s3a": "tcdeploy[s3]",
    "gs": "tcdeploy[gs]",
    "gcs": "tcdeploy[gs]",
    "hf": "tcdeploy",
}
READ_ONLY_SCHEMES = ("http", "https")
PART_BYTES = 16 << 20  # of a multipart upload
MAX_CONCURRENT_PARTS = 4  # so an upload holds 64 MiB
TIME_KEYS = ("LastModified", "mtime", "updated", "last_modified", "modified", "created")


class FsspecFolder:
    """A folder in a store of fsspec, through a client of its own: no listings are kept, and it asks once."""

    def __init__(self, address: Address, deadline: Deadline) -> None:
        self.address, self.deadline = address, deadline

    @functools.cached_property
    def fs(self) -> Any:
        """Made by the first request, since some clients connect when they are made."""
        import fsspec

        client = fsspec.core.url_to_fs(self.address.url, **_client_options(self.address.scheme))[0]
        client.retries = 1
        return client

    @property
    def root(self) -> str:
        return str(self.fs._strip_protocol(self.address.url))

    def stat(self, name: BundleName) -> ObjectInfo | None:
        try:
            return ObjectInfo(self._call("info", self._path(name))["size"])
        except FileNotFoundError as error:
            if retry.classify_error(error).kind != "missing":  # http says so of every failure
                raise
            return None

    @contextlib.contextmanager
    def read(self, name: BundleName) -> Iterator[Body]:
        path = self._path(name)
        if self.address.scheme not in ("s3", "s3a", *READ_ONLY_SCHEMES):
            with self.fs.open(path, "rb", **({"block_size": 0} if self.address.scheme == "hf" else {})) as file:
                yield Body(self.fs.info(path)["size"], iter(lambda: file.read(CHUNK_BYTES), b""))
            return
        file = self._run_async(self.fs.open_async, path, "rb", **({} if self._is_s3 else {"size": 0}))
        try:
            self._run_async(file.read, 0)  # the answer's head has come: its length is known
            length = file.size if self._is_s3 else file.r.content_length
            yield Body(length, iter(lambda: self._run_async(file.read, CHUNK_BYTES), b""))
        finally:
            self._run_async(_close, file)

    def write(self, name: BundleName, file: Path) -> None:
        if self.address.scheme in READ_ONLY_SCHEMES:
            raise UsageError(
                f"{self.address.redacted} can only be read", "push to a folder, s3://, gs://, hf:// or oci://"
            )
        path = self._path(name)
        try:
            if self._is_s3:
                self._call(
                    "put_file",
                    str(file),
                    path,
                    mode="create",
                    chunksize=PART_BYTES,
                    max_concurrency=MAX_CONCURRENT_PARTS,
                )
            elif self.address.scheme in ("gs", "gcs"):
                self._call("put_file", str(file), path, mode="create", chunksize=PART_BYTES)
            elif self.address.scheme == "hf":
                self.fs.put_file(str(file), path)
            else:
                self._upload_and_move(str(file), path)
        except Exception as error:
            if retry.classify_error(error).status == 412:
                raise FileExistsError(path) from error
            raise

    def list(self, plan_key: str) -> list[StoredBundle]:
        details = {"expand_info": True} if self.address.scheme == "hf" else {}
        try:
            listing = self._call("ls", self.root, detail=True, **details)
        except FileNotFoundError as error:
            failure = retry.classify_error(error)
            if failure.kind != "missing" or failure.status:  # a bucket, a repository or a page that is not there
                raise
            return []
        named = ((parse_bundle_name(item["name"].split("?")[0].rpartition("/")[2]), item) for item in listing)
        return [StoredBundle(name, _modified_time(item)) for name, item in named if name and name.plan_key == plan_key]

    @property
    def _is_s3(self) -> bool:
        return self.address.scheme in ("s3", "s3a")

    def _path(self, name: BundleName) -> str:
        if self.address.scheme in READ_ONLY_SCHEMES:
            return self.address.child(str(name)).url
        return f"{self.root.rstrip('/')}/{name}"

    def _upload_and_move(self, file: str, path: str) -> None:
        folder = path.rpartition("/")[0]
        staging = f"{folder}/.push-{secrets.token_hex(6)}.tmp"
        self._call("makedirs", folder, exist_ok=True)
        try:
            self._call("put_file", file, staging)
            if self.fs.exists(path):
                raise FileExistsError(path)
            self.fs.mv(staging, path)
        finally:
            if self.fs.exists(staging):
                self.fs.rm_file(staging)

    def _call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """One of the file system's verbs; where it can be given up on, not beyond the deadline."""
        limit = {"timeout": self.deadline.remaining_seconds()} if self.fs.async_impl else {}
        return getattr(self.fs, verb)(*arguments, **options, **limit)

    def _run_async(self, work: Any, *arguments: Any, **options: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self.fs.loop, work, *arguments, timeout=self.deadline.remaining_seconds(), **options)


async def _close(file: Any) -> None:
    if file.r is not None:
        file.r.close()
    file.closed = True  # or the collector calls an async close that nobody awaits


def _client_options(scheme: str) -> dict[str, Any]:
    """What a client is told when it is made: our timeouts, and that asking again is our business."""
    fresh = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        from fsspec.config import conf

        timeouts = {"connect_timeout": retry.CONNECT_TIMEOUT_SECONDS, "read_timeout": retry.READ_TIMEOUT_SECONDS}
        once = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
        return {**fresh, "config_kwargs": {**conf.get("s3", {}).get("config_kwargs", {}), **timeouts, **once}}
    if scheme in (*READ_ONLY_SCHEMES, "gs", "gcs"):
        import aiohttp

        limit = aiohttp.ClientTimeout(
            total=None, sock_connect=retry.CONNECT_TIMEOUT_SECONDS, sock_read=retry.READ_TIMEOUT_SECONDS
        )
        if scheme not in READ_ONLY_SCHEMES:
            return {**fresh, "requests_timeout": limit}
        return {**fresh, "client_kwargs": {"timeout": limit, "headers": {"Accept-Encoding": "identity"}}}
    return fresh


def open_folder(address: Address, deadline: Deadline) -> LocalFolder | FsspecFolder:
    """The folder at an address. Raises UsageError for an unknown scheme, or one whose library is not installed."""
    if address.scheme in LOCAL_SCHEMES:
        return LocalFolder(Path(address.host_and_path))
    import fsspec

    try:
        fsspec.get_filesystem_class(address.scheme)
    except ValueError as error:
        near = difflib.get_close_matches(address.scheme, [*fsspec.available_protocols(), "oci"], 1, 0.5)
        known = f"did you mean {near[0]}://?" if near else "a path, s3://, gs://, hf://, oci:// and what fsspec knows"
        raise UsageError(f"nothing here speaks {address.scheme}:// ({address.redacted})", known) from error
    except ImportError as error:
        raise missing_library_error(address, PIP_EXTRAS.get(address.scheme, ""), str(error)) from error
    return FsspecFolder(address, deadline)


def missing_library_error(address: Address, extra: str, reason: str) -> UsageError:
    return UsageError(
        f"{address.scheme}:// needs a library that is not installed ({address.redacted})",
        f"pip install '{extra}'" if extra else reason,
    )


def _modified_time(item: dict[str, Any]) -> float | None:
    """Seconds since 1970 from a listing's entry; stores spell it in many ways."""
    found = next((item[key] for key in TIME_KEYS if item.get(key)), None) or getattr(item.get("last_commit"), "date", 0)
    if isinstance(found, str):
        with contextlib.suppress(ValueError):
            found = datetime.fromisoformat(found)
    if isinstance(found, datetime):
        return found.timestamp()
    return float(found) if isinstance(found, int | float) and found else None
