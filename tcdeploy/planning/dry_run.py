"""Makes the plan of a dry run, and lists what the machine lacks for it. Does not import torch.

`--dry-run` answers whether a model would be served, for example in CI on a host that cannot serve it. Where a start
raises MemoryShortage, it makes the plan of the same machine with just enough memory, and reports the shortage.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from tcdeploy.errors import MemoryShortage
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.decision import Decision
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.memory import gib
from tcdeploy.planning.plan import Plan, make_plan
from tcdeploy.planning.recipe import Recipe

MAX_SHORTAGES = 8  # a plan for more memory may have larger buckets, which need more again


@dataclass(frozen=True)
class PlanFinding:
    """Why this machine cannot run a plan. The bytes are those of the GPU or the host; None unless memory is short."""

    name: str
    message: str
    hint: str
    needed_bytes: int | None = None
    available_bytes: int | None = None


class DryRunPlan(NamedTuple):
    """A plan with the recipe and the environment that it is for, which differ from the requested ones by `findings`."""

    plan: Plan
    recipe: Recipe
    environment: Environment
    findings: tuple[PlanFinding, ...]


def plan_with_findings(
    recipe: Recipe, environment: Environment, architecture: Architecture, model_decisions: tuple[Decision, ...] = ()
) -> DryRunPlan:
    """As `make_plan`, also for a machine without the GPU or the memory that the recipe needs.

    Raises UsageError for other contradictory requests.
    """
    findings: list[PlanFinding] = []
    if recipe.device == "cuda" and not environment.gpus:
        message = "device cuda was requested, but torch sees no GPU; this plan is for the CPU"
        findings.append(PlanFinding("device", message, "use a machine with a GPU; tcdeploy doctor checks it"))
        recipe = dataclasses.replace(recipe, device="cpu")
    shortage: MemoryShortage | None = None
    for _ in range(MAX_SHORTAGES):
        try:
            plan = make_plan(recipe, environment, architecture, model_decisions)
        except MemoryShortage as error:
            shortage = shortage or error
            needed_bytes = error.needed_bytes
            environment = with_memory(environment, recipe, needed_bytes)
            continue
        if shortage is not None:
            needed, available = gib(needed_bytes), gib(shortage.available_bytes)
            message = f"{shortage.message}; this plan needs {needed} of memory, and {available} are available"
            finding = PlanFinding("memory", message, shortage.hint, needed_bytes, shortage.available_bytes)
            findings.append(finding)
        return DryRunPlan(plan, recipe, environment, tuple(findings))
    assert shortage is not None
    raise shortage


def with_memory(environment: Environment, recipe: Recipe, memory_bytes: int) -> Environment:
    """The machine with `memory_bytes` of memory: in its first GPU if the recipe is for a GPU, else in the host."""
    if recipe.device == "cpu" or not environment.gpus:
        return dataclasses.replace(environment, host_memory_bytes=memory_bytes)
    first = dataclasses.replace(environment.gpus[0], memory_bytes=memory_bytes)
    return dataclasses.replace(environment, gpus=(first, *environment.gpus[1:]))
