"""Ahead-of-time packages without Inductor: a package is the exported program, which runs operation by operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from tcdeploy.programs import aot, packages


@contextmanager
def exported_programs() -> Iterator[None]:
    """Packages written meanwhile are empty files. Loading one runs the graph of its program, which holds no tensors."""
    graphs: dict[str, torch.fx.GraphModule] = {}

    def start_package(exported: torch.export.ExportedProgram, path: str, inductor_config: object) -> Future[None]:
        assert_finite_constants(exported.graph_module)
        graphs[program_name(path)] = exported.graph_module
        Path(path).touch()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def load_package(path: str, *_: object) -> Callable[[list[Tensor]], list[Tensor]]:
        def run(inputs: list[Tensor]) -> list[Tensor]:
            outputs = list(graphs[program_name(path)](*inputs))
            inputs.clear()
            return outputs

        return run

    with patch.object(aot, "start_package", start_package), patch.object(packages, "load_package", load_package):
        yield


def assert_finite_constants(graph: torch.fx.GraphModule) -> None:
    """Packages hold the constants of custom ops as JSON: torch writes infinity to it, and cannot load that package."""
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") == "tcdeploy":
            constants = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, float)]
            assert all(map(math.isfinite, constants)), node.format_node()


def program_name(package: str) -> str:
    return Path(package).name.partition(".")[0]
