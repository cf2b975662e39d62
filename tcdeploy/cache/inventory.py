"""Inventory and garbage collection of a cache folder. Does not import torch.

The unit is a plan: its manifest lists its files, and a file is deleted when no remaining manifest lists it. Plans with
a live lease or an imported bundle are kept regardless of age and size. Unlisted files are leftovers of killed starts or
of variants that lost a trial; they are deleted after 24 hours if no process holds a lease on any plan of the folder. No
file is deleted while a plan without a manifest is leased, because that start may already use the files of another plan.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tcdeploy.cache.contents import FileRecord, list_cache_files
from tcdeploy.cache.folder import BUNDLES_DIR, HEADER_SUFFIX
from tcdeploy.cache.leases import LEASES_DIR, folder_lock, is_leased
from tcdeploy.cache.manifest import MANIFESTS_DIR, Manifest, manifest_path, read_manifests

LEFTOVER_AGE_SECONDS = 24 * 3600.0  # a younger file may belong to a start in progress
KIND_BY_FOLDER = {
    "fxgraph": "Inductor's graphs", "aotautograd": "AOTAutograd's graphs", "triton": "Triton's kernels",
    "toolchain": "toolchain",
}  # fmt: skip
KIND_BY_SUFFIX = {
    ".so": "compiled C++", ".cpp": "C++ sources", ".py": "generated Python", ".best_config": "autotune winners",
}  # fmt: skip


@dataclass(frozen=True)
class CachedPlan:
    """A plan of the folder. `age_seconds`: since its last start. `unique_bytes`: of files that no other plan lists."""

    plan_key: str
    model: str
    dtype: str
    mode: str
    buckets: tuple[str, ...]
    files: int
    bytes: int
    unique_bytes: int
    age_seconds: float
    is_leased: bool
    is_from_bundle: bool
    was_warm: bool
    cold_seconds: float


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
    plans_per_file = Counter(file.path for manifest in manifests.values() for file in manifest.files)
    entries = [_cached_plan(folder, manifest, plans_per_file) for manifest in manifests.values()]
    return sorted(entries, key=lambda entry: entry.age_seconds)


def _cached_plan(folder: Path, manifest: Manifest, plans_per_file: Counter[str]) -> CachedPlan:
    plan, key = manifest.plan, str(manifest.plan["key"])
    return CachedPlan(
        plan_key=key,
        model=plan["model"],
        dtype=plan["compute_dtype"],
        mode=plan["mode"],
        buckets=tuple(record.bucket for record in manifest.buckets),
        files=len(manifest.files),
        bytes=sum(file.bytes for file in manifest.files),
        unique_bytes=sum(file.bytes for file in manifest.files if plans_per_file[file.path] == 1),
        age_seconds=time.time() - (folder / MANIFESTS_DIR / f"{key}.json").stat().st_mtime,
        is_leased=is_leased(folder, key),
        is_from_bundle=(folder / BUNDLES_DIR / f"{key}{HEADER_SUFFIX}").exists(),
        was_warm=manifest.was_warm,
        cold_seconds=sum(manifest.cold_seconds().values()),
    )


def usage_by_kind(folder: Path) -> dict[str, tuple[int, int]]:
    """(files, bytes) per kind of content, largest first. Unlisted files form a kind of their own."""
    listed = {file.path for manifest in read_manifests(folder).values() for file in manifest.files}
    usage: dict[str, tuple[int, int]] = {}
    for path in list_cache_files(folder):
        kind = kind_of(path) if path in listed else "listed by no plan"
        files, size = usage.get(kind, (0, 0))
        with contextlib.suppress(FileNotFoundError):
            usage[kind] = (files + 1, size + (folder / path).stat().st_size)
    return dict(sorted(usage.items(), key=lambda item: -item[1][1]))


def kind_of(path: str) -> str:
    """The kind of a cache file, from its folder and suffix."""
    return KIND_BY_FOLDER.get(path.partition("/")[0]) or KIND_BY_SUFFIX.get(Path(path).suffix, "other")


def collect_garbage(
    folder: Path, older_than_seconds: float | None, max_bytes: int | None, is_dry_run: bool = False
) -> GcResult:
    """Remove plans by age, then the least recently used until the rest fits into `max_bytes`, then leftovers.

    Raises IntegrityError for a damaged manifest and TcdeployError if the folder cannot be locked.
    """
    with folder_lock(folder):
        entries = list_plans(folder)
        matched = _too_old(entries, older_than_seconds) | _over_size_limit(folder, entries, max_bytes)
        matching = [entry for entry in entries if entry.plan_key in matched]
        retained = tuple((entry.plan_key, reason) for entry in matching if (reason := _retention_reason(entry)))
        removed_keys = tuple(entry.plan_key for entry in matching if not _retention_reason(entry))
        files: list[str] = []
        if not _has_unfinished_start(folder):
            files = _removable_files(folder, set(removed_keys), not _has_live_lease(folder))
        size = sum((folder / path).stat().st_size for path in files)
        if not is_dry_run:
            _remove(folder, removed_keys, files)
    return GcResult(removed_keys, len(files), size, retained)


def _has_live_lease(folder: Path) -> bool:
    """Whether any plan is leased, with or without a manifest."""
    return any(is_leased(folder, lease.name) for lease in (folder / LEASES_DIR).glob("*"))


def _has_unfinished_start(folder: Path) -> bool:
    """Whether a plan without a manifest is leased: its start may have loaded files that only a removed plan lists."""
    leases = [lease.name for lease in (folder / LEASES_DIR).glob("*") if not manifest_path(folder, lease.name).exists()]
    return any(is_leased(folder, name) for name in leases)


def _retention_reason(entry: CachedPlan) -> str:
    """Why the plan must stay; empty if it may be removed."""
    return (
        "it is in use by a running process"
        if entry.is_leased
        else "it was imported from a bundle"
        if entry.is_from_bundle
        else ""
    )


def _too_old(entries: list[CachedPlan], seconds: float | None) -> set[str]:
    return {entry.plan_key for entry in entries if seconds is not None and entry.age_seconds > seconds}


def _over_size_limit(folder: Path, entries: list[CachedPlan], max_bytes: int | None) -> set[str]:
    """The plans, least recently used, that do not fit into `max_bytes`.

    Plans that must stay are counted first. A file of several plans is counted once.
    """
    if max_bytes is None:
        return set()
    manifests, counted, excess = read_manifests(folder), set[FileRecord](), set[str]()
    for entry in sorted(entries, key=lambda entry: not _retention_reason(entry)):  # stable: the most recent stay first
        counted |= set(manifests[entry.plan_key].files)
        if not _retention_reason(entry) and sum(file.bytes for file in counted) > max_bytes:
            excess.add(entry.plan_key)
    return excess


def _removable_files(folder: Path, removed_keys: set[str], is_idle: bool) -> list[str]:
    """Files that only `removed_keys` list, and in an idle folder also old files that no manifest lists."""
    manifests = read_manifests(folder)
    listed = {file.path for key, manifest in manifests.items() if key not in removed_keys for file in manifest.files}
    freed = {file.path for key in removed_keys for file in manifests[key].files} - listed
    paths = list_cache_files(folder)
    leftovers = {path for path in paths if path not in listed | freed and is_idle and _is_old(folder / path)}
    return [path for path in paths if path in freed | leftovers]


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > LEFTOVER_AGE_SECONDS


def _remove(folder: Path, removed_keys: tuple[str, ...], files: list[str]) -> None:
    """Manifests first: if this is interrupted, the remaining files are leftovers of no plan."""
    for key in removed_keys:
        (folder / MANIFESTS_DIR / f"{key}.json").unlink(missing_ok=True)
    for path in files:
        (folder / path).unlink(missing_ok=True)
    for parent in sorted({(folder / path).parent for path in files}, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):  # not empty
            parent.rmdir()
