"""Folders of bundles in any store that fsspec supports, selected by URL scheme.

How each store writes a name only once:

    a path, file://   os.link (store.py)
    s3://             If-None-Match: * on the put, and on completing a multipart upload: the second of two writers
                      gets 412. AWS and moto honour the header; an S3 clone that ignores it overwrites
    gs://             ifGenerationMatch=0 through gcsfs, with the same guarantee; not tested against the real service
    hf://             HfFileSystem has no exclusive write: a check, then one atomic commit
    memory://, others no exclusive write: a check, an upload under a temporary name, a second check, and a move, so
                      that an interrupted upload never has a bundle's name

Where a store has only a check, two writers may pass it at once. Both then write the same bytes, because a bundle is
named after its content, so the race is harmless. Stores that stream (s3, http) are read through `open_async`: one
request, and memory for one chunk. A plain s3fs file sends range requests and buffers each response whole.
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
from tcdeploy.planning.installation import install_command
from tcdeploy.remote import retry
from tcdeploy.remote.address import CHUNK_BYTES, LOCAL_SCHEMES, Address, BundleName, parse_bundle_name
from tcdeploy.remote.retry import Deadline
from tcdeploy.remote.store import Body, LocalFolder, ObjectInfo, RemoteBundle

# The extra with the library of a scheme. compile installs transformers, which requires huggingface_hub.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "compile"}
READ_ONLY_SCHEMES = ("http", "https")
PART_BYTES = 16 << 20  # of a multipart upload
MAX_CONCURRENT_PARTS = 4  # bounds the memory of an upload to 64 MiB
TIME_KEYS = ("LastModified", "mtime", "updated", "last_modified", "modified", "created")


class FsspecFolder:
    """A folder in an fsspec store, with its own client: no cached listings, no retries by the library."""

    def __init__(self, address: Address, deadline: Deadline) -> None:
        self.address, self.deadline = address, deadline

    @functools.cached_property
    def fs(self) -> Any:
        """Created by the first request, since some clients connect in their constructor."""
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
            if retry.classify_error(error).kind != "not_found":  # fsspec's http raises it for every failure
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
            self._run_async(file.read, 0)  # waits for the response headers, which give the length
            length = file.size if self._is_s3 else file.r.content_length
            yield Body(length, iter(lambda: self._run_async(file.read, CHUNK_BYTES), b""))
        finally:
            self._run_async(_close, file)

    def write(self, name: BundleName, file: Path) -> None:
        if self.address.scheme in READ_ONLY_SCHEMES:
            raise UsageError(f"{self.address.redacted} is read-only", "push to a folder, s3://, gs://, hf:// or oci://")
        path = self._path(name)
        try:
            if self._is_s3 or self.address.scheme in ("gs", "gcs"):
                options = {"max_concurrency": MAX_CONCURRENT_PARTS} if self._is_s3 else {}
                self._call("put_file", str(file), path, mode="create", chunksize=PART_BYTES, **options)
            elif self.address.scheme == "hf":
                self.fs.put_file(str(file), path)
            else:
                self._upload_and_move(str(file), path)
        except Exception as error:
            if retry.classify_error(error).status == 412:
                raise FileExistsError(path) from error
            raise

    def list(self, plan_key: str) -> list[RemoteBundle] | None:
        details = {"expand_info": True} if self.address.scheme == "hf" else {}
        try:
            listing = self._call("ls", self.root, detail=True, **details)
        except FileNotFoundError as error:
            failure = retry.classify_error(error)
            if failure.kind != "not_found" or failure.status:  # the bucket, repository or page does not exist
                raise
            return None
        bundles = ((parse_bundle_name(item["name"].split("?")[0].rpartition("/")[2]), item) for item in listing)
        return [
            RemoteBundle(name, _modified_time(item)) for name, item in bundles if name and name.plan_key == plan_key
        ]

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

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system; asynchronous ones stop at the deadline."""
        timeout = {"timeout": self.deadline.remaining_seconds()} if self.fs.async_impl else {}
        return getattr(self.fs, method)(*arguments, **options, **timeout)

    def _run_async(self, function: Any, *arguments: Any, **options: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self.fs.loop, function, *arguments, timeout=self.deadline.remaining_seconds(), **options)


async def _close(file: Any) -> None:
    if file.r is not None:
        file.r.close()
    file.closed = True  # else its finalizer calls an async close that is never awaited


def _client_options(scheme: str) -> dict[str, Any]:
    """Constructor options of a client: our timeouts, no retries (retry.py retries), no shared instance."""
    uncached = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        from fsspec.config import conf

        timeouts = {"connect_timeout": retry.CONNECT_TIMEOUT_SECONDS, "read_timeout": retry.READ_TIMEOUT_SECONDS}
        no_retries = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
        return {**uncached, "config_kwargs": {**conf.get("s3", {}).get("config_kwargs", {}), **timeouts, **no_retries}}
    if scheme in (*READ_ONLY_SCHEMES, "gs", "gcs"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=retry.CONNECT_TIMEOUT_SECONDS, sock_read=retry.READ_TIMEOUT_SECONDS
        )
        if scheme not in READ_ONLY_SCHEMES:
            return {**uncached, "requests_timeout": timeout}
        return {**uncached, "client_kwargs": {"timeout": timeout, "headers": {"Accept-Encoding": "identity"}}}
    return uncached


def open_folder(address: Address, deadline: Deadline) -> LocalFolder | FsspecFolder:
    """The folder at an address. Raises UsageError for an unknown scheme or a missing library."""
    if address.scheme in LOCAL_SCHEMES:
        return LocalFolder(Path(address.host_and_path))
    import fsspec

    try:
        fsspec.get_filesystem_class(address.scheme)
    except ValueError as error:
        similar = difflib.get_close_matches(address.scheme, [*fsspec.available_protocols(), "oci"], 1, 0.5)
        supported = "use a path, s3://, gs://, hf://, oci:// or another scheme of fsspec"
        raise UsageError(
            f"the URL scheme {address.scheme}:// is not supported ({address.redacted})",
            f"did you mean {similar[0]}://?" if similar else supported,
        ) from error
    except ImportError as error:
        raise missing_library_error(address, EXTRAS.get(address.scheme, ""), str(error)) from error
    return FsspecFolder(address, deadline)


def missing_library_error(address: Address, extra: str, reason: str) -> UsageError:
    return UsageError(
        f"{address.scheme}:// needs a package that is not installed ({address.redacted})",
        install_command(extra) if extra else reason,
    )


def _modified_time(item: dict[str, Any]) -> float | None:
    """The modification time of a listed object in seconds since 1970. Each store has its own key and type."""
    time = next((item[key] for key in TIME_KEYS if item.get(key)), None) or getattr(item.get("last_commit"), "date", 0)
    if isinstance(time, str):
        with contextlib.suppress(ValueError):
            time = datetime.fromisoformat(time)
    if isinstance(time, datetime):
        return time.timestamp()
    return float(time) if isinstance(time, int | float) and time else None
