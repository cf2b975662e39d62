"""Compiles packages and returns outputs without values instead of running them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from tcdeploy.planning.variants import Variant
from tcdeploy.programs.aot import AotForward
from tcdeploy.programs.step_program import RunProgram
from tcdeploy.torch_compat.blind.fake_cuda import without_fake_mode


class BlindForward(AotForward):
    """An AotForward whose packages cannot be loaded on this machine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._outputs: dict[str, list[Tensor]] = {}  # of each package, with symbolic shapes

    def _provide_package(self, name: str, exported: ExportedProgram, variant: Variant) -> None:
        [output] = exported.graph.find_nodes(op="output")
        self._outputs[name] = [node.meta["val"] for node in output.args[0]]  # type: ignore[union-attr]
        with without_fake_mode():  # the exported program has fake tensors of its own
            super()._provide_package(name, exported, variant)

    def _load_package(self, name: str) -> RunProgram:
        def run(inputs: list[Tensor]) -> list[Tensor]:
            inputs.clear()
            return [
                torch.empty(list(map(_size, output.shape)), dtype=output.dtype, device=output.device)
                for output in self._outputs[name]
            ]

        return run


def _size(dim: Any) -> int:
    """The size of a dimension. If it is symbolic, the size in the exported step."""
    return int(getattr(getattr(dim, "node", None), "hint", dim))
