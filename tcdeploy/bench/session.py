"""One benchmark from end to end: decide, measure the machine, then us, then each baseline, one after another.

Two models seldom fit a GPU together, and two compiled ones disturb each other's caches. So each subject is prepared,
measured and dropped before the next one is loaded; nothing here keeps a deployment beyond the call that measures it.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tcdeploy import pipeline
from tcdeploy.bench.baselines import BaselineModel, load_baseline
from tcdeploy.bench.floor import Rates, measure_rates
from tcdeploy.bench.report import TCDEPLOY, Report, Row, describe_environment, describe_plan, rows_or_failure
from tcdeploy.pipeline import Deployment, PlannedDeployment
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.progress import Progress


class BenchSettings(Protocol):
    @property
    def baselines(self) -> tuple[str, ...]: ...

    def check_against_plan(self, plan: Plan) -> None: ...


@dataclass(frozen=True)
class Session:
    recipe: Recipe
    settings: BenchSettings
    progress: Progress
    planned: PlannedDeployment
    rates: Rates
    notes: list[str] = field(default_factory=list)  # where a baseline is less than its name

    def measure(
        self,
        measure_deployment: Callable[[str, Deployment], Iterator[Row]],
        baseline: Callable[[BaselineModel], Iterator[Row]],
    ) -> list[Row]:
        """Rows of us, then of each baseline in the order asked. `measure_deployment` measures the region baseline too.

        What stops us is raised; what stops a baseline is its row.
        """
        rows = list(measure_deployment(TCDEPLOY, pipeline.prepare(self.recipe, self.progress)))
        for name in self.settings.baselines:
            free_memory()
            self.progress.stage(f"baseline {name}")
            rows += rows_or_failure(name, lambda name=name: self._measure_baseline(name, measure_deployment, baseline))  # type: ignore[misc]
        return rows

    def _measure_baseline(
        self,
        name: str,
        measure_deployment: Callable[[str, Deployment], Iterator[Row]],
        baseline: Callable[[BaselineModel], Iterator[Row]],
    ) -> Iterator[Row]:
        if name == "region":
            deployment = pipeline.prepare(region_recipe(self.recipe), self.progress)
            fallbacks = [decision for decision in deployment.plan.decisions if decision.is_fallback]
            self.notes.extend(f"{name}: {one.name} is {one.value}: {one.reason}" for one in fallbacks)
            yield from measure_deployment(name, deployment)
            return
        model = load_baseline(name, self.planned.plan, self.planned.config)
        if model.note:
            self.notes.append(model.note)
        yield from baseline(model)


def start_session(recipe: Recipe, settings: BenchSettings, progress: Progress) -> Session:
    """Raises UsageError for lengths that the context does not hold, before a weight is loaded."""
    planned = pipeline.decide(recipe)
    settings.check_against_plan(planned.plan)
    progress.stage("floor")
    return Session(recipe, settings, progress, planned, measure_rates(planned.plan.device, planned.plan.compute_dtype))


def make_report(session: Session, command: str, settings: Any, rows: Sequence[Row], **extra: Any) -> Report:
    """With what the rows are figures of."""
    environment, plan = describe_environment(session.planned.environment), describe_plan(session.planned.plan)
    extra = {"machine": dataclasses.asdict(session.rates), "notes": session.notes, **extra}
    return Report(command, environment, plan, dataclasses.asdict(settings), rows, extra)


def region_recipe(recipe: Recipe) -> Recipe:
    """Attention and MLP compiled apart, with torch's own CUDA graph for each: what most articles describe."""
    return dataclasses.replace(recipe, region="blocks", graphs="region", mode="reduce-overhead")


def free_memory() -> None:
    """Compiled programs hold the modules that they were made for: torch has to forget them first."""
    torch.compiler.reset()
    gc.unfreeze()  # `prepare` took what stood then out of the collector's sight
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
