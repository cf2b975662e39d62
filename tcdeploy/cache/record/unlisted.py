"""Files that no plan lists, and the removal of damaged plans. Does not import torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tcdeploy.cache.files.records import find_damage, intact_files, is_plain_record, list_cache_files, stored_path
from tcdeploy.cache.folder.layout import MANIFESTS_DIR, manifest_path, stored_header_path
from tcdeploy.cache.folder.leases import folder_lock
from tcdeploy.cache.record.manifest import read_manifest, read_manifests, read_other_versions
from tcdeploy.cache.record.provenance import check_manifest, read_stored_bundle
from tcdeploy.cache.trust.signing import default_trusted_keys_folder
from tcdeploy.errors import IntegrityError, TrustError


def listed_paths(folder: str | Path) -> set[str]:
    """Where the folder stores the files that manifests list, those of other versions of tcdeploy included."""
    listed = [manifest.files for manifest in read_manifests(folder, skip_damaged=True).values()]
    return {stored_path(folder, file) for files in (*listed, *read_other_versions(folder).values()) for file in files}


def unlisted_files(folder: str | Path) -> list[str]:
    """The cache files that no manifest lists, relative to the folder. No start uses them."""
    listed = listed_paths(folder)
    return [path for path in list_cache_files(folder) if path not in listed]


def stored_paths(folder: str | Path, plan_key: str) -> set[str]:
    """Where the folder stores the files that the plan's manifest lists, relative to the folder."""
    manifest = None
    with contextlib.suppress(IntegrityError):
        manifest = read_manifest(manifest_path(folder, plan_key))
    files = manifest.files if manifest is not None else ()
    return {stored_path(folder, file) for file in files if is_plain_record(file)}


def remove_unlisted(folder: str | Path, paths: set[str]) -> None:
    """Delete those of the paths that no manifest lists. The caller holds the folder's lock."""
    unlisted = paths - listed_paths(folder)
    for path in unlisted & set(list_cache_files(folder)) if unlisted else ():
        Path(folder, path).unlink(missing_ok=True)


def discard_if_damaged(folder: str, plan_key: str, trusted_keys: Path | None = None) -> bool:
    """Discard the plan if it is damaged, and return whether it was.

    It is if its manifest or a file is missing or changed, or does not match the signed header of its bundle.
    """
    trusted_keys = trusted_keys or default_trusted_keys_folder()
    if not is_damaged(folder, plan_key, trusted_keys):
        return False
    with folder_lock(folder):
        if not is_damaged(folder, plan_key, trusted_keys):  # another process has replaced it meanwhile
            return False
        discard_plan(folder, plan_key)
    return True


def is_damaged(folder: str, plan_key: str, trusted_keys: Path) -> bool:
    """Whether a start would refuse the plan, or discard it with `--on-bad-cache rebuild`."""
    with contextlib.suppress(IntegrityError, TrustError):
        manifest = read_manifest(manifest_path(folder, plan_key))
        if manifest is not None and not find_damage(folder, manifest.files):
            check_manifest(folder, plan_key, manifest, read_stored_bundle(folder, plan_key, trusted_keys))
            return False
    return True


def discard_plan(folder: str, plan_key: str) -> None:
    """Remove the plan's manifest and every cache file, except undamaged files that another plan's manifest lists.

    Manifests of other plans are removed too if they are damaged or have another schema, and the files they list. The
    caller holds the folder's lock.
    """
    remove_manifest(folder, plan_key)
    paths = list(Path(folder, MANIFESTS_DIR).glob("*.json"))  # before reading: a manifest written later must stay
    others = read_manifests(folder, skip_damaged=True)
    for path in paths:
        if path.stem not in others:  # damaged, or of another schema: the files that it lists are removed below
            remove_manifest(folder, path.stem)
    listed = {file for manifest in others.values() for file in manifest.files}
    valid = {stored_path(folder, file) for file in intact_files(folder, listed)}
    for name in list_cache_files(folder):
        if name not in valid:
            Path(folder, name).unlink(missing_ok=True)


def remove_manifest(folder: str | Path, plan_key: str) -> None:
    """Delete the stored header before the manifest, because a header without a manifest is an error."""
    stored_header_path(folder, plan_key).unlink(missing_ok=True)
    manifest_path(folder, plan_key).unlink(missing_ok=True)
