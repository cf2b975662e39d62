"""Inventory and garbage collection of a cache folder. Does not import torch.

The unit is a plan: its manifest lists its files, and a file is deleted when no remaining manifest lists it. Plans with
a live lease or an imported bundle are kept regardless of age and size. No start uses a file that no manifest lists: a
killed process left it, or it belongs to another program that uses the folder. It is deleted after 24 hours, because
such a program, for example torch itself, holds no lock of this package while it needs the file. A plan of another
version of tcdeploy, from a bundle or not, is deleted 24 hours after its last start. Precompiled headers are
always deleted; the next start that compiles on a CPU makes new headers in about 10 s. Staging folders and temporary
files of killed processes are always deleted, since a living process holds a lock while it has one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tcdeploy.cache.files.records import FileRecord, is_cache_file, list_cache_files, stored_path
from tcdeploy.cache.folder.layout import (
    CONFLICTS_DIR,
    HEADERS_DIR,
    MANIFESTS_DIR,
    TEST_FILE_PREFIX,
    UNPACKING_PREFIX,
    manifest_path,
    plan_keys,
    stored_header_path,
)
from tcdeploy.cache.folder.leases import folder_lock, is_leased
from tcdeploy.cache.record.manifest import Manifest, read_manifests, read_other_versions
from tcdeploy.cache.record.unlisted import remove_manifest
from tcdeploy.cache.staging.journal import (
    FinishedBucket,
    abandoned_folders,
    read_journal,
    remove_abandoned_folders,
    unlocked_folders,
)
from tcdeploy.planning.environment import STAGING_PREFIX

LEFTOVER_AGE_SECONDS = 24 * 3600.0
UNLISTED, OTHER_VERSIONS = "listed by no plan", "plans of other versions of tcdeploy"
# Created, renamed and removed under the folder's lock, when a start publishes its files and writes its manifest.
TEMPORARY_FILE = re.compile(r"\.[0-9a-f]{16}(-[0-9]+-[0-9]+)?\.tmp")  # with numbers: of version 0.2
KIND_BY_FOLDER = {
    "fxgraph": "Inductor's graphs", "aotautograd": "AOTAutograd's graphs", "triton": "Triton's kernels",
    "aot": "ahead-of-time packages", "cache": "max-autotune timings", "references": "logits of the reference",
}  # fmt: skip
KIND_BY_SUFFIX = {
    ".so": "compiled C++", ".cpp": "C++ sources", ".py": "generated Python", ".best_config": "autotune winners",
}  # fmt: skip


@dataclass(frozen=True)
class CachedPlan:
    """A plan of the folder. `age_seconds`: since its last start. `unique_bytes`: of files that no other plan lists."""

    plan_key: str
    model: str
    compute_dtype: str
    programs: str  # jit or aot
    mode: str
    buckets: tuple[str, ...]
    files: int
    bytes: int
    unique_bytes: int
    age_seconds: float
    is_leased: bool
    is_from_bundle: bool
    was_warm: bool
    is_built_without_gpu: bool
    has_run: bool  # False: built without its GPU, and not started there yet
    cold_seconds: float


@dataclass(frozen=True)
class UnfinishedPlan:
    """Finished work of failed or killed starts of a plan or were killed. Its next start reuses it."""

    plan_key: str
    finished: int  # buckets, or ahead-of-time packages
    files: int
    bytes: int


@dataclass(frozen=True)
class GcResult:
    """What `collect_garbage` removed, or would remove in a dry run."""

    plan_keys: tuple[str, ...]
    files: int
    bytes: int
    retained: tuple[tuple[str, str], ...]  # (plan key, reason) of plans that matched and were kept


def list_plans(folder: Path) -> list[CachedPlan]:
    """The folder's plans, most recently used first. Raises IntegrityError for a damaged manifest."""
    manifests = read_manifests(folder)
    plans_per_file = Counter(file for manifest in manifests.values() for file in manifest.files)
    entries = [_cached_plan(folder, manifest, plans_per_file) for manifest in manifests.values()]
    return sorted(entries, key=lambda entry: entry.age_seconds)


def list_unfinished(folder: Path) -> list[UnfinishedPlan]:
    """The plans without a manifest for which an ended start left finished buckets, by plan key."""
    complete, finished = plan_keys(folder), dict[str, list[FinishedBucket]]()
    for staging_folder in unlocked_folders(folder):
        for bucket in read_journal(staging_folder):
            if bucket.plan not in complete:
                finished.setdefault(bucket.plan, []).append(bucket)
    files = {key: {file for bucket in buckets for file in bucket.files} for key, buckets in finished.items()}
    return [
        UnfinishedPlan(key, len(finished[key]), len(files[key]), sum(file.bytes for file in files[key]))
        for key in sorted(finished)
    ]


def _cached_plan(folder: Path, manifest: Manifest, plans_per_file: Counter[FileRecord]) -> CachedPlan:
    plan, key = manifest.plan, str(manifest.plan["key"])
    return CachedPlan(
        plan_key=key, model=plan["model"], compute_dtype=plan["compute_dtype"],
        programs=plan.get("programs", "jit"), mode=plan["mode"],
        buckets=tuple(record.bucket for record in manifest.buckets), files=len(manifest.files),
        bytes=sum(file.bytes for file in manifest.files),
        unique_bytes=sum(file.bytes for file in manifest.files if plans_per_file[file] == 1),
        age_seconds=time.time() - manifest_path(folder, key).stat().st_mtime, is_leased=is_leased(folder, key),
        is_from_bundle=stored_header_path(folder, key).exists(), was_warm=manifest.was_warm,
        is_built_without_gpu=manifest.blind is not None, has_run=manifest.has_run,
        cold_seconds=sum(manifest.cold_seconds().values()),
    )  # fmt: skip


def usage_by_kind(folder: Path) -> dict[str, tuple[int, int]]:
    """(files, bytes) per kind of content, largest first. Unlisted files form a kind of their own."""
    manifests, others = read_manifests(folder).values(), read_other_versions(folder).values()
    kinds = {stored_path(folder, file): OTHER_VERSIONS for files in others for file in files}
    kinds |= {stored_path(folder, file): kind_of(file.path) for manifest in manifests for file in manifest.files}
    temporary_files = _temporary_files(folder)
    cache_files = set(list_cache_files(folder)).difference(temporary_files)
    found = [(kinds.get(path, UNLISTED), folder / path) for path in cache_files]
    found += [("temporary files", folder / path) for path in temporary_files]
    found += [("precompiled headers", path) for path in folder.glob(f"{HEADERS_DIR}/*")]
    for prefix, user in ((STAGING_PREFIX, "starts"), (UNPACKING_PREFIX, "unpacks")):
        staged = (path for staging in folder.glob(f"{prefix}*") for path in _files_below(staging))
        # The precompiled headers in it are hard links to those above.
        found += [(f"staging folders of {user}", path) for path in staged if path.parent.name != HEADERS_DIR]
    usage: dict[str, tuple[int, int]] = {}
    for kind, path in found:
        with contextlib.suppress(FileNotFoundError):
            status, (files, size) = path.lstat(), usage.get(kind, (0, 0))
            if stat.S_ISREG(status.st_mode):
                usage[kind] = (files + 1, size + status.st_size)
    return dict(sorted(usage.items(), key=lambda item: -item[1][1]))


def kind_of(path: str) -> str:
    """The kind of a cache file, from its folder and suffix."""
    return KIND_BY_FOLDER.get(path.partition("/")[0]) or KIND_BY_SUFFIX.get(Path(path).suffix, "other")


def collect_garbage(
    folder: Path,
    older_than_seconds: float | None,
    max_bytes: int | None,
    is_dry_run: bool = False,
    all_unlisted: bool = False,
) -> GcResult:
    """Remove plans by age, then the least recently used until the rest fits into `max_bytes`, then leftovers.

    `all_unlisted` removes files that no plan lists, and plans of other versions of tcdeploy, at any age, not only after
    LEFTOVER_AGE_SECONDS. Raises IntegrityError for a damaged manifest and TcdeployError if the folder cannot be locked.
    """
    with folder_lock(folder):
        entries = list_plans(folder)
        max_age = float("inf") if older_than_seconds is None else older_than_seconds
        excess = _over_size_limit(folder, entries, max_bytes)
        matching = [entry for entry in entries if entry.age_seconds > max_age or entry.plan_key in excess]
        retained = tuple((entry.plan_key, reason) for entry in matching if (reason := _retention_reason(entry)))
        removed_keys = tuple(entry.plan_key for entry in matching if not _retention_reason(entry))
        for key in read_other_versions(folder):  # a start of such a version sets its manifest's time
            if not is_leased(folder, key) and (all_unlisted or _is_old(manifest_path(folder, key))):
                removed_keys += (key,)
        files = _removable_files(folder, set(removed_keys), all_unlisted)
        size = sum((folder / path).lstat().st_size for path in files)
        if not is_dry_run:
            _remove(folder, removed_keys, files)
    return GcResult(removed_keys, len(files), size, retained)


def _retention_reason(entry: CachedPlan) -> str:
    """Why the plan must stay; empty if it may be removed."""
    if entry.is_leased:
        return "it is in use by a running process"
    return "it was imported from a bundle" if entry.is_from_bundle else ""


def _over_size_limit(folder: Path, entries: list[CachedPlan], max_bytes: int | None) -> set[str]:
    """The plans, least recently used, that do not fit beside those that must stay. A shared file is counted once."""
    if max_bytes is None:
        return set()
    manifests, counted, excess = read_manifests(folder), set[FileRecord](), set[str]()
    for entry in sorted(entries, key=lambda entry: not _retention_reason(entry)):  # stable: the most recent stay first
        counted |= set(manifests[entry.plan_key].files)
        if not _retention_reason(entry) and sum(file.bytes for file in counted) > max_bytes:
            excess.add(entry.plan_key)
    return excess


def _removable_files(folder: Path, removed_keys: set[str], all_unlisted: bool) -> list[str]:
    """The files to delete, relative to the folder. The caller holds the folder's lock.

    Files that only the plans in `removed_keys` list, old files that no plan lists, precompiled headers, and the staging
    folders and temporary files of killed processes.
    """
    files = {key: manifest.files for key, manifest in read_manifests(folder).items()} | read_other_versions(folder)
    listed = {stored_path(folder, file) for key in files.keys() - removed_keys for file in files[key]}
    freed = {stored_path(folder, file) for key in removed_keys for file in files[key]} - listed
    unlisted = set(list_cache_files(folder)) - listed
    paths = {path for path in unlisted if path in freed or all_unlisted or _is_old(folder / path)}
    links = [path for path in folder.glob(f"{STAGING_PREFIX}*") if path.is_symlink()]
    unpacking = folder.glob(f"{UNPACKING_PREFIX}*")
    for extra_folder in (folder / HEADERS_DIR, *abandoned_folders(folder), *links, *unpacking):
        paths |= {path.relative_to(folder).as_posix() for path in _files_below(extra_folder)}
    return sorted(paths | set(_temporary_files(folder)))


def _files_below(folder: Path) -> list[Path]:
    """All files and symbolic links below `folder`, or `folder` itself if it is one. Follows no links."""
    if folder.is_symlink() or folder.is_file():
        return [folder]
    paths = (Path(parent, name) for parent, folders, names in os.walk(folder) for name in (*folders, *names))
    return [path for path in paths if path.is_symlink() or not path.is_dir()]


def _temporary_files(folder: Path) -> list[str]:
    """Temporary and test files, sorted. If the caller holds the folder's lock, their processes were killed."""
    paths = (Path(parent, name).relative_to(folder) for parent, _, names in os.walk(folder) for name in names)
    return sorted(path.as_posix() for path in paths if _is_temporary(path))


def _is_temporary(path: Path) -> bool:
    if TEMPORARY_FILE.fullmatch(path.name):
        return path.parent.as_posix() in (CONFLICTS_DIR, MANIFESTS_DIR) or is_cache_file((path.parent / "f").as_posix())
    return len(path.parts) == 1 and path.name.startswith(TEST_FILE_PREFIX)


def _is_old(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime > LEFTOVER_AGE_SECONDS


def _remove(folder: Path, removed_keys: tuple[str, ...], files: list[str]) -> None:
    """Manifests first: if this is interrupted, the remaining files are leftovers of no plan."""
    for key in removed_keys:
        remove_manifest(folder, key)
    for path in files:
        (folder / path).unlink(missing_ok=True)
    parents = {(folder / path).parent for path in files} - {folder, folder / MANIFESTS_DIR}
    for parent in sorted(parents, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):  # not empty
            parent.rmdir()
    remove_abandoned_folders(abandoned_folders(folder))
    for unpacking in folder.glob(f"{UNPACKING_PREFIX}*"):  # what is left of it: empty folders
        shutil.rmtree(unpacking, ignore_errors=True)
