"""Checks a cache folder against its manifests before anything is loaded, and discards what is damaged.

torch loads compiled libraries and unpickles graphs without checking them. Each start therefore compares every file of
its plan with the size and sha256 in the manifest. It also removes unlisted files that torch would unpickle beside the
listed ones: torch reads all entries in the folder of a key until one matches. Does not import torch.
"""

from __future__ import annotations

from pathlib import Path

from tcdeploy.cache.contents import DamagedFile, find_damage, list_cache_files
from tcdeploy.cache.folder import BUNDLES_DIR, HEADER_SUFFIX
from tcdeploy.cache.leases import folder_lock
from tcdeploy.cache.manifest import MANIFESTS_DIR, Manifest, manifest_path, read_manifest, read_manifests
from tcdeploy.errors import IntegrityError

KEYED_DIRS = ("fxgraph/", "aotautograd/")  # torch keeps one folder per key there, with one entry per set of guards


def verify_and_clean(folder: str, plan_key: str, rebuild: bool, display_path: str | None = None) -> Manifest | None:
    """Check the files of a plan, delete unlisted ones, and return the plan's manifest; None if there is no manifest.

    Every file that the manifest lists is checked, and `unlisted_files` of its key folders are deleted. Without a
    manifest of this plan the files of all other plans are checked, since plans share programs. For damage it raises
    IntegrityError with the first file; with `rebuild` it discards the plan and returns None instead. `display_path`
    replaces `folder` in the error if that is a private copy.
    """
    try:
        manifest = read_manifest(manifest_path(folder, plan_key))
        manifests = [manifest] if manifest else read_manifests(folder).values()
        files = {file.path: file for listing in manifests for file in listing.files}
        damage = find_damage(folder, files.values())
    except IntegrityError:
        if not rebuild:
            raise
        discard_plan(folder, plan_key)
        return None
    if damage and not rebuild:
        raise _damage_error(Path(display_path or folder), damage)
    if damage:
        discard_plan(folder, plan_key)
        return None
    if manifest:
        _remove_unlisted_files(folder, manifest)
    return manifest


def _damage_error(folder: Path, damage: list[DamagedFile]) -> IntegrityError:
    more = f", and {len(damage) - 1} more files are damaged" if len(damage) > 1 else ""
    return IntegrityError(
        f"the cache is damaged: {folder / damage[0].path} {damage[0].reason}{more}",
        "nothing was loaded; to discard the plan and compile again: --on-bad-cache rebuild",
    )


def unlisted_files(folder: str | Path, manifest: Manifest) -> set[Path]:
    """Files in the key folders of this plan that no manifest of the cache folder lists.

    Names that begin with a dot are skipped, as torch does: another process is still writing those files.
    """
    entries = {Path(folder, file.path) for file in manifest.files if file.path.startswith(KEYED_DIRS)}
    neighbours = {path for parent in {entry.parent for entry in entries} for path in parent.iterdir()} - entries
    if not neighbours:
        return set()
    manifests = read_manifests(folder, skip_damaged=True).values()
    listed = {Path(folder, file.path) for listing in manifests for file in listing.files}
    unlisted = (path for path in neighbours - listed if not path.name.startswith("."))
    return {path for path in unlisted if path.is_file() or path.is_symlink()}


def _remove_unlisted_files(folder: str, manifest: Manifest) -> None:
    """Delete what `unlisted_files` returns.

    This is safe for the files of two concurrent cold starts: the programs in them are duplicates.
    """
    if unlisted_files(folder, manifest):
        with folder_lock(folder):  # unpacking moves files into place before it writes their manifest
            for path in unlisted_files(folder, manifest):
                path.unlink(missing_ok=True)


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
        valid = {file.path for file in listed} - {damage.path for damage in find_damage(folder, listed)}
        for name in list_cache_files(folder):
            if name not in valid:
                Path(folder, name).unlink(missing_ok=True)


def _remove_manifest(folder: str, plan_key: str) -> None:
    manifest_path(folder, plan_key).unlink(missing_ok=True)
    Path(folder, BUNDLES_DIR, f"{plan_key}{HEADER_SUFFIX}").unlink(missing_ok=True)
