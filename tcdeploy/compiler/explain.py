"""Where and why tracing breaks: one line per graph break, with the line of source that caused it.

Each kind of region is called once, eagerly, to catch its real arguments (transformers hands some layers a None where
others get a tensor); torch._dynamo.explain then traces it with them and lists its breaks.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tcdeploy.torch_compat.dynamo_explain import break_reasons


class GraphBreak(NamedTuple):
    """A graph break: `file` and `line` are empty and 0 where torch names none."""

    region: str
    reason: str
    file: str
    line: int
    source: str


def explain_regions(regions: list[nn.Module], run_once: Callable[[], object]) -> list[GraphBreak]:
    """Breaks of one region of each class; `run_once` makes a step of the uncompiled model."""
    kinds = {type(region): region for region in reversed(regions)}
    arguments: dict[type, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def capture_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments[type(module)] = (args, kwargs)

    hooks = [region.register_forward_pre_hook(capture_arguments, with_kwargs=True) for region in kinds.values()]
    try:
        run_once()
    finally:
        for hook in hooks:
            hook.remove()
    return [
        found for kind, region in kinds.items() if kind in arguments for found in _explain(region, *arguments[kind])
    ]


@torch.no_grad()
def _explain(region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[GraphBreak]:
    torch.compiler.reset()
    return [_to_graph_break(type(region).__name__, reason) for reason in break_reasons(region.forward, args, kwargs)]


def _to_graph_break(region: str, reason: Any) -> GraphBreak:
    text = str(reason.reason).strip().split("\n")[0]
    if not reason.user_stack:
        return GraphBreak(region, text, "", 0, "")
    frame = reason.user_stack[-1]
    return GraphBreak(
        region, text, frame.filename, frame.lineno, linecache.getline(frame.filename, frame.lineno).strip()
    )
