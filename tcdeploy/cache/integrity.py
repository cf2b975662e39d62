"""Copies a plan's files from the cache folder into a start's staging folder, and discards damaged plans.

torch loads compiled libraries and unpickles graphs without checking them. A start therefore gets only files whose size
and sha256 match a record in a complete manifest, or in the journal of a killed start. Does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

from tcdeploy.cache.contents import DamagedFile, FileRecord, find_damage, intact_files, list_cache_files, stored_path
from tcdeploy.cache.leases import folder_lock
from tcdeploy.cache.manifest import MANIFESTS_DIR, Manifest, manifest_path, read_manifest, read_manifests
from tcdeploy.cache.provenance import (
    SigningPolicy,
    check_manifest,
    check_manifests,
    files_made_here,
    read_stored_bundle,
    stored_header_path,
)
from tcdeploy.cache.signing import default_trusted_keys_folder
from tcdeploy.cache.staging import StagingFolder, remove_abandoned_folders, take_over_finished_buckets
from tcdeploy.errors import IntegrityError, TrustError

log = logging.getLogger("tcdeploy.cache")


def restore_plan(
    staging: StagingFolder, plan_key: str, rebuild: bool, policy: SigningPolicy | None = None
) -> Manifest | None:
    """Fill the staging folder and return the plan's manifest; None if the plan must be compiled.

    If the plan is cached, its files are copied. Otherwise the files of all other plans are copied, because plans share
    programs, and the finished buckets of killed starts. Plans from bundles are compared with the signed headers
    (provenance.py). Sets `staging.bundle` to the bundle of this plan.

    If a file is damaged, raises IntegrityError that names the first one; with `rebuild`, discards the plan and returns
    None instead. Raises TrustError for an invalid signature. With `policy.require_signed`, raises TrustError for a file
    that is not in a signed bundle, and ignores `rebuild`.
    """
    policy = policy or SigningPolicy(default_trusted_keys_folder())
    rebuild = rebuild and not policy.require_signed
    folder = staging.source
    try:
        # The lock keeps a concurrent unpack from replacing the manifest and the header between the two reads.
        with contextlib.nullcontext() if staging.is_private_copy else folder_lock(folder):
            manifests = _read_needed_manifests(folder, plan_key)
            staging.bundle = check_manifests(folder, plan_key, manifests, policy)
            if plan_key not in manifests and not staging.is_private_copy:  # the manifest has another schema
                stored_header_path(folder, plan_key).unlink(missing_ok=True)
        manifest = manifests.get(plan_key)
        damage = staging.fill(_needed_files(manifests, plan_key))
        if damage and not rebuild:
            raise _damage_error(Path(folder), damage)
    except IntegrityError:
        if not rebuild:
            raise
        manifest, damage = None, []
        _start_over(staging, plan_key, policy.trusted_keys)
    if damage:
        manifest = None
        _start_over(staging, plan_key, policy.trusted_keys)
    if manifest is None:
        if buckets := take_over_finished_buckets(staging):
            log.warning("an earlier start was killed; the %d buckets that it had finished are reused", buckets)
    elif not staging.is_private_copy:
        with folder_lock(folder):
            remove_abandoned_folders(folder, keep_journals=True)
        _report_files_made_here(staging, manifest)
    return manifest


def _report_files_made_here(staging: StagingFolder, manifest: Manifest) -> None:
    made_here = files_made_here(manifest.files, staging.bundle) if staging.bundle is not None else []
    if made_here:
        log.warning(
            "%d of the %d files of plan %s were compiled on this machine and are not in its bundle, for example %s",
            len(made_here), len(manifest.files), manifest.plan["key"], made_here[0],
        )  # fmt: skip


def _read_needed_manifests(folder: str, plan_key: str) -> dict[str, Manifest]:
    """The manifests whose files the start needs, by plan key.

    The plan's own manifest is enough if it lists all files of the plan: if it is from a bundle, or if the start that
    wrote it was the first of its process. (A later start may have found programs in memory, whose files it does not
    list.) Otherwise the manifests of all plans are needed. Raises IntegrityError.
    """
    path, stored_header = manifest_path(folder, plan_key), stored_header_path(folder, plan_key)
    manifest = read_manifest(path)
    if manifest is not None and (manifest.is_first_start or stored_header.exists()):
        return {plan_key: manifest}
    if stored_header.exists() and not path.exists():
        raise IntegrityError(
            f"plan {plan_key} was unpacked into {folder}, but its manifest is missing",
            "unpack the bundle again, or discard the plan and compile: --on-bad-cache rebuild",
        )
    return read_manifests(folder)


def _needed_files(manifests: Mapping[str, Manifest], plan_key: str) -> list[FileRecord]:
    """One file per path. If two plans list different content for a path, the file of `plan_key` is used."""
    own_last = sorted(manifests, key=lambda key: key == plan_key)
    return list({file.path: file for key in own_last for file in manifests[key].files}.values())


def _start_over(staging: StagingFolder, plan_key: str, trusted_keys: Path) -> None:
    """Discard the plan, and fill the staging folder with the undamaged files of the other plans."""
    if not staging.is_private_copy:
        discard_plan(staging.source, plan_key)
    staging.clear()
    others = {}
    for key, manifest in read_manifests(staging.source, skip_damaged=True).items():
        with contextlib.suppress(IntegrityError, TrustError):
            if key != plan_key:
                check_manifest(staging.source, key, manifest, read_stored_bundle(staging.source, key, trusted_keys))
                others[key] = manifest
    staging.fill(_needed_files(others, plan_key))


def discard_if_damaged(folder: str, plan_key: str, trusted_keys: Path | None = None) -> bool:
    """Discard the plan if it is damaged, and return whether it was.

    A plan is damaged if its manifest or a file is missing or changed, or if it does not match the signed header of its
    bundle.
    """
    try:
        manifest = read_manifest(manifest_path(folder, plan_key))
        if manifest is not None and not find_damage(folder, manifest.files):
            bundle = read_stored_bundle(folder, plan_key, trusted_keys or default_trusted_keys_folder())
            check_manifest(folder, plan_key, manifest, bundle)
            return False
    except (IntegrityError, TrustError):
        pass
    discard_plan(folder, plan_key)
    return True


def _damage_error(folder: Path, damage: list[DamagedFile]) -> IntegrityError:
    more = f", and {len(damage) - 1} more files are damaged" if len(damage) > 1 else ""
    return IntegrityError(
        f"the cache is damaged: {folder / damage[0].path} {damage[0].reason}{more}",
        "nothing was loaded; to discard the plan and compile again: --on-bad-cache rebuild",
    )


def unlisted_files(folder: str | Path) -> list[str]:
    """The cache files that no manifest lists, relative to the folder. No start uses them."""
    manifests = read_manifests(folder, skip_damaged=True).values()
    listed = {stored_path(folder, file) for manifest in manifests for file in manifest.files}
    return [path for path in list_cache_files(folder) if path not in listed]


def discard_plan(folder: str, plan_key: str) -> None:
    """Remove the plan's manifest and every cache file, except undamaged files that another plan's manifest lists.

    Manifests of other plans are removed too if they are damaged or have another schema, and the files they list.
    """
    with folder_lock(folder):
        _remove_manifest(folder, plan_key)
        paths = list(Path(folder, MANIFESTS_DIR).glob("*.json"))  # before reading: a manifest written later must stay
        others = read_manifests(folder, skip_damaged=True)
        for path in paths:
            if path.stem not in others:  # damaged, or of another schema: the files that it lists are removed below
                _remove_manifest(folder, path.stem)
        listed = {file for manifest in others.values() for file in manifest.files}
        valid = {stored_path(folder, file) for file in intact_files(folder, listed)}
        for name in list_cache_files(folder):
            if name not in valid:
                Path(folder, name).unlink(missing_ok=True)


def _remove_manifest(folder: str, plan_key: str) -> None:
    """Delete the stored header before the manifest, because a header without a manifest is an error."""
    stored_header_path(folder, plan_key).unlink(missing_ok=True)
    manifest_path(folder, plan_key).unlink(missing_ok=True)
