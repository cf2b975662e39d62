"""Copies a plan's files from the cache folder into a start's staging folder, and discards damaged plans.

torch loads compiled libraries and unpickles graphs without checking them. A start therefore gets only files whose size
and sha256 match a record in a complete manifest, or in the journal of a killed start. Does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from tcdeploy.cache.files.records import DamagedFile, FileRecord
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
from tcdeploy.cache.staging.takeover import remove_published_folders, take_over_finished_buckets
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

    If the plan is cached, its files are copied. Otherwise the undamaged files of all other plans are copied, because
    plans share programs, and the finished buckets of starts that did not finish. Plans from bundles are compared with
    the signed headers (provenance.py). Sets `staging.bundle` to the bundle of this plan. Files for which
    `is_deferred` is true stay in the cache folder until `staging.fill_deferred`.

    If a file of the plan is damaged, raises IntegrityError that names the first one; with `rebuild`, discards the plan
    and returns None instead. Raises TrustError for an invalid signature. With `policy.require_signed`, raises
    TrustError for a file that is not in a signed bundle, and ignores `rebuild`.
    """
    policy = policy or SigningPolicy(default_trusted_keys_folder())
    rebuild = rebuild and not policy.require_signed
    manifest = None
    try:
        manifest = _fill_undamaged(staging, plan_key, rebuild, policy, is_deferred)
    finally:
        if manifest is None:
            _report_other_versions(staging.source)
    if manifest is None:
        taken_over = take_over_finished_buckets(staging, plan_key)
        if taken_over.num_entries:
            log.warning("buckets or packages reused from starts that did not finish: %d", taken_over.num_entries)
        elif taken_over.num_folders:
            log.warning(
                "the folders of %d killed processes had no buckets or packages to reuse", taken_over.num_folders
            )
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
    folder, attempts = staging.source, READ_ATTEMPTS
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
    folder = staging.source
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
    folder = staging.source
    files: dict[str, FileRecord] = {}
    for key in sorted(plan_keys(folder) - {plan_key}):
        try:
            if (manifest := read_manifest(manifest_path(folder, key))) is not None:
                check_manifest(folder, key, manifest, read_stored_bundle(folder, key, policy.trusted_keys))
                files |= {
                    file.path: file for file in manifest.files if _may_be_shared(file) and file.path not in present
                }
        except (IntegrityError, TrustError) as error:
            log.warning("no programs of plan %s are reused: %s", key, error.message)
    if damage := staging.fill(files.values()):
        log.warning(
            "%d files of other plans are damaged and not reused, for example %s, which %s; to see all: "
            "tcdeploy cache verify %s",
            len(damage), Path(folder, damage[0].path), damage[0].reason, folder,
        )  # fmt: skip


def _may_be_shared(file: FileRecord) -> bool:
    # The name of a reference contains the plan's key, so another plan never reads it.
    return not file.path.startswith(f"{REFERENCES_DIR}/")


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
    made_here = files_made_here(manifest.files, staging.bundle) if staging.bundle is not None else []
    if made_here:
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
