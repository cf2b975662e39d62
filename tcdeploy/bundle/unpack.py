"""From a bundle to a cache folder: judged, checked, staged, and only then put in place.

The order is the point. Signature, header, digest of the payload, room on the disk: nothing is written before these
hold. Then every file goes into a staging folder on the same disk and is compared with the header as it is written;
whole, they are renamed into the cache one by one, and the plan's manifest last, which is what makes them count. Killed
anywhere, the cache is what it was, with some files more that no manifest names and a staging folder that the next one
removes; only the same plan, where it was there with other bytes, is not warm until it is whole. Several processes may
do this at once: one works, the others wait, and find it done.
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
STAGED_MANIFEST = ".manifest"  # in the staging folder; no file of a bundle is named so


@dataclass(frozen=True)
class OpenedBundle:
    """A bundle whose signature was judged and whose payload is as its header says."""

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
    """Judge and check; decompresses nothing. Raises TrustError, IntegrityError and TcdeployError (no such file)."""
    try:
        with open(path, "rb") as file:
            signed_header = read_signed_header(file, str(path))
        signer = verify_signature(signed_header, str(path), trusted_keys, allow_unsigned)
        header = parse_header(signed_header, str(path))
        check_payload(path, signed_header, header.payload)
    except OSError as error:
        raise TcdeployError(f"the bundle {path} cannot be read: {error.strerror}", "tcdeploy cache pack -o") from error
    return OpenedBundle(path, signed_header, header, signer)


def unpack(path: Path, folder: Path, trusted_keys: Path, allow_unsigned: bool = False) -> UnpackResult:
    """Put a bundle's files into a cache folder. Raises TrustError, IntegrityError, SpaceError and TcdeployError."""
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
            raise SpaceError(f"the disk of {folder} is full: {size} bytes are needed", "free some room") from error
        raise TcdeployError(f"{folder} cannot be written: {error.strerror}", "name another folder") from error
    return UnpackResult(key, len(manifest.files), size, opened.signer, already_present)


def _is_unpacked(folder: Path, manifest: Manifest, key: str) -> bool:
    """The plan is known here, and the bundle's files are as they should be."""
    with contextlib.suppress(IntegrityError):
        known = read_manifest(manifest_path(folder, key))
        wanted = {file.path for file in manifest.files}
        return (
            known is not None and wanted <= {file.path for file in known.files} and not find_damage(folder, known.files)
        )
    return False


def _check_free_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + SPARE_BYTES:
        raise SpaceError(
            f"unpacking needs {size + SPARE_BYTES} bytes in {folder}, and {free} are free", "free some room"
        )


def _stage_and_publish(opened: OpenedBundle, folder: Path) -> None:
    for left in folder.glob(f"{STAGING_PREFIX}*"):  # of one that was killed; we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=folder))
    manifest, key = opened.header.manifest, opened.header.plan_key
    try:
        _write_files(opened, staging)
        kept = _conflicting_files(folder, manifest, key)
        local = dataclasses.replace(manifest, files=tuple(kept.get(file.path, file) for file in manifest.files))
        _write_bytes(staging / STAGED_MANIFEST, manifest_text(local).encode())
        _fsync_all(staging, [*(file.path for file in manifest.files), STAGED_MANIFEST])
        final = manifest_path(folder, key)
        final.unlink(missing_ok=True)  # of the same plan with other bytes: killed between, it is not warm, not damaged
        for file in manifest.files:
            if file.path in kept:
                continue
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / file.path, target)
        final.parent.mkdir(exist_ok=True)
        os.replace(staging / STAGED_MANIFEST, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_files(opened: OpenedBundle, staging: Path) -> None:
    made: set[Path] = set()
    for file, chunks in read_files(opened.path, opened.signed_header, opened.header.manifest.files):
        target = staging / file.path
        if target.parent not in made:
            target.parent.mkdir(parents=True, exist_ok=True)
            made.add(target.parent)
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb") as out:
            for chunk in chunks:
                out.write(chunk)


def _conflicting_files(folder: Path, manifest: Manifest, key: str) -> dict[str, FileRecord]:
    """Files that another plan of the folder has under the same name with other bytes, whole: they stay.

    torch names a file by what it was made from, so it is the same program, built where another path was baked in.
    """
    known = read_manifests(folder, skip_damaged=True)
    theirs = {file.path: file for name, other in known.items() if name != key for file in other.files}
    others = [theirs[file.path] for file in manifest.files if theirs.get(file.path, file) != file]
    damaged = {damage.path for damage in find_damage(folder, others)}
    return {file.path: file for file in others if file.path not in damaged}


def _write_bytes(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _fsync_all(folder: Path, names: list[str]) -> None:
    """To the disk before they count; several at once, because each waits for the disk alone."""

    def sync(name: str) -> None:
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(FSYNC_THREADS) as pool:
        list(pool.map(sync, names))


def _store_signed_header(opened: OpenedBundle, folder: Path) -> None:
    """So that the folder can say who signed what is in it, and `gc` keeps it."""
    path = folder / BUNDLES_DIR / f"{opened.header.plan_key}{HEADER_SUFFIX}"
    content = signed_header_bytes(opened.signed_header.header, opened.signed_header.signatures)
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        staging = path.with_name(f".{path.name}-{os.getpid()}.tmp")
        _write_bytes(staging, content)
        os.replace(staging, path)
