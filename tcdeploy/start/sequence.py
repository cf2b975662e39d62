"""One start, from the decisions to the recorded plan: `run_start` reads from top to bottom.

A cold start and a warm start take the same steps. What differs is where the model comes from: from its code
(start/model_code.py), or from ahead-of-time packages alone (start/packages.py). Both have a class, the *source*, whose
methods `run_start` calls in the order in which they are defined, each within its stage. The seconds of each stage are
written to the manifest. Does not import transformers.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.staging.restore import restore_plan
from tcdeploy.engine.engine import Engine
from tcdeploy.host.stages import StageTimer, import_timer
from tcdeploy.programs.stances import refuse_compilation
from tcdeploy.start.deployment import Deployment, LoadedStart, count_start, previous_run, publish_manifest
from tcdeploy.start.planned import StartRequest

if TYPE_CHECKING:  # they import this module
    from tcdeploy.start.model_code import ModelCode
    from tcdeploy.start.packages import Packages


def run_start(source: ModelCode | Packages, request: StartRequest) -> Deployment:
    """Turn a request into a deployment. Raises TcdeployError, and what the source raises.

    Only the source refers to its `runner` and `checker` before the engine does, so that it can load the model again.
    """
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
        seconds = dict(stages.seconds)  # an eager start adds the seconds of its swaps to the original
        return Deployment(
            plan=plan, architecture=planned.architecture, generation_defaults=planned.generation_defaults,
            engine=Engine(source.runner, costs), stage_seconds=seconds, import_seconds=import_timer.sorted_seconds(),
            cache_dir=staging.target, weights_read=source.weights_read, loaded_tokenizer=source.tokenizer, swaps=swaps,
            **results,
        )  # fmt: skip
