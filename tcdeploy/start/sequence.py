"""One start, from the decisions to the recorded plan: `run_start` reads from top to bottom.

A cold start and a warm start take the same steps. What differs is where the model comes from: from its code
(start/model_code.py), or from ahead-of-time packages alone (start/packages.py). Both are a `Source`. The seconds of
each stage are written to the manifest. Does not import transformers.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from tcdeploy.cache.files.records import FileRecord
from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.record.manifest import Manifest, Origin
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.cache.staging.restore import restore_plan
from tcdeploy.engine.check.parity_check import ParityChecker
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.host.stages import StageTimer, import_timer
from tcdeploy.models.weights.reader import ReadTotal
from tcdeploy.programs.stances import refuse_compilation
from tcdeploy.start.deployment import (
    Deployment,
    Start,
    UsedFiles,
    Warmed,
    count_start,
    previous_run,
    publish_manifest,
)
from tcdeploy.start.planned import Planned, StartRequest

if TYPE_CHECKING:
    from tcdeploy.start.eager import ProgramSwaps  # imports transformers


class Source(Protocol):
    """Where a start gets the model. `run_start` calls the methods in this order, each within its stage.

    A source ends its threads and processes by the ExitStack that it is made with.

    runner: the loaded model, from `load` on. checker: its reference, from `add_reference` on. Only the source refers to
        both before the engine does, so that it can load the model again.
    """

    runner: ModelRunner
    checker: ParityChecker

    def decide(self) -> Planned:
        """Decide everything before anything is loaded. Raises ModelError with all reasons against the model."""

    def open_cache(self) -> StagingFolder:
        """Make torch use a staging folder of the plan's cache folder, and lease the plan.

        What can overlap with the check of the plan's files, such as reading the weights, begins here.
        """

    def is_deferred(self, file: FileRecord) -> bool:
        """Whether this file of the plan stays in the cache folder until it is needed."""

    def load(self, earlier: Manifest | None) -> None:
        """Make the runner. `earlier`: the manifest of the plan, whose files are in the staging folder; None if cold."""

    def finish_loading(self, stages: StageTimer, tracker: FileAccessTracker) -> None:
        """Wait for the weights if `load` has not. In stages of its own."""

    def add_reference(self, tracker: FileAccessTracker) -> None:
        """Make the checker: read the reference, or compute it."""

    @property
    def origin(self) -> Origin:
        """What programs depend on besides the plan and the machine."""

    def start_swaps(self, start: Start) -> ProgramSwaps | None:
        """For an eager start: what warms the buckets while the engine runs. None: they are warmed now."""

    def warm(self, start: Start) -> Warmed:
        """Warm and check all buckets, in the stage `compile`."""

    def files_to_list(self, start: Start, warmed: Warmed) -> UsedFiles:
        """Write what a later start needs besides the programs, and return the files that the manifest lists for it."""

    @property
    def tokenizer(self) -> Any:
        """None if it was not needed."""

    @property
    def weights_read(self) -> ReadTotal | None:
        """By our reader threads."""


def run_start(source: Source, request: StartRequest) -> Deployment:
    """Turn a request into a deployment. Raises TcdeployError, and what the source raises."""
    recipe, stages = request.recipe, StageTimer(request.progress)
    with ExitStack() as refusal:
        with stages.stage("decide"):
            planned = source.decide()
        plan = planned.plan
        count_start()
        request.progress.planned(plan)
        if not recipe.compile:
            refusal.enter_context(refuse_compilation(plan))
        with stages.stage("load"):
            staging = source.open_cache()
            rebuild = recipe.on_bad_cache == "rebuild"
            earlier = restore_plan(staging, plan.key, rebuild, request.signing_policy, source.is_deferred)
            source.load(earlier)
        tracker = FileAccessTracker(staging.path)
        source.finish_loading(stages, tracker)
        with stages.stage("reference"):
            source.add_reference(tracker)
        start = Start(
            request=request, planned=planned, origin=source.origin, staging=staging, earlier=earlier,
            previous=previous_run(source.origin, earlier), tracker=tracker, stages=stages,
        )  # fmt: skip
        swaps = source.start_swaps(start)
        if swaps is not None:
            return _make_deployment(start, source, Engine(source.runner), swaps=swaps)
        warmed = source.warm(start)
        with stages.stage("record"):
            workspace_bytes = publish_manifest(start, warmed, source.files_to_list(start, warmed))
        return _make_deployment(
            start, source, Engine(source.runner, warmed.costs), records=tuple(warmed.records),
            workspace_bytes=workspace_bytes, is_recorded=not warmed.uncached_buckets,
        )  # fmt: skip


def _make_deployment(start: Start, source: Source, engine: Engine, **results: Any) -> Deployment:
    """`results`: the fields of Deployment that differ between a start that has warmed the buckets and an eager one."""
    planned = start.planned
    return Deployment(
        plan=planned.plan,
        architecture=planned.architecture,
        generation_defaults=planned.generation_defaults,
        engine=engine,
        stage_seconds=dict(start.stages.seconds),  # an eager start adds the seconds of its swaps to the original
        import_seconds=import_timer.sorted_seconds(),
        cache_dir=start.staging.target,
        weights_read=source.weights_read,
        loaded_tokenizer=source.tokenizer,
        **results,
    )
