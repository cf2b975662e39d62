"""What is in a cache folder, how much of it, and what may go.

A plan is the unit: its manifest names its files, and a file goes when no manifest that stays names it. A plan stays
while a process runs from it (its lease) or a bundle put it there, whatever its age. What no manifest names is left over
from starts that were killed or from candidates that lost; it goes when it is old and nobody runs from the folder, for
it may also be a start that is under way. No torch here.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tcdeploy.cache.contents import FileRecord
from tcdeploy.cache.folder import BUNDLES_DIR, HEADER_SUFFIX, LEASES_DIR, folder_lock, is_leased, list_cache_files
from tcdeploy.cache.manifest import MANIFESTS_DIR, Manifest, manifest_path, read_manifests

LEFTOVER_AGE_SECONDS = 24 * 3600.0  # younger, it may belong to a start that is under way
KIND_BY_FOLDER = {
    "fxgraph": "Inductor's graphs", "aotautograd": "AOTAutograd's graphs", "triton": "Triton's kernels",
    "toolchain": "toolchain",
}  # fmt: skip
KIND_BY_SUFFIX = {
    ".so": "compiled C++", ".cpp": "C++ sources", ".py": "generated Python", ".best_config": "autotune winners",
}  # fmt: skip


@dataclass(frozen=True)
class CachedPlan:
    """One plan of the folder. `age_seconds` since its last start; `unique_bytes` of files that no other plan names."""

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
    """What `collect_garbage` removed, or would have."""

    plan_keys: tuple[str, ...]
    files: int
    bytes: int
    retained: tuple[tuple[str, str], ...]  # plans that were to go and stay: (key, why)


def list_plans(folder: Path) -> list[CachedPlan]:
    """The folder's plans, those used last first. Raises IntegrityError for a manifest that is damaged."""
    manifests = read_manifests(folder)
    count = Counter(file.path for manifest in manifests.values() for file in manifest.files)
    entries = [_cached_plan(folder, manifest, count) for manifest in manifests.values()]
    return sorted(entries, key=lambda entry: entry.age_seconds)


def _cached_plan(folder: Path, manifest: Manifest, count: Counter[str]) -> CachedPlan:
    plan, key = manifest.plan, str(manifest.plan["key"])
    return CachedPlan(
        plan_key=key,
        model=plan["model"],
        dtype=plan["compute_dtype"],
        mode=plan["mode"],
        buckets=tuple(record.bucket for record in manifest.buckets),
        files=len(manifest.files),
        bytes=sum(file.bytes for file in manifest.files),
        unique_bytes=sum(file.bytes for file in manifest.files if count[file.path] == 1),
        age_seconds=time.time() - (folder / MANIFESTS_DIR / f"{key}.json").stat().st_mtime,
        is_leased=is_leased(folder, key),
        is_from_bundle=(folder / BUNDLES_DIR / f"{key}{HEADER_SUFFIX}").exists(),
        was_warm=manifest.was_warm,
        cold_seconds=sum(manifest.cold_seconds().values()),
    )


def usage_by_kind(folder: Path) -> dict[str, tuple[int, int]]:
    """Per kind of content, (files, bytes); what no plan names is a kind of its own."""
    named = {file.path for manifest in read_manifests(folder).values() for file in manifest.files}
    found: dict[str, tuple[int, int]] = {}
    for path in list_cache_files(folder):
        kind = kind_of(path) if path in named else "named by no plan"
        files, size = found.get(kind, (0, 0))
        with contextlib.suppress(FileNotFoundError):
            found[kind] = (files + 1, size + (folder / path).stat().st_size)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def kind_of(path: str) -> str:
    """What a file of the folder is, by its place and suffix."""
    return KIND_BY_FOLDER.get(path.partition("/")[0]) or KIND_BY_SUFFIX.get(Path(path).suffix, "other")


def collect_garbage(
    folder: Path, older_than_seconds: float | None, max_bytes: int | None, is_dry_run: bool = False
) -> GcResult:
    """Remove plans by age, then the least recently used until the rest fits `max_bytes`; then what is left over."""
    with folder_lock(folder):
        entries = list_plans(folder)
        wanted = _too_old(entries, older_than_seconds) | _over_size_limit(folder, entries, max_bytes)
        retained = tuple(
            (one.plan_key, _retention_reason(one))
            for one in entries
            if one.plan_key in wanted and _retention_reason(one)
        )
        removed_keys = tuple(
            key for key in (one.plan_key for one in entries) if key in wanted - {key for key, _ in retained}
        )
        files = (
            []
            if _has_unfinished_start(folder)
            else _removable_files(folder, set(removed_keys), not _has_live_lease(folder))
        )
        size = sum((folder / path).stat().st_size for path in files)
        if not is_dry_run:
            _remove(folder, removed_keys, files)
    return GcResult(removed_keys, len(files), size, retained)


def _has_live_lease(folder: Path) -> bool:
    """Also a plan that has no manifest yet."""
    return any(is_leased(folder, lease.name) for lease in (folder / LEASES_DIR).glob("*"))


def _has_unfinished_start(folder: Path) -> bool:
    """A start that is under way may have found what a plan that goes left, and nothing says so yet: no file goes."""
    leases = [lease.name for lease in (folder / LEASES_DIR).glob("*") if not manifest_path(folder, lease.name).exists()]
    return any(is_leased(folder, name) for name in leases)


def _retention_reason(entry: CachedPlan) -> str:
    return "a process runs from it" if entry.is_leased else "a bundle put it there" if entry.is_from_bundle else ""


def _too_old(entries: list[CachedPlan], seconds: float | None) -> set[str]:
    return {entry.plan_key for entry in entries if seconds is not None and entry.age_seconds > seconds}


def _over_size_limit(folder: Path, entries: list[CachedPlan], max_bytes: int | None) -> set[str]:
    """From the last used on, what no longer fits; what must stay counts first, and a file of several plans once."""
    if max_bytes is None:
        return set()
    manifests, counted, found = read_manifests(folder), set[FileRecord](), set[str]()
    for entry in sorted(entries, key=lambda entry: not _retention_reason(entry)):
        counted |= set(manifests[entry.plan_key].files)
        if not _retention_reason(entry) and sum(file.bytes for file in counted) > max_bytes:
            found.add(entry.plan_key)
    return found


def _removable_files(folder: Path, removed_keys: set[str], is_idle: bool) -> list[str]:
    """Files that no manifest names once those of `removed_keys` are; leftovers only when they are old and nobody runs."""
    manifests = read_manifests(folder)
    named = {file.path for key, manifest in manifests.items() if key not in removed_keys for file in manifest.files}
    freed = {file.path for key in removed_keys for file in manifests[key].files} - named
    everything = list_cache_files(folder)
    old = {path for path in everything if path not in named | freed and is_idle and _is_old(folder / path)}
    return [path for path in everything if path in freed | old]


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > LEFTOVER_AGE_SECONDS


def _remove(folder: Path, removed_keys: tuple[str, ...], files: list[str]) -> None:
    """Manifests first: what they named is then as if it had never been finished."""
    for key in removed_keys:
        (folder / MANIFESTS_DIR / f"{key}.json").unlink(missing_ok=True)
    for path in files:
        (folder / path).unlink(missing_ok=True)
    for parent in sorted({(folder / path).parent for path in files}, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):  # not empty
            parent.rmdir()
