"""What a start records: finished buckets in its journal, the files it used, and the manifest. Does not import torch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from typing import Any

from tcdeploy.cache.files.records import FileRecord, hash_files, is_winner
from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.folder.access import translate_os_errors
from tcdeploy.cache.folder.layout import AUTOTUNE_DIR, REFERENCES_DIR, manifest_path
from tcdeploy.cache.folder.leases import folder_lock
from tcdeploy.cache.record.manifest import Manifest, read_manifest, read_manifests, write_manifest
from tcdeploy.cache.record.provenance import has_bundle_changed
from tcdeploy.cache.record.unlisted import remove_unlisted, stored_paths
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.planning.bucket_record import BucketRecord

IDLE_TIMES = ("prefill_ms", "idle_sizes")  # fields of StepCosts that an idle server measures


def record_finished_bucket(
    staging: StagingFolder, plan_key: str, tracker: FileAccessTracker, is_cold: bool, record: BucketRecord
) -> None:
    """Add a compiled bucket's files to the journal. A later start takes them over if this one does not finish.

    `is_cold`: the plan was not in the cache. Then a bucket whose programs another plan has compiled may use Triton
    kernels that this start has compiled before it.
    """
    if record.outcome == "miss" or (is_cold and record.outcome != "uncached"):
        add_used_files_to_journal(staging, plan_key, tracker)


def add_used_files_to_journal(staging: StagingFolder, plan_key: str, tracker: FileAccessTracker) -> None:
    """Add all files that were used so far to the journal, except those that the cache folder has."""
    with translate_os_errors(staging.cache_folder):
        staging.add_to_journal(plan_key, tracker.paths())


def publish(staging: StagingFolder, manifest: Manifest) -> None:
    """Copy new files into the cache folder, write the manifest, and delete the files that only the old one listed.

    Does nothing if another process has unpacked or discarded the plan's bundle since this start has read it. Raises
    SpaceError and TcdeployError.
    """
    key, folder = str(manifest.plan["key"]), staging.target
    with folder_lock(folder), translate_os_errors(folder):
        if staging.is_private_copy or not has_bundle_changed(folder, key, staging.bundle):
            replaced = stored_paths(folder, key)
            manifests = read_manifests(folder, skip_damaged=True).values()
            staging.publish(manifest.files, [file for listing in manifests for file in listing.files])
            write_manifest(manifest_path(folder, key), manifest)
            remove_unlisted(folder, replaced)
        staging.discard_journal()


def replace_step_costs(staging: StagingFolder, plan_key: str, step_costs: dict[str, Any]) -> None:
    """Store the step costs that a server has measured since its start in the plan's manifest.

    It has measured the times of prefill steps (IDLE_TIMES), or all costs if the manifest has none. Does nothing if the
    other costs in the manifest differ: then another process has measured them, perhaps with other programs. Raises
    SpaceError, TcdeployError and OSError.
    """
    folder = staging.target
    with folder_lock(folder), translate_os_errors(folder):
        manifest = read_manifest(path := manifest_path(folder, plan_key))
        if manifest is None:
            return
        times, known = dict.fromkeys(IDLE_TIMES), manifest.step_costs
        # Compared as JSON: the parsed manifest has lists where the new costs have tuples.
        before, after = (json.dumps({**costs, **times}, sort_keys=True) for costs in (known or step_costs, step_costs))
        if before == after:
            write_manifest(path, replace(manifest, step_costs=step_costs))


def mark_started(staging: StagingFolder, plan_key: str) -> None:
    """Set the manifest's modification time, from which `cache ls` and `cache gc` take the plan's last start."""
    with contextlib.suppress(OSError):  # such as one that another process has discarded
        os.utime(manifest_path(staging.target, plan_key))


def hash_used_files(
    staging: StagingFolder, used_paths: list[str], earlier: Manifest | None, is_first_prepare: bool
) -> tuple[FileRecord, ...]:
    """Records of the cache files that this start used, and with their present records of deferred and bundled files.

    A later `prepare` of a process may find programs in memory, so the files of the earlier manifest are included then,
    but not its reference: this start lists its own, if it has one. Timings of max-autotune's choices and the measured
    configurations of kernels are always included, because only a start that compiles or `--winners` reads them.
    """
    folder, bundled = staging.path, staging.bundle.files if staging.bundle is not None else ()
    earlier_paths = [file.path for file in earlier.files] if earlier else []
    autotune_paths = [path for path in earlier_paths if path.startswith(f"{AUTOTUNE_DIR}/") or is_winner(path)]
    program_paths = [path for path in earlier_paths if not path.startswith(f"{REFERENCES_DIR}/")]
    reused_paths = autotune_paths if is_first_prepare else program_paths
    deferred = {file.path for file in staging.deferred}
    used = hash_files(folder, {*used_paths, *reused_paths, *staging.winners} - deferred)
    by_path = {file.path: file for file in (*used, *staging.deferred, *bundled)}
    return tuple(by_path[path] for path in sorted(by_path))


def compilation_date(records: list[BucketRecord], earlier: Manifest | None) -> int | None:
    """When the plan was last compiled, in seconds since 1970: now, or as in the earlier manifest if all buckets hit."""
    if earlier is None or any(record.outcome == "miss" for record in records):
        return int(time.time())
    return earlier.compiled_at
