"""Brings the files of a plan from the cache folder into a start's staging folder, and discards what is damaged.

torch loads compiled libraries and unpickles graphs without checking them. A start therefore gets no file that is not
named, with its size and sha256, by a complete manifest or by the journal of a start that was killed. Does not import
torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from tcdeploy.cache.contents import DamagedFile, FileRecord, find_damage, list_cache_files, stored_path
from tcdeploy.cache.folder import BUNDLES_DIR, HEADER_SUFFIX
from tcdeploy.cache.leases import folder_lock
from tcdeploy.cache.manifest import MANIFESTS_DIR, Manifest, manifest_path, read_manifest, read_manifests
from tcdeploy.cache.staging import StagingFolder, remove_abandoned_folders, take_over_finished_buckets
from tcdeploy.errors import IntegrityError

log = logging.getLogger("tcdeploy.cache")


def restore_plan(staging: StagingFolder, plan_key: str, rebuild: bool) -> Manifest | None:
    """Fill the staging folder and return the plan's manifest; None if the plan must be compiled.

    A plan that is cached gets its own files. Otherwise the start gets the files of all other plans, since plans share
    programs, and the finished buckets of starts that were killed. For damage it raises IntegrityError with the first
    file; with `rebuild` it discards the plan and returns None instead.
    """
    folder = staging.source
    try:
        manifest = read_manifest(manifest_path(folder, plan_key))
        damage = staging.fill(_needed_files(folder, manifest))
        if damage and not rebuild:
            raise _damage_error(Path(folder), damage)
    except IntegrityError:
        if not rebuild:
            raise
        manifest, damage = None, []
        _start_over(staging, plan_key)
    if damage:
        manifest = None
        _start_over(staging, plan_key)
    if manifest is None:
        if buckets := take_over_finished_buckets(staging):
            log.warning("an earlier start was killed; the %d buckets that it had finished are used", buckets)
    elif not staging.is_private_copy:
        with folder_lock(folder):
            remove_abandoned_folders(folder, keep_journals=True)
    return manifest


def _needed_files(folder: str, manifest: Manifest | None) -> list[FileRecord]:
    """The files of the manifest; those of all plans if there is none, or if its process found programs in memory."""
    manifests: Iterable[Manifest] = [manifest] if manifest else []
    if manifest is None or not manifest.is_first_start:
        manifests = [*read_manifests(folder).values(), *manifests]
    # By path, the given manifest last: two plans may list different bytes under one path.
    return list({file.path: file for listing in manifests for file in listing.files}.values())


def _start_over(staging: StagingFolder, plan_key: str) -> None:
    """Discard the plan, and fill the staging folder with the undamaged files of the others."""
    if not staging.is_private_copy:
        discard_plan(staging.source, plan_key)
    staging.clear()
    others = read_manifests(staging.source, skip_damaged=True)
    staging.fill({file.path: file for key, other in others.items() if key != plan_key for file in other.files}.values())


def discard_if_damaged(folder: str, plan_key: str) -> bool:
    """Discard the plan if its manifest or one of its files is damaged or missing; returns whether it was."""
    try:
        manifest = read_manifest(manifest_path(folder, plan_key))
        if manifest is not None and not find_damage(folder, manifest.files):
            return False
    except IntegrityError:
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
        damaged = {damage.path for damage in find_damage(folder, listed)}
        valid = {stored_path(folder, file) for file in listed if file.path not in damaged}
        for name in list_cache_files(folder):
            if name not in valid:
                Path(folder, name).unlink(missing_ok=True)


def _remove_manifest(folder: str, plan_key: str) -> None:
    manifest_path(folder, plan_key).unlink(missing_ok=True)
    Path(folder, BUNDLES_DIR, f"{plan_key}{HEADER_SUFFIX}").unlink(missing_ok=True)
