"""Unpacks a bundle into a cache folder.

The order matters. Nothing is written before the signature, the header, the payload's sha256 and the free space are
checked. Each file is then written to a temporary folder on the same disk and compared with the header on the way. Once
all files are complete, they are renamed into the cache, then the plan's manifest, then the signed header. Each step is
flushed to disk before the next, because a start uses only what a manifest lists. An undamaged file that a manifest
lists is never replaced: if a bundled file has the same path and different content, the bundled file goes to
CONFLICTS_DIR (cache/files/records.py). A process killed at any point therefore leaves all plans intact, this one
included. It may leave a temporary folder, and files that no manifest lists; the next unpack of the bundle deletes both.

A bundle with several plans is unpacked plan by plan, and each plan gets the whole signed header. A bundle without a
trusted signature does not replace a signed header in the folder that lists exactly the same files.

If the folder has the plan from a bundle that was compiled later (`compiled_at` of the manifest), the older bundle is
refused, so that a release that was signed and later withdrawn cannot be installed again. Concurrent unpacks run one
after another; all but the first find the plan present.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tcdeploy.bundle.container import check_free_space, check_payload, read_files
from tcdeploy.cache.files.records import find_damage, group_by_path, path_to_publish
from tcdeploy.cache.folder.access import create_folder
from tcdeploy.cache.folder.layout import UNPACKING_PREFIX, manifest_path, stored_header_path
from tcdeploy.cache.folder.leases import folder_lock
from tcdeploy.cache.record.bundle_header import CheckedHeader, parse_header, rollback_reason
from tcdeploy.cache.record.manifest import Manifest, manifest_text, read_manifest, read_manifests
from tcdeploy.cache.record.provenance import read_stored_bundle
from tcdeploy.cache.record.unlisted import remove_unlisted, stored_paths
from tcdeploy.cache.trust.ownership import check_no_links, make_private_folder
from tcdeploy.cache.trust.signing import (
    MAX_HEADER_BYTES,
    MAX_SIGNATURES_BYTES,
    TrustedKey,
    read_bundle_header,
    signed_header_bytes,
    verify_signature,
)
from tcdeploy.errors import IntegrityError, MismatchError, SpaceError, TcdeployError, TrustError
from tcdeploy.host.durable import sync_files, sync_folders
from tcdeploy.host.regular_file import DISK_FULL, UnsafeFileError, open_regular, read_regular
from tcdeploy.remote.address import unreadable_bundle_error

SPARE_BYTES = 16 << 20
FILE_MODE = 0o600
STAGED_MANIFEST, STAGED_HEADER = ".manifest", ".header"  # paths in a bundle never start with a dot


@dataclass(frozen=True)
class UnpackResult:
    """plan_key: the plan that the bundle is named after.

    measured_plans: keys of the plans for which the folder keeps the measurements of an earlier start.
    unmeasured_plans: keys of the plans whose measurements of an earlier start were discarded.
    signed_plans: keys of the plans for which the folder keeps a trusted signature that the bundle lacks.
    unsigned_plans: keys of the plans that had a trusted signature in the folder and have none now.
    """

    plan_key: str
    files: int
    bytes: int
    signer: TrustedKey | None
    already_present: bool
    other_plans: tuple[str, ...] = ()
    measured_plans: tuple[str, ...] = ()
    unmeasured_plans: tuple[str, ...] = ()
    signed_plans: tuple[str, ...] = ()
    unsigned_plans: tuple[str, ...] = ()


class _StoredPlan(NamedTuple):
    """What a cache folder has of a bundle's plan before the bundle is unpacked.

    is_present: the folder has the bundle's files, undamaged, and keeps its manifest.
    is_measured: a start has run the plan in this folder, and none had run it before it was packed.
    is_signed: the stored header has a trusted signature, and the bundle has none.
    signed_manifest: of the stored header, if `is_signed` and it lists exactly the bundle's files. Then both stay.
    """

    is_present: bool
    is_measured: bool
    is_signed: bool
    signed_manifest: Manifest | None


def open_bundle(path: Path, trusted_keys: Path, allow_unsigned: bool = False) -> CheckedHeader:
    """Verify a bundle's signature, header and payload digest, without decompressing.

    Raises TrustError, IntegrityError, MismatchError for a bundle of another version of tcdeploy, and UsageError for a
    file that cannot be read.
    """
    try:
        signed_header = read_bundle_header(path)
        signer = verify_signature(signed_header, str(path), trusted_keys, allow_unsigned)
        header = parse_header(signed_header, str(path))
        check_payload(path, signed_header, header.payload)
    except OSError as error:
        raise unreadable_bundle_error(path, error) from error
    return CheckedHeader(header, signed_header, signer)


def unpack(
    path: Path, folder: Path, trusted_keys: Path, allow_unsigned: bool = False, allow_rollback: bool = False,
    is_trusted_folder: bool = False, keeps_measurements: bool = True,
) -> UnpackResult:  # fmt: skip
    """Unpack a bundle into a cache folder.

    allow_unsigned: accept a bundle that no trusted key signed.
    allow_rollback: accept a bundle that is older than the one from which the folder has the plan.
    is_trusted_folder: accept a folder that other users can change.
    keeps_measurements: if the bundle is of a build without the GPU, and a start in the folder has run this build, keep
        the measurements of that start, unless `allow_rollback`. No bundle contains the files of that start, so a start
        with --require-signed refuses them.

    Raises TrustError, IntegrityError, SpaceError and TcdeployError.
    """
    opened = open_bundle(path, trusted_keys, allow_unsigned)
    key, *other_plans = opened.header.manifests
    plans = [dataclasses.replace(opened, header=opened.header.of_plan(plan)) for plan in opened.header.manifests]
    files = opened.header.payload_files
    size = sum(file.bytes for file in files)
    try:
        create_folder(folder, is_trusted_folder)
        with folder_lock(folder):
            # A folder that is a symbolic link would be written through.
            check_no_links(folder, (Path(file.path).parent.as_posix() for file in files))
            for plan in () if allow_rollback else plans:
                _check_not_older(path, plan, folder, trusted_keys)
            keeps_measurements = keeps_measurements and not allow_rollback
            stored = [_stored_plan(plan, folder, trusted_keys, keeps_measurements) for plan in plans]
            is_all_present = all(plan.is_present for plan in stored)
            if not is_all_present:
                check_free_space(folder, size + SPARE_BYTES, "unpacking needs")
            for plan, here in zip(plans, stored, strict=True):
                _stage_and_publish(path, plan, folder, here.is_present, here.signed_manifest)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise SpaceError(
                f"the disk of {folder} is full; unpacking needs {size} bytes",
                "free some space, or choose another folder",
            ) from error
        raise TcdeployError(f"{folder} cannot be written: {error.strerror}", "choose another folder") from error

    def keys_where(condition: Callable[[_StoredPlan], bool]) -> tuple[str, ...]:
        return tuple(itertools.compress(opened.header.manifests, map(condition, stored)))

    return UnpackResult(
        key, len(files), size, opened.signer, is_all_present, tuple(other_plans),
        measured_plans=keys_where(lambda plan: plan.is_measured and plan.is_present),
        unmeasured_plans=keys_where(lambda plan: plan.is_measured and not plan.is_present),
        signed_plans=keys_where(lambda plan: plan.signed_manifest is not None),
        unsigned_plans=keys_where(lambda plan: plan.is_signed and not plan.signed_manifest),
    )  # fmt: skip


def _stored_plan(opened: CheckedHeader, folder: Path, trusted_keys: Path, keeps_measurements: bool) -> _StoredPlan:
    key, packed = opened.header.plan_key, opened.header.manifest
    local, stored, is_present = None, None, False
    with contextlib.suppress(IntegrityError):
        local = read_manifest(manifest_path(folder, key))
        is_present = local is not None and _is_unpacked(folder, packed, local)
    with contextlib.suppress(IntegrityError, TrustError, MismatchError):
        stored = read_stored_bundle(folder, key, trusted_keys)
    is_measured = local is not None and local.has_run and not packed.has_run
    is_present = is_present and (keeps_measurements or not is_measured)
    is_signed = opened.signer is None and stored is not None and stored.signer is not None
    signed_manifest = None
    if is_signed and stored is not None and set(stored.files) == set(opened.files):
        signed_manifest = stored.header.manifest
    return _StoredPlan(is_present, is_measured, is_signed, signed_manifest)


def _check_not_older(path: Path, opened: CheckedHeader, folder: Path, trusted_keys: Path) -> None:
    """Raise TrustError if the folder has the plan from a newer bundle.

    A bundle that a trusted key signed may replace one without a trusted signature, whatever their dates. A bundle
    without a date is older than a bundle with one.
    """
    try:
        stored = read_stored_bundle(folder, opened.header.plan_key, trusted_keys)
    except (IntegrityError, TrustError, MismatchError):  # a damaged, untrusted or outdated bundle may be replaced
        return
    if stored is None or (stored.signer is None and opened.signer is not None):
        return
    if reason := rollback_reason(opened.header, stored.header):
        raise TrustError(
            f"the bundle {path} is older than the unpacked bundle of plan {opened.header.plan_key} in {folder}: "
            f"{reason}",
            "fetch the newer bundle; to replace the plan with the older one: --allow-rollback",
        )


def check_not_older(new: Path, existing: Path) -> None:
    """Raise TrustError if both files are bundles of the same plan and the new one is older.

    Raises IntegrityError or MismatchError if this version can read the existing bundle and not the new one. Signatures
    are not verified.
    """
    try:
        existing_header = parse_header(read_bundle_header(existing), str(existing))
    except (OSError, IntegrityError, MismatchError):
        return
    new_header = parse_header(read_bundle_header(new), str(new))
    if new_header.plan_key == existing_header.plan_key and (reason := rollback_reason(new_header, existing_header)):
        raise TrustError(
            f"the bundle is older than {existing}, which it would replace: {reason}",
            "pull it to another file, or add --allow-rollback",
        )


def _is_unpacked(folder: Path, packed: Manifest, local: Manifest) -> bool:
    """Whether the folder has this plan with exactly the bundle's files, undamaged.

    If the plan was built without the GPU and a start has run this build in the folder, the plan may also have the files
    that the start added. False if the bundle's plan has run and the folder's plan has not: then the folder lacks the
    measurements of a start.
    """
    if packed.has_run and not local.has_run:
        return False
    is_same_build = not packed.has_run and (local.blind, local.compiled_at) == (packed.blind, packed.compiled_at)
    listed, wanted = set(local.files), set(packed.files)
    has_files = listed >= wanted if is_same_build and local.has_run else listed == wanted
    return has_files and not find_damage(folder, local.files)


def _stage_and_publish(
    path: Path, opened: CheckedHeader, folder: Path, already_present: bool, signed_manifest: Manifest | None
) -> None:
    """Publish the files and the manifest unless `already_present`, and the signed header.

    signed_manifest: of the header that the folder has, if it stays; published instead of the bundle's.
    """
    for stale in folder.glob(f"{UNPACKING_PREFIX}*"):  # of a killed process: this one holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    manifest, key = signed_manifest or opened.header.manifest, opened.header.plan_key
    stored_header = stored_header_path(folder, key)
    # `verify` and each start read the signer and the list of files from it.
    content = signed_header_bytes(opened.signed_header.header, opened.signed_header.signatures)
    is_header_present = signed_manifest is not None or _read_stored_header(stored_header) == content
    replaced = stored_paths(folder, key) | {file.path for file in manifest.files}
    unpacked = Path(tempfile.mkdtemp(prefix=UNPACKING_PREFIX, dir=folder))
    try:
        if not already_present:
            _write_files(path, opened, unpacked)
            _write_bytes(unpacked / STAGED_MANIFEST, manifest_text(manifest).encode())
            sync_files(unpacked, [*(file.path for file in manifest.files), STAGED_MANIFEST])
            _publish_files(folder, unpacked, manifest)
            if not is_header_present and stored_header.exists():  # it contradicts the new manifest
                stored_header.unlink()
                sync_folders(folder, [stored_header.relative_to(folder).as_posix()])
            _publish(folder, unpacked / STAGED_MANIFEST, manifest_path(folder, key))
        if not is_header_present:
            _write_bytes(unpacked / STAGED_HEADER, content)
            sync_files(unpacked, [STAGED_HEADER])
            _publish(folder, unpacked / STAGED_HEADER, stored_header)
        remove_unlisted(folder, replaced)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def _publish_files(folder: Path, unpacked: Path, manifest: Manifest) -> None:
    """Rename the files into the cache folder. Undamaged files of the same path that a manifest lists are kept."""
    manifests = read_manifests(folder, skip_damaged=True).values()
    listed = group_by_path(file for other in manifests for file in other.files)
    targets = [path_to_publish(folder, file, listed.get(file.path, [])) for file in manifest.files]
    for file, target in zip(manifest.files, targets, strict=True):
        make_private_folder((folder / target).parent)
        os.replace(unpacked / file.path, folder / target)
    sync_folders(folder, targets)


def _publish(folder: Path, staged: Path, target: Path) -> None:
    make_private_folder(target.parent)
    os.replace(staged, target)
    sync_folders(folder, [target.relative_to(folder).as_posix()])


def _write_files(path: Path, opened: CheckedHeader, unpacked: Path) -> None:
    created: set[Path] = set()
    wanted = set(opened.files)
    for file, chunks in read_files(path, opened.signed_header, opened.header.payload_files):
        if file not in wanted:  # of another plan, perhaps with the same path
            collections.deque(chunks, maxlen=0)
            continue
        target = unpacked / file.path
        if target.parent not in created:
            make_private_folder(target.parent)
            created.add(target.parent)
        with open_regular(target, "xb", permissions=FILE_MODE) as out:
            for chunk in chunks:
                out.write(chunk)


def _write_bytes(path: Path, content: bytes) -> None:
    with open_regular(path, "xb", permissions=FILE_MODE) as file:
        file.write(content)


def _read_stored_header(path: Path) -> bytes | None:
    """None if the file is missing, or is not a regular file; it is replaced then."""
    try:
        return read_regular(path, MAX_HEADER_BYTES + MAX_SIGNATURES_BYTES + 1024)
    except (FileNotFoundError, UnsafeFileError):
        return None
