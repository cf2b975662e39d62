"""The last stages of a start, which both sources share: warm the buckets, and record the plan.

A server with eager steps runs them while it serves (start/eager.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tcdeploy.cache.files.records import FileRecord
from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.record.manifest import Manifest, Origin, diff_sources
from tcdeploy.cache.record.provenance import require_bundled
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.cache.staging.recording import (
    compilation_date,
    hash_used_files,
    mark_started,
    publish,
    record_finished_bucket,
    replace_step_costs,
)
from tcdeploy.cache.staging.restore import remove_published_folders
from tcdeploy.engine.check.parity_check import ParityChecker
from tcdeploy.engine.schedule.step_costs import StepCosts, parse_step_costs
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.warm.timing import measure_step_costs
from tcdeploy.engine.warm.tuning import CompiledVariant
from tcdeploy.engine.warm.warmup import PreviousRun, warm_buckets
from tcdeploy.errors import TcdeployError
from tcdeploy.host.stages import StageTimer, describe_missing_bytecode, import_timer
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.keys import combined_digest
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.start.planned import Planned, StartRequest

SOURCES = "sources"  # key of the digest of `_cost_sources`, beside the costs in the manifest
log = logging.getLogger("tcdeploy.start")
_starts = 0  # of this process


@dataclass(frozen=True, kw_only=True)
class LoadedStart:
    """A start whose model is loaded and whose buckets are to be warmed."""

    request: StartRequest
    planned: Planned
    origin: Origin
    staging: StagingFolder
    earlier: Manifest | None  # of the plan; None if it is not cached
    previous: PreviousRun  # what the manifest says about the buckets
    tracker: FileAccessTracker
    stages: StageTimer

    @property
    def plan(self) -> Plan:
        return self.planned.plan


class Warmed(NamedTuple):
    """The buckets' records, the costs of steps, and the cache files that were used."""

    records: list[BucketRecord]
    costs: StepCosts | None  # None: measured later
    used_paths: list[str]

    @property
    def uncached_buckets(self) -> list[str]:
        """Names of the buckets with a program that torch compiled and did not store."""
        return [record.bucket for record in self.records if record.outcome == "uncached"]


class FilesToList(NamedTuple):
    """Files in the staging folder that the manifest lists even if this start has not read them.

    keeps_manifest: write no manifest that would differ only in seconds, memory and check results: only for packages,
        which are fixed files.
    """

    paths: list[str]
    keeps_manifest: bool = False


def count_start() -> None:
    """Call it once in each start before anything is loaded: also one that is abandoned may leave kernels in memory."""
    global _starts
    _starts += 1


def is_first_start() -> bool:
    """Whether this process has started nothing before, so that no program was in memory."""
    return _starts == 1


def previous_run(origin: Origin, earlier: Manifest | None) -> PreviousRun:
    """What the manifest of the plan says. It names no cached programs if those would be compiled otherwise now."""
    if earlier is None:
        return PreviousRun()
    is_same = not diff_sources(origin, earlier.origin) and origin.torch_settings == earlier.origin.torch_settings
    names = frozenset(record.bucket for record in earlier.buckets) if is_same else frozenset()
    return PreviousRun(names, earlier.cold_seconds(), earlier.trials(), earlier.plan.get("tune_seconds", 0.0))


def warm(
    start: LoadedStart,
    runner: ModelRunner,
    checker: ParityChecker,
    prepared: Mapping[Bucket, CompiledVariant] | None = None,
    wait_for_worker: Callable[[Bucket], BucketRecord | None] = lambda bucket: None,
) -> Warmed:
    """Warm and check all buckets. If the request measures, each bucket is also timed, eager and compiled.

    prepared: the result of `prepare_buckets`, if it was called.
    wait_for_worker: called before each bucket; returns the record of another process, or None.
    """
    plan, request, tracker = start.plan, start.request, start.tracker
    on_finished = partial(record_finished_bucket, start.staging, plan.key, tracker, start.earlier is None)
    with tracker.track():
        records = warm_buckets(
            runner, checker, start.previous, plan.cache_dir, request.measure, request.progress, on_finished, prepared,
            wait_for_worker,
        )  # fmt: skip
        runner.launch_sampling_kernels()
    runner.graphs.end_warmup()
    costs = None
    if not _measures_later(start):
        request.progress.detail("times of steps")
        costs = find_step_costs(start, runner, records)
    return Warmed(records, costs, tracker.paths())


def _measures_later(start: LoadedStart) -> bool:
    """Whether the idle engine times the steps: in `serve`, at the first start of programs built without the GPU."""
    return start.request.serves and start.earlier is not None and not start.earlier.has_run


def find_step_costs(start: LoadedStart, runner: ModelRunner, records: list[BucketRecord]) -> StepCosts:
    """What steps cost: measured now if the request measures, or if no earlier start of this plan has measured it."""
    costs = None if start.request.measure else _recorded_costs(start, records)
    if costs is None:
        with runner.uncounted_steps():
            costs = measure_step_costs(runner)
    return costs


def _recorded_costs(start: LoadedStart, records: list[BucketRecord]) -> StepCosts | None:
    """The costs in the manifest, if they can be read and were measured with the same programs; else None."""
    earlier = start.earlier
    if earlier is None or earlier.step_costs is None or not start.previous.cached_buckets:
        return None
    variants, earlier_variants = ({item.bucket: item.variant for item in each} for each in (records, earlier.buckets))
    is_same = variants == earlier_variants
    try:
        values = dict(earlier.step_costs)
        return parse_step_costs(values) if is_same and values.pop(SOURCES) == _cost_sources() else None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("steps are timed again, because their times in the manifest cannot be read: %s", error)
        return None


def save_costs(staging: StagingFolder, plan_key: str, costs: StepCosts) -> None:
    """Store the times that an idle server has measured, so that the next start does not pad to slow sizes.

    In a thread, because a synchronised write to a disk takes long. A failure is logged.
    """

    def save() -> None:
        try:
            replace_step_costs(staging, plan_key, _costs_in_manifest(costs))
        except (TcdeployError, OSError) as error:
            log.warning("the times of steps are not stored: %s", error)

    threading.Thread(target=save, name="step-costs", daemon=True).start()


def _costs_in_manifest(costs: StepCosts) -> dict[str, Any]:
    return {**asdict(costs), SOURCES: _cost_sources()}


@cache
def _cost_sources() -> str:
    """A digest of the code that measures costs and gives them their meaning.

    It hashes bytes, so after an edited comment the costs are measured again, in less than a second. Syntax trees, as in
    cache keys (planning/keys.py), would avoid that, but parsing takes 7 to 50 ms in each start.
    """
    package, paths = Path(__file__).parents[1], ("engine/schedule/step_costs.py", "engine/warm/timing.py")
    return combined_digest({path: hashlib.sha256((package / path).read_bytes()).hexdigest() for path in paths})


def publish_manifest(start: LoadedStart, warmed: Warmed, to_list: FilesToList) -> int | None:
    """Write the manifest, with all files that were used. Returns the workspace in bytes. Runs in the stage `record`.

    Writes nothing, and warns, if torch did not store a program: a later start would not find it. Raises SpaceError,
    TrustError and TcdeployError.
    """
    plan, staging, earlier = start.plan, start.staging, start.earlier
    used_paths = [*warmed.used_paths, *to_list.paths]
    workspace_bytes = _workspace_bytes(plan)
    if names := warmed.uncached_buckets:
        log.warning(
            "torch did not store the programs of %s, so the plan is not recorded, and each start compiles them",
            ", ".join(names),
        )
    elif to_list.keeps_manifest and earlier is not None and not _would_change(start, warmed, used_paths, earlier):
        mark_started(staging, plan.key)
    else:
        progress = start.request.progress
        progress.detail(f"hash {len(used_paths)} files")
        files = hash_used_files(staging, used_paths, earlier, is_first_start())
        if start.planned.recipe.require_signed and staging.bundle is not None:
            require_bundled(plan.key, files, staging.bundle)
        progress.detail(f"write {len(files)} files to the cache folder")
        publish(staging, _make_manifest(start, warmed, files, workspace_bytes))
        remove_published_folders(staging)  # those of compile workers
    if is_first_start() and (warning := describe_missing_bytecode(import_timer.not_kept)):
        log.warning("%s", warning)
    return workspace_bytes


def _make_manifest(
    start: LoadedStart, warmed: Warmed, files: tuple[FileRecord, ...], workspace_bytes: int | None
) -> Manifest:
    plan = start.plan
    longest_tuning = max(plan.tune_seconds, start.previous.tune_seconds)  # of trials that an untuned start keeps
    return Manifest(
        plan=asdict(replace(plan, tune_seconds=longest_tuning)),
        environment=asdict(start.planned.environment),
        origin=start.origin,
        stage_seconds=start.stages.seconds,
        buckets=tuple(warmed.records),
        files=files,
        workspace_bytes=workspace_bytes,
        is_first_start=is_first_start(),
        compiled_at=compilation_date(warmed.records, start.earlier),
        step_costs=_costs_in_manifest(warmed.costs) if warmed.costs is not None else None,
        blind=start.earlier.blind if start.earlier is not None else None,
    )


def _would_change(start: LoadedStart, warmed: Warmed, used_paths: list[str], earlier: Manifest) -> bool:
    """Whether a new manifest would differ from the earlier one, except in seconds, memory and check results."""
    listed = {file.path for file in earlier.files}
    outcomes, earlier_outcomes = (
        [(item.bucket, item.variant, item.outcome) for item in records] for records in (warmed.records, earlier.buckets)
    )
    if outcomes != earlier_outcomes or not listed.issuperset(used_paths):
        return True
    manifest = _make_manifest(start, warmed, earlier.files, earlier.workspace_bytes)
    manifest = replace(manifest, buckets=earlier.buckets, stage_seconds=earlier.stage_seconds)
    # Compared as JSON: the parsed `earlier` has lists where the new manifest has tuples.
    return json.dumps(asdict(manifest)) != json.dumps(asdict(earlier))


def _workspace_bytes(plan: Plan) -> int | None:
    """Device memory in use beyond weights and KV cache, by all processes; None without a GPU."""
    if plan.device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # memory that only warm-up needed
    free, total = torch.cuda.mem_get_info()
    return total - free - plan.weight_bytes - plan.state_bytes
