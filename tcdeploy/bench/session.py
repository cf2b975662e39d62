"""Runs a benchmark: plan, measure the machine's rates, then the deployment, then each baseline in turn.

Each subject is released before the next is loaded: two models rarely fit on one GPU, and two compiled models share
torch's caches. No deployment is referenced beyond the call that measures it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tcdeploy.bench.baselines import BaselineModel, load_baseline
from tcdeploy.bench.floor import Rates, measure_rates
from tcdeploy.bench.report import TCDEPLOY, Report, Row, describe_environment, describe_plan, rows_or_failure
from tcdeploy.host.gc_policy import freeze_gc_after_startup
from tcdeploy.host.progress import Progress
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tcdeploy.start.deployment import Deployment, release_memory
from tcdeploy.start.planned import PlannedModel
from tcdeploy.start.prepare import prepare


class BenchSettings(Protocol):
    @property
    def baselines(self) -> tuple[str, ...]: ...

    def check_against_plan(self, plan: Plan) -> None: ...


@dataclass(frozen=True)
class Session:
    recipe: Recipe
    settings: BenchSettings
    progress: Progress
    planned: PlannedModel
    rates: Rates
    notes: list[str] = field(default_factory=list)  # deviations of baselines from what their names promise

    def measure(
        self,
        measure_deployment: Callable[[str, Deployment], Iterator[Row]],
        measure_baseline: Callable[[BaselineModel], Iterator[Row]],
    ) -> list[Row]:
        """Rows of the deployment, then of each baseline in the order given.

        `measure_deployment` also measures the `region` baseline. An error of the deployment is raised; an error of a
        baseline becomes its row.
        """
        rows = list(measure_deployment(TCDEPLOY, self._prepare(self.recipe)))
        for name in self.settings.baselines:
            release_memory()
            self.progress.stage(f"baseline {name}")

            def measure_rows(name: str = name) -> Iterator[Row]:
                if name == "region":
                    return self._measure_region(measure_deployment)
                return self._measure_model(name, measure_baseline)

            rows += rows_or_failure(name, measure_rows)
        return rows

    def _measure_region(self, measure_deployment: Callable[[str, Deployment], Iterator[Row]]) -> Iterator[Row]:
        deployment = self._prepare(region_recipe(self.recipe))
        for decision in deployment.plan.decisions:
            if decision.is_fallback:
                self.notes.append(f"region: {decision.name} is {decision.value}: {decision.reason}")
        yield from measure_deployment("region", deployment)

    def _measure_model(self, name: str, measure_baseline: Callable[[BaselineModel], Iterator[Row]]) -> Iterator[Row]:
        baseline = load_baseline(name, self.planned.plan, self.planned.config)
        if baseline.note:
            self.notes.append(baseline.note)
        yield from measure_baseline(baseline)

    def _prepare(self, recipe: Recipe) -> Deployment:
        deployment = prepare(recipe, self.progress, needs_model=True)
        freeze_gc_after_startup()  # as `serve` does: full collections would be part of the measurements
        return deployment


def start_session(recipe: Recipe, settings: BenchSettings, progress: Progress) -> Session:
    """Plan, check the settings against the plan (raises UsageError), and measure the machine's rates."""
    planned = decide(recipe)
    settings.check_against_plan(planned.plan)
    progress.stage("floor")
    return Session(recipe, settings, progress, planned, measure_rates(planned.plan.device, planned.plan.compute_dtype))


def make_report(session: Session, command: str, settings: Any, rows: Sequence[Row], **extra: Any) -> Report:
    """A report with the environment, plan, settings and measured rates of the session."""
    environment, plan = describe_environment(session.planned.environment), describe_plan(session.planned.plan)
    extra = {"machine": dataclasses.asdict(session.rates), "notes": session.notes, **extra}
    return Report(command, environment, plan, dataclasses.asdict(settings), rows, extra)


def region_recipe(recipe: Recipe) -> Recipe:
    """Regional compilation as commonly documented: attention and MLP compiled apart, with Inductor's CUDA graphs."""
    return dataclasses.replace(recipe, region="blocks", graphs="region", mode="reduce-overhead", programs="jit")
