"""Reads single files of a cache folder before a start copies its plan: start records, and recorded compilers.

These files decide which plan is started, so they are read before the plan's other files are verified. Only files that a
manifest lists are read, and their size and sha256 are compared before anything is parsed. If the plan came from a
bundle, its manifest is compared with the signed header first. Does not import torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tcdeploy.cache.files.records import FileRecord, read_checked, stored_path
from tcdeploy.cache.folder.layout import manifest_path, plan_keys
from tcdeploy.cache.record.manifest import read_manifest
from tcdeploy.cache.record.provenance import SigningPolicy, check_manifests
from tcdeploy.errors import IntegrityError, TrustError
from tcdeploy.host.regular_file import MAX_DOCUMENT_BYTES

DAMAGE_HINT = "nothing was loaded; to discard the plan and compile again: --on-bad-cache rebuild"


class ListedFile(NamedTuple):
    """A file with exactly the bytes that the manifest of the plan lists."""

    plan_key: str
    path: str  # in the cache folder
    content: bytes


class ListedFiles(NamedTuple):
    """`problems`: of plans that list such files, but whose manifest, signature or file is damaged."""

    files: list[ListedFile]
    problems: list[IntegrityError | TrustError]


def read_listed(folder: str | Path, prefix: str, suffix: str, policy: SigningPolicy) -> ListedFiles:
    """The files with these paths in the cache folder, newest first. Manifests that do not name `prefix` are skipped."""
    dated_files: list[tuple[float, ListedFile]] = []
    problems: list[IntegrityError | TrustError] = []
    for key in sorted(plan_keys(folder)):
        try:
            for file in _listed(folder, key, prefix, suffix, policy):
                listed = ListedFile(key, file.path, _read(Path(folder), file))
                dated_files.append((_modification_time(folder, file), listed))
        except (IntegrityError, TrustError) as problem:
            problems.append(problem)
    return ListedFiles([listed for _, listed in sorted(dated_files, reverse=True)], problems)


def _listed(folder: str | Path, key: str, prefix: str, suffix: str, policy: SigningPolicy) -> Iterator[FileRecord]:
    manifest = None
    with contextlib.suppress(OSError):
        manifest = read_manifest(manifest_path(folder, key), containing=prefix)
    files = [file for file in manifest.files if file.path.startswith(prefix)] if manifest is not None else []
    if manifest is not None and files:
        check_manifests(str(folder), key, {key: manifest}, policy)
        yield from (file for file in files if file.path.endswith(suffix))


def _read(folder: Path, file: FileRecord) -> bytes:
    """Raises IntegrityError if the file is damaged, or too large to be read at once."""
    if file.bytes > MAX_DOCUMENT_BYTES:
        raise IntegrityError(
            f"the cache is damaged: {folder / file.path} has {file.bytes} bytes, and the limit is {MAX_DOCUMENT_BYTES}",
            DAMAGE_HINT,
        )
    chunks: list[bytes] = []
    if damage := read_checked(folder, file, chunks.append):
        raise IntegrityError(f"the cache is damaged: {folder / file.path} {damage.reason}", DAMAGE_HINT)
    return b"".join(chunks)


def _modification_time(folder: str | Path, file: FileRecord) -> float:
    with contextlib.suppress(OSError):
        return Path(folder, stored_path(folder, file)).lstat().st_mtime
    return 0.0
