"""Unpacks a bundle into a cache folder.

The order matters. Nothing is written before the signature, the header, the payload's sha256 and the free space are
checked. Each file is then written to a staging folder on the same disk and compared with the header on the way. Once
all files are complete, they are renamed into the cache, and the plan's manifest last: a start uses only what a manifest
lists. A process killed at any point leaves the other plans intact. It may leave a staging folder, which the next unpack
deletes, and files that no manifest lists. One exception: if the folder had the same plan with other bytes, that plan is
cold until a later unpack completes. Concurrent unpacks run one after another; all but the first find the plan present.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tcdeploy.bundle.container import SignedHeader, check_payload, read_files, read_signed_header, signed_header_bytes
from tcdeploy.bundle.header import Header, parse_header
from tcdeploy.bundle.signing import TrustedKey, verify_signature
from tcdeploy.cache.contents import FileRecord, find_damage
from tcdeploy.cache.folder import BUNDLES_DIR, HEADER_SUFFIX
from tcdeploy.cache.leases import folder_lock
from tcdeploy.cache.manifest import Manifest, manifest_path, manifest_text, read_manifest, read_manifests
from tcdeploy.errors import IntegrityError, SpaceError, TcdeployError

STAGING_PREFIX = ".staging-"
SPARE_BYTES = 16 << 20
FSYNC_THREADS = 4
STAGED_MANIFEST = ".manifest"  # in the staging folder; paths in a bundle never start with a dot


@dataclass(frozen=True)
class OpenedBundle:
    """A bundle whose signature is verified and whose payload matches its header."""

    path: Path
    signed_header: SignedHeader
    header: Header
    signer: TrustedKey | None


@dataclass(frozen=True)
class UnpackResult:
    plan_key: str
    files: int
    bytes: int
    signer: TrustedKey | None
    already_present: bool


def open_bundle(path: Path, trusted_keys: Path, allow_unsigned: bool = False) -> OpenedBundle:
    """Verify a bundle's signature, header and payload digest, without decompressing.

    Raises TrustError, IntegrityError, and TcdeployError for a file that cannot be read.
    """
    try:
        with open(path, "rb") as file:
            signed_header = read_signed_header(file, str(path))
        signer = verify_signature(signed_header, str(path), trusted_keys, allow_unsigned)
        header = parse_header(signed_header, str(path))
        check_payload(path, signed_header, header.payload)
    except OSError as error:
        raise TcdeployError(
            f"the bundle {path} cannot be read: {error.strerror}", "create one: tcdeploy cache pack MODEL -o FILE.tcb"
        ) from error
    return OpenedBundle(path, signed_header, header, signer)


def unpack(path: Path, folder: Path, trusted_keys: Path, allow_unsigned: bool = False) -> UnpackResult:
    """Unpack a bundle into a cache folder. Raises TrustError, IntegrityError, SpaceError and TcdeployError."""
    opened = open_bundle(path, trusted_keys, allow_unsigned)
    manifest, key = opened.header.manifest, opened.header.plan_key
    size = sum(file.bytes for file in manifest.files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder):
            already_present = _is_unpacked(folder, manifest, key)
            if not already_present:
                _check_free_space(folder, size)
                _stage_and_publish(opened, folder)
            _store_signed_header(opened, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(
                f"the disk of {folder} is full; unpacking needs {size} bytes",
                "free some space, or choose another folder",
            ) from error
        raise TcdeployError(f"{folder} cannot be written: {error.strerror}", "choose another folder") from error
    return UnpackResult(key, len(manifest.files), size, opened.signer, already_present)


def _is_unpacked(folder: Path, manifest: Manifest, key: str) -> bool:
    """Whether the folder has this plan with all of the bundle's files, undamaged."""
    with contextlib.suppress(IntegrityError):
        local = read_manifest(manifest_path(folder, key))
        bundled_paths = {file.path for file in manifest.files}
        return (
            local is not None
            and bundled_paths <= {file.path for file in local.files}
            and not find_damage(folder, local.files)
        )
    return False


def _check_free_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + SPARE_BYTES:
        raise SpaceError(
            f"unpacking needs {size + SPARE_BYTES} bytes in {folder}; {free} are free",
            "free some space, or choose another folder",
        )


def _stage_and_publish(opened: OpenedBundle, folder: Path) -> None:
    for stale in folder.glob(f"{STAGING_PREFIX}*"):  # of a killed process: this one holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=folder))
    manifest, key = opened.header.manifest, opened.header.plan_key
    try:
        _write_files(opened, staging)
        conflicts = _conflicting_files(folder, manifest, key)
        local = dataclasses.replace(manifest, files=tuple(conflicts.get(file.path, file) for file in manifest.files))
        _write_bytes(staging / STAGED_MANIFEST, manifest_text(local).encode())
        _fsync_all(staging, [*(file.path for file in manifest.files), STAGED_MANIFEST])
        final = manifest_path(folder, key)
        # The same plan with other bytes: if killed before the last rename, it must be cold, not damaged.
        final.unlink(missing_ok=True)
        for file in manifest.files:
            if file.path in conflicts:
                continue
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / file.path, target)
        final.parent.mkdir(exist_ok=True)
        os.replace(staging / STAGED_MANIFEST, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_files(opened: OpenedBundle, staging: Path) -> None:
    created: set[Path] = set()
    for file, chunks in read_files(opened.path, opened.signed_header, opened.header.manifest.files):
        target = staging / file.path
        if target.parent not in created:
            target.parent.mkdir(parents=True, exist_ok=True)
            created.add(target.parent)
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb") as out:
            for chunk in chunks:
                out.write(chunk)


def _conflicting_files(folder: Path, manifest: Manifest, key: str) -> dict[str, FileRecord]:
    """Undamaged files of other plans that have a bundled file's path but other bytes. They are kept.

    torch names a file after its inputs, so both are the same program, compiled with different paths baked in.
    """
    manifests = read_manifests(folder, skip_damaged=True)
    local = {file.path: file for name, other in manifests.items() if name != key for file in other.files}
    conflicts = [local[file.path] for file in manifest.files if local.get(file.path, file) != file]
    damaged = {damage.path for damage in find_damage(folder, conflicts)}
    return {file.path: file for file in conflicts if file.path not in damaged}


def _write_bytes(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _fsync_all(folder: Path, names: list[str]) -> None:
    """Flush the files to disk, several at once: an fsync mostly waits."""

    def sync(name: str) -> None:
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(FSYNC_THREADS) as pool:
        list(pool.map(sync, names))


def _store_signed_header(opened: OpenedBundle, folder: Path) -> None:
    """Keep the signed header in the folder: `verify` reads the signer from it, and `gc` keeps its plan."""
    path = folder / BUNDLES_DIR / f"{opened.header.plan_key}{HEADER_SUFFIX}"
    content = signed_header_bytes(opened.signed_header.header, opened.signed_header.signatures)
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        staging = path.with_name(f".{path.name}-{os.getpid()}.tmp")
        _write_bytes(staging, content)
        os.replace(staging, path)
