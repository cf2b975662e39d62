"""Reports where and why tracing breaks: one line per graph break, with the line of source that caused it.

Each kind of region is called once, uncompiled, to record its real arguments (transformers passes None to some layers
and a tensor to others). Dynamo then traces the region with these arguments and lists the graph breaks.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tcdeploy.attention.metadata import Step, StepHolder
from tcdeploy.compiler.regions import Region
from tcdeploy.torch_compat.dynamo_explain import break_reasons


class GraphBreak(NamedTuple):
    """A graph break. `file` and `line` are empty and 0 if torch names no source line."""

    region: str
    reason: str
    file: str
    line: int
    source: str


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step: Step | None


def explain_regions(regions: list[Region], step_holder: StepHolder, run_once: Callable[[], object]) -> list[GraphBreak]:
    """The graph breaks of one region of each kind. `run_once` runs a step of the uncompiled model."""
    modules = {region.kind: region.module for region in reversed(regions)}
    calls: dict[nn.Module, _Call] = {}

    def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module] = _Call(args, kwargs, step_holder.step)

    hooks = [module.register_forward_pre_hook(record_call, with_kwargs=True) for module in modules.values()]
    try:
        run_once()
    finally:
        for hook in hooks:
            hook.remove()
    return [
        graph_break
        for module in modules.values()
        if module in calls
        for graph_break in _explain(module, calls[module], step_holder)
    ]


@torch.no_grad()
def _explain(module: nn.Module, call: _Call, step_holder: StepHolder) -> list[GraphBreak]:
    torch.compiler.reset()
    step_holder.step = call.step
    reasons = break_reasons(module.forward, call.args, call.kwargs)
    step_holder.step = None
    return [_to_graph_break(type(module).__name__, reason) for reason in reasons]


def _to_graph_break(region: str, reason: Any) -> GraphBreak:
    text = str(reason.reason).strip().split("\n")[0]
    if not reason.user_stack:
        return GraphBreak(region, text, "", 0, "")
    frame = reason.user_stack[-1]
    source = linecache.getline(frame.filename, frame.lineno).strip()
    return GraphBreak(region, text, frame.filename, frame.lineno, source)
