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

from tcdeploy.cache.folder import BUNDLES_DIR, HEADER_SUFFIX, LEASES_DIR, list_cache_files, is_leased, folder_lock
from tcdeploy.cache.contents import FileRecord
from tcdeploy.cache.manifest import MANIFESTS_DIR, Manifest, manifest_path, read_manifests

LEFTOVER_SECONDS = 24 * 3600.0  # younger, it may belong to a start that is under way
KINDS = {
    "fxgraph": "Inductor's graphs", "aotautograd": "AOTAutograd's graphs", "triton": "Triton's kernels",
    "toolchain": "toolchain",
}  # fmt: skip
SUFFIXES = {
    ".so": "compiled C++", ".cpp": "C++ sources", ".py": "generated Python", ".best_config": "autotune winners",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One plan of the folder. `age_seconds` since its last start; `own_bytes` of files that no other plan names."""

    plan_key: str
    model: str
    dtype: str
    mode: str
    buckets: tuple[str, ...]
    files: int
    bytes: int
    own_bytes: int
    age_seconds: float
    is_leased: bool
    is_from_bundle: bool
    was_warm: bool
    cold_seconds: float


@dataclass(frozen=True)
class Removed:
    """What `collect` removed, or would have."""

    plan_keys: tuple[str, ...]
    files: int
    bytes: int
    kept: tuple[tuple[str, str], ...]  # plans that were to go and stay: (key, why)


def list_plans(folder: Path) -> list[Entry]:
    """The folder's plans, those used last first. Raises IntegrityError for a manifest that is damaged."""
    manifests = read_manifests(folder)
    count = Counter(file.path for manifest in manifests.values() for file in manifest.files)
    entries = [_entry(folder, manifest, count) for manifest in manifests.values()]
    return sorted(entries, key=lambda entry: entry.age_seconds)


def _entry(folder: Path, manifest: Manifest, count: Counter[str]) -> Entry:
    plan, key = manifest.plan, str(manifest.plan["key"])
    return Entry(
        plan_key=key,
        model=plan["model"],
        dtype=plan["dtype"],
        mode=plan["mode"],
        buckets=tuple(record.bucket for record in manifest.buckets),
        files=len(manifest.files),
        bytes=sum(file.bytes for file in manifest.files),
        own_bytes=sum(file.bytes for file in manifest.files if count[file.path] == 1),
        age_seconds=time.time() - (folder / MANIFESTS_DIR / f"{key}.json").stat().st_mtime,
        is_leased=is_leased(folder, key),
        is_from_bundle=(folder / BUNDLES_DIR / f"{key}{HEADER_SUFFIX}").exists(),
        was_warm=manifest.was_warm,
        cold_seconds=sum(manifest.cold_seconds().values()),
    )


def usage(folder: Path) -> dict[str, tuple[int, int]]:
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
    return KINDS.get(path.partition("/")[0]) or SUFFIXES.get(Path(path).suffix, "other")


def collect(
    folder: Path, older_than_seconds: float | None, most_bytes: int | None, is_dry_run: bool = False
) -> Removed:
    """Remove plans by age, then the least recently used until the rest fits `most_bytes`; then what is left over."""
    with folder_lock(folder):
        entries = list_plans(folder)
        wanted = _too_old(entries, older_than_seconds) | _too_many(folder, entries, most_bytes)
        kept = tuple((one.plan_key, _reason(one)) for one in entries if one.plan_key in wanted and _reason(one))
        gone = tuple(key for key in (one.plan_key for one in entries) if key in wanted - {key for key, _ in kept})
        files = [] if _warms_anything(folder) else _unnamed_without(folder, set(gone), not _runs_anything(folder))
        size = sum((folder / path).stat().st_size for path in files)
        if not is_dry_run:
            _remove(folder, gone, files)
    return Removed(gone, len(files), size, kept)


def _runs_anything(folder: Path) -> bool:
    """Also a plan that has no manifest yet."""
    return any(is_leased(folder, lease.name) for lease in (folder / LEASES_DIR).glob("*"))


def _warms_anything(folder: Path) -> bool:
    """A start that is under way may have found what a plan that goes left, and nothing says so yet: no file goes."""
    leases = [lease.name for lease in (folder / LEASES_DIR).glob("*") if not manifest_path(folder, lease.name).exists()]
    return any(is_leased(folder, name) for name in leases)


def _reason(entry: Entry) -> str:
    return "a process runs from it" if entry.is_leased else "a bundle put it there" if entry.is_from_bundle else ""


def _too_old(entries: list[Entry], seconds: float | None) -> set[str]:
    return {entry.plan_key for entry in entries if seconds is not None and entry.age_seconds > seconds}


def _too_many(folder: Path, entries: list[Entry], most_bytes: int | None) -> set[str]:
    """From the last used on, what no longer fits; what must stay counts first, and a file of several plans once."""
    if most_bytes is None:
        return set()
    manifests, counted, found = read_manifests(folder), set[FileRecord](), set[str]()
    for entry in sorted(entries, key=lambda entry: not _reason(entry)):
        counted |= set(manifests[entry.plan_key].files)
        if not _reason(entry) and sum(file.bytes for file in counted) > most_bytes:
            found.add(entry.plan_key)
    return found


def _unnamed_without(folder: Path, gone: set[str], nobody_runs: bool) -> list[str]:
    """Files that no manifest names once those of `gone` are; leftovers only when they are old and nobody runs."""
    manifests = read_manifests(folder)
    named = {file.path for key, manifest in manifests.items() if key not in gone for file in manifest.files}
    freed = {file.path for key in gone for file in manifests[key].files} - named
    everything = list_cache_files(folder)
    old = {path for path in everything if path not in named | freed and nobody_runs and _is_old(folder / path)}
    return [path for path in everything if path in freed | old]


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > LEFTOVER_SECONDS


def _remove(folder: Path, gone: tuple[str, ...], files: list[str]) -> None:
    """Manifests first: what they named is then as if it had never been finished."""
    for key in gone:
        (folder / MANIFESTS_DIR / f"{key}.json").unlink(missing_ok=True)
    for path in files:
        (folder / path).unlink(missing_ok=True)
    for parent in sorted({(folder / path).parent for path in files}, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):  # not empty
            parent.rmdir()
