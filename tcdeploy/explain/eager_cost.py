"""The cost of findings: the time that regions and modules take in uncompiled steps. Also finds what prevents a plan.

Hooks take timestamps when a module begins and ends; on a GPU these are events on the device's stream. A hook takes
microseconds, so the shares are those of the model's own time, but a step takes a little longer than without hooks.

A model that cannot be planned has one finding. A start runs every model once on meta or fake tensors (models/probe.py),
which have sizes but no values. A model that reads values fails there, before anything is traced. The exception's
traceback contains the line, and its frames the modules. The cost is then measured on transformers' own model with
random weights, for one prompt, unless the model is large.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from tcdeploy.bench.stats import median
from tcdeploy.bench.timing import Timestamps
from tcdeploy.engine.check.inputs import make_timing_batch
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.errors import UnsupportedModelError
from tcdeploy.explain.findings import BREAK_CAUSES, Cause, EagerCost, Finding, make_finding
from tcdeploy.explain.source_line import model_line, read_frames
from tcdeploy.models.auto_classes import auto_class
from tcdeploy.models.load import load_config, quiet_transformers
from tcdeploy.models.load_errors import exception_chain
from tcdeploy.models.probe_failure import SIZE_ERROR, VALUE_ERROR
from tcdeploy.models.refusals import has_final_reason
from tcdeploy.planning.recipe import Recipe
from tcdeploy.programs.regions import Region

REPEATS = 3
CONDITION = re.compile(r"^(if|elif|while|assert)\b|\bif\b.+\belse\b|\b(and|or|not)\b")
CAUSES = {cause.name: cause for cause in BREAK_CAUSES}
MAX_PARAMETERS = 500_000_000  # of a model that is built to measure the cost: 2 GB in float32
PROMPT_TOKENS = 32


class CallSeconds(NamedTuple):
    """Median seconds of a step, and of all calls of a module in it."""

    step: float
    by_module: dict[int, float]  # by id

    def cost(
        self, bucket: str, finding: Finding, regions: Sequence[nn.Module] | None, modules: Sequence[nn.Module]
    ) -> EagerCost:
        """`regions`: None: the whole step. `modules`: those with the finding's line, if it is in a submodule."""
        step_ms = self.step * 1e3
        region_ms = step_ms if regions is None else self._total_ms(regions)
        return EagerCost(bucket, step_ms, region_ms, finding.module, self._total_ms(modules) if modules else None)

    def _total_ms(self, modules: Sequence[nn.Module]) -> float:
        return sum(self.by_module.get(id(module), 0.0) for module in modules) * 1e3


def with_costs(runner: ModelRunner, regions: Sequence[Region], findings: Sequence[Finding]) -> list[Finding]:
    """The findings, with measured costs for those that are blocking. The runner's steps must run uncompiled."""
    groups = {
        number: _modules_of(runner.model, regions, finding)
        for number, finding in enumerate(findings)
        if finding.is_blocking
    }
    timed = {id(module): module for group in groups.values() for part in group for module in part}
    costs: dict[int, tuple[EagerCost, ...]] = defaultdict(tuple)
    for bucket in (runner.plan.prefill_buckets[0], runner.plan.decode_buckets[0]) if groups else ():
        batch = make_timing_batch(runner, bucket)
        with runner.uncounted_steps():
            seconds = measure_calls(batch.run, list(timed.values()), runner.plan.device)
        for number, (members, modules) in groups.items():
            if bucket.phase in findings[number].phases:
                costs[number] += (seconds.cost(bucket.name, findings[number], members, modules),)
    return [dataclasses.replace(finding, costs=costs[number]) for number, finding in enumerate(findings)]


def _modules_of(
    model: nn.Module, regions: Sequence[Region], finding: Finding
) -> tuple[list[nn.Module], list[nn.Module]]:
    """The regions of the finding's kind, and the submodule of each that contains the line, if there is one."""
    members = [region.module for region in regions if region.kind == finding.region]
    path = next(path for path, module in model.named_modules() if module is members[0])
    relative = finding.module.removeprefix(path).removeprefix(".")
    return members, [module.get_submodule(relative) for module in members] if relative else []


def measure_calls(step: Callable[[], object], modules: Sequence[nn.Module], device: str) -> CallSeconds:
    """Time a step and the calls of the modules in it, after one step that is not timed."""
    marks: list[tuple[int, bool]] = []  # id of a module, or 0 for the step; and whether it begins
    clock: list[Timestamps] = []

    def mark(owner: int, begins: bool) -> None:
        marks.append((owner, begins))
        clock[0].record()

    step()
    runs: dict[int, list[float]] = defaultdict(list)
    hooks = [module.register_forward_pre_hook(lambda module, args: mark(id(module), True)) for module in modules]
    hooks += [module.register_forward_hook(lambda module, args, output: mark(id(module), False)) for module in modules]
    try:
        for _ in range(REPEATS):
            marks.clear()
            clock[:] = [Timestamps(device)]
            mark(0, True)
            step()
            mark(0, False)
            for owner, seconds in _durations(marks, clock[0].seconds()).items():
                runs[owner].append(seconds)
    finally:
        for hook in hooks:
            hook.remove()
    medians = {owner: median(seconds) for owner, seconds in runs.items()}
    return CallSeconds(medians.pop(0), medians)


def _durations(marks: Sequence[tuple[int, bool]], times: Sequence[float]) -> dict[int, float]:
    """Seconds by module. `times`: the last `len(marks)` belong to the marks; `Timestamps` records the ones before."""
    begins: dict[int, float] = {}
    durations: dict[int, float] = defaultdict(float)
    for (owner, is_begin), seconds in zip(marks, times[-len(marks) :], strict=True):
        if is_begin:
            begins[owner] = seconds
        else:
            durations[owner] += seconds - begins[owner]
    return durations


def explain_refusal(recipe: Recipe, error: UnsupportedModelError) -> Finding | None:
    """The line that reads values of tensors, with its cost; None if no change of the model's code would help."""
    if has_final_reason(error):
        return None
    for cause in exception_chain(error):
        if type(cause).__name__ in (VALUE_ERROR, SIZE_ERROR):
            return _explain(recipe, cause)
    return None


def _explain(recipe: Recipe, error: BaseException) -> Finding:
    name = type(error).__name__
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]  # whose methods are in the frames
    location = model_line(read_frames(traceback.extract_tb(error.__traceback__)))
    path = next((path for path, module in modules[0].named_modules() if module is modules[-1]), "") if modules else ""
    reason = f"{name}: {next(iter(str(error).strip().splitlines()), '')}"
    finding = make_finding("graph break", _classify(name, location.code), "", path, "", location, reason, True)
    num_parameters = sum(parameter.numel() for parameter in modules[0].parameters()) if modules else 0
    return _with_measured_cost(recipe, finding) if 0 < num_parameters <= MAX_PARAMETERS else finding


def _classify(error: str, code: str) -> Cause:
    if error == SIZE_ERROR:
        return CAUSES["data-dependent-shape"]
    return CAUSES["data-dependent-branch" if CONDITION.search(code) else "scalar-read"]


def _with_measured_cost(recipe: Recipe, finding: Finding) -> Finding:
    """The finding, with the time of the modules that contain the line."""
    config = load_config(recipe)
    with quiet_transformers():
        model = (
            auto_class(config, recipe.trust_remote_code)
            .from_config(config, dtype=torch.float32, trust_remote_code=recipe.trust_remote_code)
            .eval()
        )
    pattern = re.compile(re.sub(r"\\\.\d+(?=\\\.|$)", r"\\.\\d+", re.escape(finding.module)))
    modules = [module for path, module in model.named_modules() if path and pattern.fullmatch(path)]
    input_ids = torch.arange(PROMPT_TOKENS)[None] % model.get_input_embeddings().num_embeddings
    with torch.no_grad():
        seconds = measure_calls(lambda: model(input_ids=input_ids, use_cache=False), modules, "cpu")
    cost = seconds.cost(f"prompt of {PROMPT_TOKENS} tokens", finding, None, modules)
    return dataclasses.replace(finding, costs=(cost,))
