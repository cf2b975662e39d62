"""Reads single files of a cache folder before a start copies its plan: start records.

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
from tcdeploy.cache.record.manifest import Manifest, read_manifest
from tcdeploy.cache.record.provenance import SigningPolicy, check_manifests
from tcdeploy.errors import IntegrityError, TrustError
from tcdeploy.host.regular_file import MAX_DOCUMENT_BYTES

DAMAGE_HINT = "nothing was loaded; to discard the plan and compile again: --on-bad-cache rebuild"


class ListedFile(NamedTuple):
    """A file with exactly the bytes that the manifest of its plan lists."""

    manifest: Manifest
    path: str  # in the cache folder
    content: bytes

    @property
    def plan_key(self) -> str:
        return str(self.manifest.plan["key"])


class ListedFiles(NamedTuple):
    """`problems`: of plans that list such files, but whose manifest, signature or file is damaged."""

    files: list[ListedFile]
    problems: list[IntegrityError | TrustError]


def read_listed(folder: str | Path, prefix: str, suffix: str, policy: SigningPolicy) -> ListedFiles:
    """The files with these paths in the cache folder, newest first. Manifests that do not name `prefix` are skipped."""
    dated_files: list[tuple[float, str, ListedFile]] = []
    problems: list[IntegrityError | TrustError] = []
    for key in sorted(plan_keys(folder)):
        try:
            for listed, modified_at in _read_files(Path(folder), key, prefix, suffix, policy):
                dated_files.append((modified_at, key, listed))
        except (IntegrityError, TrustError) as problem:
            problems.append(problem)
    by_age = sorted(dated_files, key=lambda item: (item[0], item[1], item[2].path), reverse=True)
    return ListedFiles([listed for _, _, listed in by_age], problems)


def _read_files(
    folder: Path, key: str, prefix: str, suffix: str, policy: SigningPolicy
) -> Iterator[tuple[ListedFile, float]]:
    """The files that one plan lists, and when they were written. Raises IntegrityError and TrustError."""
    manifest = None
    with contextlib.suppress(OSError):
        manifest = read_manifest(manifest_path(folder, key), containing=prefix)
    if manifest is None or not any(file.path.startswith(prefix) for file in manifest.files):
        return
    check_manifests(str(folder), key, {key: manifest}, policy)
    for file in manifest.files:
        if file.path.startswith(prefix) and file.path.endswith(suffix):
            content, modified_at = _read(folder, file), 0.0
            with contextlib.suppress(OSError):
                modified_at = (folder / stored_path(folder, file)).lstat().st_mtime
            yield ListedFile(manifest, file.path, content), modified_at


def _read(folder: Path, file: FileRecord) -> bytes:
    """Raises IntegrityError if the file is damaged, or too large to be read at once."""
    reason, chunks = f"has {file.bytes} bytes, and the limit is {MAX_DOCUMENT_BYTES}", list[bytes]()
    if file.bytes <= MAX_DOCUMENT_BYTES:
        damage = read_checked(folder, file, chunks.append)
        if damage is None:
            return b"".join(chunks)
        reason = damage.reason
    raise IntegrityError(f"the cache is damaged: {folder / file.path} {reason}", DAMAGE_HINT)
