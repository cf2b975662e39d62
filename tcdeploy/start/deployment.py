"""The result of a start, and the steps that both kinds of start share: warm-up, and the record in the cache folder.

start/model_code.py starts a deployment from the model's code, start/packages.py from ahead-of-time packages.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from tcdeploy.cache.files.records import FileRecord
from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.record.manifest import Manifest, Origin, make_manifest
from tcdeploy.cache.record.provenance import require_bundled
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.cache.staging.recording import (
    compilation_date,
    hash_used_files,
    mark_started,
    publish,
    record_finished_bucket,
)
from tcdeploy.engine.check.parity_check import ParityChecker
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.generation_defaults import GenerationDefaults
from tcdeploy.engine.schedule.step_costs import StepCosts, parse_step_costs
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.warm.timing import measure_step_costs
from tcdeploy.engine.warm.tuning import CompiledVariant
from tcdeploy.engine.warm.warmup import PreviousRun, warm_buckets
from tcdeploy.host.import_times import describe_uncompiled
from tcdeploy.host.progress import Progress
from tcdeploy.host.stages import StageTimer, import_timer
from tcdeploy.models.weights.reader import ReadTotal
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.bucket_record import BucketRecord, Compilation
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.extras import require_extra
from tcdeploy.planning.keys import combined_digest
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.recipe import Recipe

SOURCES = "sources"  # key of the digest of `_cost_sources`, beside the costs in the manifest
log = logging.getLogger("tcdeploy.start")
_starts = 0  # of this process


@dataclass(frozen=True)
class Deployment:
    """A warmed model: `engine` generates tokens, `records` hold the warm-up result of each bucket.

    After an eager start (start/eager.py), `records` is empty, and `swaps` replaces eager buckets by their programs.
    """

    plan: Plan
    architecture: Architecture
    generation_defaults: GenerationDefaults
    engine: Engine
    records: tuple[BucketRecord, ...]
    stage_seconds: dict[str, float]
    import_seconds: dict[str, float]  # by package, longest first: imports of this process so far, in all stages
    cache_dir: str  # the folder in use: `plan.cache_dir`, or a private copy if that folder is read-only
    is_recorded: bool = True  # False: torch did not store all programs, so the plan in the folder was not changed
    workspace_bytes: int | None = None  # measured on the device; `plan.workspace_bytes` was predicted
    weights_read: ReadTotal | None = None  # of our reader threads; None: transformers read the files, or none were read
    loaded_tokenizer: Any = None  # None: not loaded by `prepare`
    swaps: ProgramSwaps | None = None  # None: every bucket was warmed before the start ended

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, or a StoredTokenizer after a start from packages.

        Loaded on first access unless `prepare` has loaded it. Raises ModelError if the model has none.
        """
        if self.loaded_tokenizer is not None:
            return self.loaded_tokenizer
        require_extra("compile", "load the tokenizer; `prepare(..., needs_tokenizer=True)` uses the stored one")
        from tcdeploy.text.tokenizer import load_tokenizer  # imports transformers

        return load_tokenizer(self.plan)


class ProgramSwaps(Protocol):
    """What a server needs of start/eager.py. `advance` and `stop` change it; other threads may read the properties."""

    @property
    def is_warm(self) -> bool:
        """Whether every bucket runs its programs."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do: every bucket has its programs, or some cannot get them."""

    @property
    def records(self) -> tuple[BucketRecord, ...]:
        """Of the buckets that run their programs."""

    @property
    def failed_buckets(self) -> int: ...

    @property
    def compiles(self) -> int:
        """Compilations of this process in `advance`."""

    def describe(self) -> str:
        """What is missing for a warm start; "" if nothing is."""

    def advance(self, engine: Engine) -> bool:
        """Do what is due between two steps. Returns whether requests had to wait for it."""

    def stop(self) -> None:
        """Compile nothing any more."""


class Warmed(NamedTuple):
    """The buckets' records, the measured costs of steps, and the cache files that were used."""

    records: list[BucketRecord]
    costs: StepCosts
    used_paths: list[str]

    @property
    def uncached_buckets(self) -> list[str]:
        """Names of the buckets with a program that torch compiled and did not store."""
        return [record.bucket for record in self.records if record.outcome == "uncached"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a start has decided and loaded before its buckets are warmed."""

    recipe: Recipe
    plan: Plan
    environment: Environment
    architecture: Architecture
    generation_defaults: GenerationDefaults
    origin: Origin
    staging: StagingFolder
    earlier: Manifest | None  # of the plan
    previous: PreviousRun
    tokenizer: Any  # None: not loaded


def count_start() -> None:
    """Call it once at the beginning of each start, also of one that is abandoned: it may leave kernels in memory."""
    global _starts
    _starts += 1


def is_first_start() -> bool:
    """Whether this process has started nothing before, so that no program was in memory."""
    return _starts == 1


def warm(
    start: Start,
    runner: ModelRunner,
    checker: ParityChecker,
    tracker: FileAccessTracker,
    measure: bool,
    progress: Progress,
    prepared: Mapping[Bucket, CompiledVariant] | None = None,
    wait_for_worker: Callable[[Bucket], Compilation | None] = lambda bucket: None,
) -> Warmed:
    """Warm and check all buckets. Measure what steps cost, unless an earlier start of this plan has done so.

    measure: also time each bucket, eager and compiled, and measure the costs in any case.
    prepared: the result of `prepare_buckets`, if it was called.
    wait_for_worker: called before each bucket; returns the Compilation of another process, or None.
    """
    plan = start.plan
    on_finished = partial(record_finished_bucket, start.staging, plan.key, tracker, start.earlier is None)
    with tracker.track():
        records = warm_buckets(
            runner, checker, start.previous, plan.cache_dir, measure, progress, on_finished, prepared, wait_for_worker
        )
    runner.graphs.warmed()
    return Warmed(records, find_step_costs(start, runner, records, measure), tracker.paths())


def find_step_costs(start: Start, runner: ModelRunner, records: list[BucketRecord], measure: bool = False) -> StepCosts:
    """What steps cost: as an earlier start of this plan has measured it, else (or with `measure`) measured now."""
    costs = None if measure else _recorded_costs(start, records)
    if costs is None:
        with runner.uncounted_steps():
            costs = measure_step_costs(runner)
    return costs


def _recorded_costs(start: Start, records: list[BucketRecord]) -> StepCosts | None:
    """The costs in the manifest, if they can be read and were measured with the same programs; else None."""
    earlier = start.earlier
    if earlier is None or earlier.step_costs is None or not start.previous.buckets:
        return None
    is_same = {record.bucket: record.variant for record in earlier.buckets} == {
        record.bucket: record.variant for record in records
    }
    try:
        values = dict(earlier.step_costs)
        return parse_step_costs(values) if is_same and values.pop(SOURCES) == _cost_sources() else None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("steps are timed again, because their times in the manifest cannot be read: %s", error)
        return None


@cache
def _cost_sources() -> str:
    """A digest of the code that measures costs and gives them their meaning.

    It hashes bytes, so after an edited comment the costs are measured again, in less than a second. Syntax trees, as in
    cache keys (planning/keys.py), would avoid that, but parsing takes 7 to 50 ms in each start.
    """
    package = Path(__file__).parents[1]
    paths = ("engine/schedule/step_costs.py", "engine/warm/timing.py")
    sources = {path: (package / path).read_bytes() for path in paths}
    return combined_digest({name: hashlib.sha256(source).hexdigest() for name, source in sources.items()})


def record_start(
    start: Start,
    runner: ModelRunner,
    warmed: Warmed,
    more_paths: Iterable[str],
    stages: StageTimer,
    keeps_manifest: bool = False,
) -> Deployment:
    """Write the manifest, with all files that were used and `more_paths`, and return the deployment.

    keeps_manifest: as in `publish_manifest`.
    """
    workspace_bytes = publish_manifest(start, warmed, more_paths, stages, keeps_manifest)
    engine = Engine(runner, warmed.costs)
    return make_deployment(
        start,
        engine,
        stages,
        records=tuple(warmed.records),
        workspace_bytes=workspace_bytes,
        is_recorded=not warmed.uncached_buckets,
    )


def make_deployment(start: Start, engine: Engine, stages: StageTimer, **fields: Any) -> Deployment:
    """The deployment of a start. `fields`: those of Deployment that the start does not have."""
    return Deployment(
        plan=start.plan,
        architecture=start.architecture,
        generation_defaults=start.generation_defaults,
        engine=engine,
        stage_seconds=stages.seconds,
        import_seconds=import_timer.sorted_seconds(),
        cache_dir=start.staging.target,
        loaded_tokenizer=start.tokenizer,
        **fields,
    )


def publish_manifest(
    start: Start, warmed: Warmed, more_paths: Iterable[str], stages: StageTimer, keeps_manifest: bool = False
) -> int | None:
    """Write the manifest, with all files that were used and `more_paths`. Returns the workspace in bytes.

    Writes nothing, and warns, if torch did not store a program: a later start would not find it.

    keeps_manifest: write nothing if the new manifest would differ only in seconds, memory and check results. Only for
        starts from packages, because their programs are fixed files.

    Raises SpaceError, TrustError and TcdeployError.
    """
    staging, earlier = start.staging, start.earlier
    with stages.stage("record"):
        used_paths = [*warmed.used_paths, *more_paths]
        workspace_bytes = _workspace_bytes(start.plan)
        if names := warmed.uncached_buckets:
            log.warning(
                "torch did not store the programs of %s, so the plan is not recorded, and each start compiles them",
                ", ".join(names),
            )
        elif keeps_manifest and earlier is not None and not _would_change(start, warmed, used_paths, earlier):
            mark_started(staging, start.plan.key)
        else:
            files = hash_used_files(staging, used_paths, earlier, is_first_start())
            if start.recipe.require_signed and staging.bundle is not None:
                require_bundled(start.plan.key, files, staging.bundle)
            publish(staging, _make_manifest(start, warmed, files, stages.seconds, workspace_bytes))
    if is_first_start() and (warning := describe_uncompiled(import_timer.uncompiled)):
        log.warning("%s", warning)
    return workspace_bytes


def _make_manifest(
    start: Start,
    warmed: Warmed,
    files: tuple[FileRecord, ...],
    stage_seconds: dict[str, float],
    workspace_bytes: int | None,
) -> Manifest:
    plan = start.plan
    longest_tuning = max(plan.tune_seconds, start.previous.tune_seconds)  # of trials that an untuned start keeps
    return make_manifest(
        replace(plan, tune_seconds=longest_tuning),
        start.environment,
        start.origin,
        stage_seconds,
        warmed.records,
        files,
        workspace_bytes,
        is_first_start(),
        compilation_date(warmed.records, start.earlier),
        {**asdict(warmed.costs), SOURCES: _cost_sources()},
    )


def _would_change(start: Start, warmed: Warmed, used_paths: list[str], earlier: Manifest) -> bool:
    """Whether a new manifest would differ from the earlier one, except in seconds, memory and check results."""
    listed = {file.path for file in earlier.files}
    variants = [(record.bucket, record.variant, record.outcome) for record in warmed.records]
    if not listed.issuperset(used_paths) or variants != [
        (record.bucket, record.variant, record.outcome) for record in earlier.buckets
    ]:
        return True
    manifest = _make_manifest(start, warmed, earlier.files, earlier.stage_seconds, earlier.workspace_bytes)
    manifest = replace(manifest, buckets=earlier.buckets)
    # Compared as JSON: the parsed `earlier` has lists where the new manifest has tuples.
    return json.dumps(asdict(manifest)) != json.dumps(asdict(earlier))


def _workspace_bytes(plan: Plan) -> int | None:
    """Device memory in use beyond weights and KV cache, by all processes; None without a GPU."""
    if plan.device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # memory that only warm-up needed
    free, total = torch.cuda.mem_get_info()
    return total - free - plan.weight_bytes - plan.kv_bytes
