"""One start, from the decisions to the recorded plan: `run_start` reads from top to bottom.

A cold start and a warm start take the same steps. What differs is where the model comes from: from its code
(start/model_code.py), or from ahead-of-time packages alone (start/packages.py). Both are a `Source`. The seconds of
each stage are written to the manifest. Does not import transformers.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
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
from tcdeploy.start.deployment import Deployment
from tcdeploy.start.loaded_start import (
    FilesToList,
    LoadedStart,
    Warmed,
    count_start,
    previous_run,
    publish_manifest,
    save_costs,
)
from tcdeploy.start.planned import Planned, StartRequest

if TYPE_CHECKING:
    from tcdeploy.start.eager import ProgramSwaps  # imports transformers


class Source(Protocol):
    """Where a start gets the model. `run_start` calls the methods in this order, each within its stage.

    runner: the loaded model, from `load` on. checker: has its reference, from `make_checker` on. Only the source refers
        to both before the engine does, so that it can load the model again.
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

    def make_checker(self, tracker: FileAccessTracker) -> None:
        """Read the reference, or compute it."""

    @property
    def origin(self) -> Origin:
        """What programs depend on besides the plan and the machine."""

    def start_swaps(self, start: LoadedStart) -> ProgramSwaps | None:
        """For an eager start: what warms the buckets while the engine runs. None: they are warmed now."""

    def warm(self, start: LoadedStart) -> Warmed:
        """Warm and check all buckets, in the stage `compile`."""

    def files_to_list(self, start: LoadedStart, warmed: Warmed) -> FilesToList:
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
            request.progress.detail("files of the plan")
            earlier = restore_plan(staging, plan.key, rebuild, request.signing_policy, source.is_deferred)
            if earlier is not None and earlier.was_warm and not request.eager:
                request.progress.expect(earlier.stage_seconds)
            request.progress.detail("weights")
            source.load(earlier)
        tracker = FileAccessTracker(staging.path)
        source.finish_loading(stages, tracker)
        with stages.stage("reference"):
            source.make_checker(tracker)
        start = LoadedStart(
            request=request, planned=planned, origin=source.origin, staging=staging, earlier=earlier,
            previous=previous_run(source.origin, earlier), tracker=tracker, stages=stages,
        )  # fmt: skip
        swaps, costs, results = source.start_swaps(start), None, dict[str, Any]()
        if swaps is None:
            warmed = source.warm(start)
            with stages.stage("record"):
                results["workspace_bytes"] = publish_manifest(start, warmed, source.files_to_list(start, warmed))
            results |= {"records": tuple(warmed.records), "is_recorded": not warmed.uncached_buckets}
            costs = warmed.costs
        engine = Engine(source.runner, costs, partial(save_costs, staging, plan.key), measures_costs=swaps is None)
        seconds = dict(stages.seconds)  # an eager start adds the seconds of its swaps to the original
        return Deployment(
            planned=planned, engine=engine, stage_seconds=seconds, swaps=swaps,
            import_seconds=import_timer.sorted_seconds(), cache_dir=staging.target, weights_read=source.weights_read,
            loaded_tokenizer=source.tokenizer, **results,
        )  # fmt: skip
