"""`tcdeploy explain`: traces the regions of a model, and measures whether compiling them pays.

The model is started first, as by `compile`, so that its programs are in the cache folder and its steps are timed. The
regions are traced on the same model afterwards: a start must come first in its process, or kernels that are already in
memory would be missing in the manifest. If the start fails, the model is loaded again, without compiling.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.warm.program_setup import regions_of
from tcdeploy.errors import CompileError, UnsupportedModelError
from tcdeploy.explain.break_even import Payoff, compute_payoff
from tcdeploy.explain.eager_cost import explain_refusal, with_costs
from tcdeploy.explain.findings import COMPILE_ERROR, Finding, RegionTrace, make_finding
from tcdeploy.explain.kernels import BucketKernels, measure_kernels
from tcdeploy.explain.source_line import SourceLine
from tcdeploy.explain.tracing import trace_regions
from tcdeploy.host.progress import Progress
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.deployment import release_memory
from tcdeploy.start.model_code import load_uncompiled
from tcdeploy.start.prepare import prepare

NOT_REQUESTED = "not requested (--no-measure)"


@dataclass(frozen=True)
class Explanation:
    """The result. If the model cannot be planned, `regions` is empty and there is one finding."""

    model: str
    regions: tuple[RegionTrace, ...]
    findings: tuple[Finding, ...]
    payoff: Payoff | None
    not_measured: str  # why the steps were not timed, if there is no payoff
    kernels: tuple[BucketKernels, ...]


def explain(recipe: Recipe, progress: Progress, measures: bool = True, profiles: bool = False) -> Explanation:
    """`measures`: start the model and time its steps. `profiles`: also profile its kernels; requires `measures`.

    Raises TcdeployError. A model that cannot be compiled is not an error, but a finding.
    """
    try:
        explanation = _explain_started(recipe, progress, profiles) if measures else _explain_loaded(recipe, progress)
    except UnsupportedModelError as error:
        refusal = explain_refusal(recipe, error)
        if refusal is None:
            raise
        explanation = Explanation(recipe.model, (), (refusal,), None, "the model cannot be started", ())
    findings = tuple(_in_model_folder(finding, recipe.model) for finding in explanation.findings)
    return dataclasses.replace(explanation, findings=findings)


def _explain_started(recipe: Recipe, progress: Progress, profiles: bool) -> Explanation:
    failure: tuple[str, str] | None = None
    try:
        deployment = prepare(recipe, progress, measure=True)
    except CompileError as error:
        failure = error.message, error.hint
    if failure is None:
        plan, runner = deployment.plan, deployment.engine.runner
        if profiles:
            progress.stage("profile")
        kernels = tuple(measure_kernels(runner, bucket) for bucket in plan.buckets) if profiles else ()
        regions, findings = _trace(runner, deployment.planned.architecture, progress)
        return Explanation(plan.model, regions, findings, compute_payoff(plan, deployment.records), "", kernels)
    release_memory()  # outside the handler: the exception refers to the model
    explanation = _explain_loaded(recipe, progress, "the model cannot be compiled")
    if any(finding.is_blocking for finding in explanation.findings):
        return explanation
    message, hint = failure
    cure = "cure the other findings first" if explanation.findings else hint or COMPILE_ERROR.cure
    failed = make_finding("error", COMPILE_ERROR, "", "", "", SourceLine(), message, True)
    findings = (dataclasses.replace(failed, cure=cure), *explanation.findings)
    return dataclasses.replace(explanation, findings=findings)


def _explain_loaded(recipe: Recipe, progress: Progress, not_measured: str = NOT_REQUESTED) -> Explanation:
    planned, runner = load_uncompiled(recipe, progress)
    regions, findings = _trace(runner, planned.architecture, progress)
    return Explanation(recipe.model, regions, findings, None, not_measured, ())


def _trace(
    runner: ModelRunner, architecture: Architecture, progress: Progress
) -> tuple[tuple[RegionTrace, ...], tuple[Finding, ...]]:
    regions = regions_of(runner.model, runner.plan, architecture)
    progress.stage("trace")
    traces, findings = trace_regions(runner, regions)
    return tuple(traces), tuple(with_costs(runner, regions, findings))


def _in_model_folder(finding: Finding, model: str) -> Finding:
    """The finding; if its file is transformers' copy of a file in the model's folder, with the path of the original."""
    copied = finding.location.file
    original = Path(model, Path(copied).name)
    if not copied or not Path(model).is_dir():
        return finding
    with contextlib.suppress(OSError):
        if original.read_bytes() == Path(copied).read_bytes():
            return dataclasses.replace(finding, location=dataclasses.replace(finding.location, file=str(original)))
    return finding
