"""Fills the staging folder of a start with its plan from the cache folder, or with finished buckets of other starts.

torch loads compiled libraries and unpickles graphs without checking them. A start therefore gets only files whose size
and sha256 match a record in a complete manifest, or in the journal of another start. Does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tcdeploy.cache.files.records import DamagedFile, FileRecord, is_winner
from tcdeploy.cache.files.usage import untracked
from tcdeploy.cache.folder.layout import REFERENCES_DIR, manifest_path, plan_keys, stored_header_path
from tcdeploy.cache.folder.leases import folder_lock
from tcdeploy.cache.record.manifest import Manifest, read_manifest, read_other_versions
from tcdeploy.cache.record.provenance import (
    SigningPolicy,
    check_manifest,
    check_manifests,
    files_made_here,
    read_stored_bundle,
)
from tcdeploy.cache.record.unlisted import discard_if_damaged
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.cache.staging.journal import (
    HOST_PREFIX,
    abandoned_folders,
    read_journal,
    remove_abandoned_folders,
    unlocked_folders,
)
from tcdeploy.cache.trust.ownership import check_no_links
from tcdeploy.cache.trust.signing import default_trusted_keys_folder
from tcdeploy.errors import IntegrityError, TrustError
from tcdeploy.host.regular_file import read_regular

READ_ATTEMPTS = 3  # if another process replaces the plan during each of them, the start fails
log = logging.getLogger("tcdeploy.cache")


def restore_plan(
    staging: StagingFolder,
    plan_key: str,
    rebuild: bool,
    policy: SigningPolicy | None = None,
    is_deferred: Callable[[FileRecord], bool] = lambda file: False,
) -> Manifest | None:
    """Fill the staging folder and return the plan's manifest; None if the plan must be compiled.

    If the plan is cached, its files are copied, but those for which `is_deferred` is true only by
    `staging.fill_deferred`. Otherwise the undamaged files of all other plans are copied, because plans share programs,
    and the finished buckets of starts that did not finish. Sets `staging.bundle`, if the plan is from a bundle.

    Raises IntegrityError that names the first damaged file; with `rebuild`, discards the plan and returns None instead.
    Raises TrustError for an invalid signature. With `policy.require_signed`, raises TrustError for a file that is not
    in a signed bundle, and ignores `rebuild`.
    """
    policy = policy or SigningPolicy(default_trusted_keys_folder())
    rebuild = rebuild and not policy.require_signed
    manifest = None
    try:
        manifest = _fill_undamaged(staging, plan_key, rebuild, policy, is_deferred)
    finally:
        if manifest is None:
            _report_other_versions(staging.cache_folder)
    if manifest is None:
        num_folders, num_entries = take_over_finished_buckets(staging, plan_key)
        if num_entries:
            log.warning("buckets or packages reused from starts that did not finish: %d", num_entries)
        elif num_folders:
            log.warning("the folders of %d killed processes had no buckets or packages to reuse", num_folders)
    elif not staging.is_private_copy:
        remove_published_folders(staging)
        _report_files_made_here(staging, manifest)
    return manifest


def _fill_undamaged(
    staging: StagingFolder,
    plan_key: str,
    rebuild: bool,
    policy: SigningPolicy,
    is_deferred: Callable[[FileRecord], bool],
) -> Manifest | None:
    """Fill the staging folder, again if another process replaces the plan at the same time."""
    folder, attempts = staging.cache_folder, READ_ATTEMPTS
    while True:
        attempts -= 1
        before = _content(manifest_path(folder, plan_key))
        try:
            return _fill(staging, plan_key, policy, is_deferred)
        except IntegrityError:
            staging.clear()
            if rebuild and staging.is_private_copy:  # the folder cannot be written, and so the plan not discarded
                _fill_from_other_plans(staging, plan_key, set(), policy)
                return None
            if not attempts or not (rebuild or _content(manifest_path(folder, plan_key)) != before):
                raise
            if rebuild:
                discard_if_damaged(folder, plan_key, policy.trusted_keys)


def _fill(
    staging: StagingFolder, plan_key: str, policy: SigningPolicy, is_deferred: Callable[[FileRecord], bool]
) -> Manifest | None:
    """Fill the staging folder once. Raises IntegrityError and TrustError for this plan."""
    folder = staging.cache_folder
    # The lock keeps a concurrent unpack from replacing the manifest and the header between the two reads.
    with contextlib.nullcontext() if staging.is_private_copy else folder_lock(folder):
        manifest = _read_manifest_of(folder, plan_key)
        staging.bundle = check_manifests(folder, plan_key, {} if manifest is None else {plan_key: manifest}, policy)
        if manifest is None and not staging.is_private_copy:  # the manifest has another schema
            stored_header_path(folder, plan_key).unlink(missing_ok=True)
    files = manifest.files if manifest is not None else ()
    deferred = [file for file in files if is_deferred(file)]
    if damage := [*staging.fill(file for file in files if not is_deferred(file)), *staging.defer(deferred)]:
        raise _damage_error(Path(folder), damage)
    # A start that was not the first of its process may have found programs in memory, whose files it does not list.
    if manifest is None or not (manifest.is_first_start or staging.bundle is not None):
        _fill_from_other_plans(staging, plan_key, {file.path for file in files}, policy)
    return manifest


def _read_manifest_of(folder: str, plan_key: str) -> Manifest | None:
    path = manifest_path(folder, plan_key)
    check_no_links(folder, [manifest_path("", plan_key).as_posix()])
    if stored_header_path(folder, plan_key).exists() and not path.exists():
        raise IntegrityError(
            f"plan {plan_key} was unpacked into {folder}, but its manifest is missing",
            "unpack the bundle again, or discard the plan and compile: --on-bad-cache rebuild",
        )
    return read_manifest(path)


def _fill_from_other_plans(staging: StagingFolder, plan_key: str, present: set[str], policy: SigningPolicy) -> None:
    """Copy the undamaged files of all other plans whose paths are not in `present`. Warns about the others."""
    folder = staging.cache_folder
    files: dict[str, FileRecord] = {}
    for key in sorted(plan_keys(folder) - {plan_key}):
        try:
            if (manifest := read_manifest(manifest_path(folder, key))) is not None:
                check_manifest(folder, key, manifest, read_stored_bundle(folder, key, policy.trusted_keys))
                # The name of a reference contains the plan's key, so another plan never reads it.
                shared = (file for file in manifest.files if not file.path.startswith(f"{REFERENCES_DIR}/"))
                files |= {file.path: file for file in shared if file.path not in present}
        except (IntegrityError, TrustError) as error:
            log.warning("no programs of plan %s are reused: %s", key, error.message)
    if damage := staging.fill(files.values()):
        log.warning(
            "%d files of other plans are damaged and not reused, for example %s, which %s; to see all: "
            "tcdeploy cache verify %s",
            len(damage), Path(folder, damage[0].path), damage[0].reason, folder,
        )  # fmt: skip


def _content(path: Path) -> bytes:
    """The bytes of a file; none if it cannot be read."""
    try:
        return read_regular(path)
    except OSError:
        return b""


def _report_other_versions(folder: str) -> None:
    if others := read_other_versions(folder):
        log.warning(
            "%s was warmed by another version of tcdeploy (plans: %d), and this version cannot use what that one "
            "compiled: the first start of each plan after an upgrade compiles again", folder, len(others),
        )  # fmt: skip


def _report_files_made_here(staging: StagingFolder, manifest: Manifest) -> None:
    if staging.bundle is None or staging.bundle.lacks_measurements:
        return  # the first start on the GPU added the reference and the start record
    if made_here := files_made_here(manifest.files, staging.bundle):
        log.warning(
            "%d of the %d files of plan %s were compiled on this machine and are not in its bundle, for example %s",
            len(made_here), len(manifest.files), manifest.plan["key"], made_here[0],
        )  # fmt: skip


def _damage_error(folder: Path, damage: list[DamagedFile]) -> IntegrityError:
    more = f", and {len(damage) - 1} more files are damaged" if len(damage) > 1 else ""
    return IntegrityError(
        f"the cache is damaged: {folder / damage[0].path} {damage[0].reason}{more}",
        "nothing was loaded; to discard the plan and compile again: --on-bad-cache rebuild",
    )


class TakenOver(NamedTuple):
    """The number of folders that were deleted, and of journal entries that were copied: a bucket, or one package."""

    num_folders: int
    num_entries: int


def take_over_finished_buckets(staging: StagingFolder, plan_key: str) -> TakenOver:
    """Copy the files that the journals of unfinished starts list.

    Deletes each abandoned folder that has no finished bucket of another plan, unless that plan is complete.
    """
    if staging.is_private_copy:
        return TakenOver(0, 0)
    with folder_lock(staging.target):
        complete = plan_keys(staging.target) - {plan_key}  # its manifest may be of another version of tcdeploy
        num_folders = remove_abandoned_folders(abandoned_folders(staging.parent), complete)
        folders = unlocked_folders(staging.parent)
        entries = 0
        for folder in folders:
            try:
                entries += staging.take_over(folder, plan_key)
            except TrustError as error:
                log.warning("%s is not used: %s", folder, error.message)
        # Only folders listed above: if a process ended after that, its buckets have not been copied.
        abandoned = set(folders).intersection(abandoned_folders(staging.parent))
        num_folders += remove_abandoned_folders(abandoned, {plan_key, *complete})
    return TakenOver(num_folders, entries)


def copy_finished_buckets(staging: StagingFolder) -> None:
    """Copy the files in the journals of all starts that this start does not have, also of starts that still run.

    Raises SpaceError and TcdeployError.
    """
    for folder in sorted(Path(staging.parent).glob(f"{HOST_PREFIX}*")):
        if folder.is_symlink() or os.path.realpath(folder) == staging.path:
            continue
        listed = {file for bucket in read_journal(folder) for file in bucket.files}
        missing = [file for file in listed if not Path(staging.path, file.path).exists()]
        if not missing:
            continue
        try:
            with untracked():
                staging.fill(missing, folder)
            staging.winners |= {file.path for file in missing if is_winner(file.path)}
        except FileNotFoundError:  # another process has removed the folder
            log.debug("%s was removed while its files were copied", folder)
        except TrustError as error:
            log.warning("%s is not used: %s", folder, error.message)


def remove_published_folders(staging: StagingFolder) -> None:
    """Delete the staging folders of ended processes whose journals list only buckets of complete plans."""
    if not staging.is_private_copy:
        with folder_lock(staging.cache_folder):
            remove_abandoned_folders(abandoned_folders(staging.parent), plan_keys(staging.cache_folder))
