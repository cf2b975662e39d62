"""What `explain` reports: regions, findings with their costs, and kernels. Plain data; does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tcdeploy.explain.causes import Cause
from tcdeploy.explain.source_line import SourceLine

Kind = Literal["graph break", "recompilation", "input mutation", "error"]


@dataclass(frozen=True)
class RegionTrace:
    """How regions of one kind were traced.

    graphs: number of graphs of one call; 1 without graph breaks.
    guards: conditions on inputs and modules that torch checks before it runs the programs of one call.
    recompilations: in calls of all modules of the kind, with several prompt lengths; not counted if there is a break.
    """

    kind: str
    type: str
    modules: int
    graphs: dict[str, int]  # by phase
    guards: dict[str, int]
    recompilations: dict[str, int]


@dataclass(frozen=True)
class EagerCost:
    """Median milliseconds of one uncompiled step of a bucket, and of its parts.

    region_ms: all regions of the finding's kind, which stay uncompiled until the finding is cured.
    module_ms: the modules with the line, in all layers; None if the line is not in a submodule of the region.
    """

    bucket: str
    step_ms: float
    region_ms: float
    module: str
    module_ms: float | None

    @property
    def region_share(self) -> float:
        return self.region_ms / self.step_ms

    @property
    def module_share(self) -> float | None:
        return None if self.module_ms is None else self.module_ms / self.step_ms


@dataclass(frozen=True)
class Finding:
    """One cause at one line. `is_blocking`: the region cannot be compiled until the finding is cured."""

    kind: Kind
    cause: str
    title: str
    region: str  # kind of the region
    module: str  # path of the region's first module
    phases: tuple[str, ...]
    location: SourceLine
    meaning: str
    cure: str
    torch_reason: str
    is_blocking: bool
    count: int = 1  # recompilations in all calls; other findings are not counted
    costs: tuple[EagerCost, ...] = field(default=())


def make_finding(
    kind: Kind,
    cause: Cause,
    region: str,
    module: str,
    phase: str,
    location: SourceLine,
    torch_reason: str,
    is_blocking: bool,
) -> Finding:
    return Finding(
        kind, cause.name, cause.title, region, module, (phase,), location, cause.meaning, cause.cure, torch_reason,
        is_blocking,
    )  # fmt: skip
