"""Runs a benchmark: plan, measure the machine's rates, then the deployment, then each baseline in turn.

Each subject is released before the next is loaded: two models rarely fit on one GPU, and two compiled models share
torch's caches. No deployment is referenced beyond the call that measures it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from tcdeploy.bench.baselines import BaselineModel, load_baseline
from tcdeploy.bench.floor import Rates, measure_rates
from tcdeploy.bench.report import TCDEPLOY, Report, Row, describe_environment, describe_plan, rows_or_failure
from tcdeploy.bench.settings import CommonSettings
from tcdeploy.host.gc_policy import freeze_gc_after_startup
from tcdeploy.host.progress import Progress
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tcdeploy.start.deployment import Deployment, release_memory
from tcdeploy.start.planned import PlannedModel
from tcdeploy.start.prepare import prepare

SettingsT = TypeVar("SettingsT", bound=CommonSettings)


@dataclass(frozen=True)
class Session(Generic[SettingsT]):
    """One run. `extra`: further keys of the report, which `measure` functions may set."""

    recipe: Recipe
    settings: SettingsT
    progress: Progress
    planned: PlannedModel
    rates: Rates
    notes: list[str] = field(
        default_factory=list
    )  # deviations of baselines from what their names promise, and assumptions of floors
    extra: dict[str, Any] = field(default_factory=dict)

    def add_notes(self, notes: Iterable[str]) -> None:
        """Add notes that are not there yet: several subjects may have the same."""
        self.notes.extend(note for note in notes if note not in self.notes)

    def prepare(self, recipe: Recipe) -> Deployment:
        deployment = prepare(recipe, self.progress, needs_model=True)
        freeze_gc_after_startup()  # as `serve` does: full collections would be part of the measurements
        return deployment

    def measure_baseline(self, name: str, measure: Measure, measure_model: MeasureModel) -> Iterator[Row]:
        """`region` is a deployment; the others are models of transformers."""
        self.progress.stage(f"baseline {name}")
        if name != "region":
            baseline = load_baseline(name, self.planned.plan, self.planned.config)
            if baseline.note:
                self.notes.append(baseline.note)
            yield from measure_model(baseline, self)
            return
        deployment = self.prepare(region_recipe(self.recipe))
        for decision in deployment.plan.decisions:
            if decision.is_fallback:
                self.notes.append(f"region: {decision.name} is {decision.value}: {decision.reason}")
        yield from measure(name, deployment, self)


Measure: TypeAlias = Callable[[str, Deployment, Session[Any]], Iterator[Row]]  # of a deployment, with its subject
MeasureModel: TypeAlias = Callable[[BaselineModel, Session[Any]], Iterator[Row]]


def run_benchmark(
    command: str, measure: Measure, measure_model: MeasureModel, recipe: Recipe, settings: Any, progress: Progress
) -> Report:
    """Rows of the deployment, then of each baseline in the order given.

    Raises UsageError for settings that do not fit the plan, and errors of the deployment. An error of a baseline
    becomes its row.
    """
    planned = decide(recipe, needs_weights=False)
    settings.check_against_plan(planned.plan)
    progress.stage("floor")
    rates = measure_rates(planned.plan.device, planned.plan.compute_dtype)
    session = Session(planned.recipe, settings, progress, planned, rates)
    rows = list(measure(TCDEPLOY, session.prepare(planned.recipe), session))
    for name in settings.baselines:
        release_memory()
        rows += rows_or_failure(name, session.measure_baseline(name, measure, measure_model))
    environment, plan = describe_environment(planned.environment), describe_plan(dataclasses.asdict(planned.plan))
    extra = {"machine": dataclasses.asdict(rates), "notes": session.notes, **session.extra}
    return Report(command, environment, plan, dataclasses.asdict(settings), rows, extra)


def region_recipe(recipe: Recipe) -> Recipe:
    """Regional compilation as commonly documented: attention and MLP compiled apart, with Inductor's CUDA graphs."""
    return dataclasses.replace(recipe, region="blocks", graphs="region", mode="reduce-overhead", programs="jit")
