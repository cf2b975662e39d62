"""Recompilations of small modules by cause, and what is not one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tcdeploy.explain.findings import Finding
from tcdeploy.explain.tracing import findings_of, merge_findings, trace_phase
from tcdeploy.kernels.attention.metadata import StepHolder
from tcdeploy.programs.regions import Region
from tcdeploy.torch_compat.dynamo.compiled_call import get_compiled_call


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, kind: str = "full") -> Tensor:
        return x * self.scale if kind == "full" else x + self.scale


class Unsupported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError  # of the model, not of torch's compiler


def explain(modules: list[nn.Module], *steps: Callable[[], object]) -> list[Finding]:
    regions = [Region("layer/0", module) for module in modules]
    with torch.no_grad():
        trace = trace_phase(regions, steps, StepHolder())
    assert trace.first_call_graphs == 1 and trace.first_call_guards > 0
    return merge_findings(findings_of(trace, regions[0], "model.layers.0", "decode", is_dynamic=False))


def run(modules: list[nn.Module], x: Tensor) -> Callable[[], object]:
    def step() -> None:
        for module in modules:
            module(x)

    return step


def test_layers_with_a_constant_of_their_own_need_a_program_each() -> None:
    layers: list[nn.Module] = [Scaled(0.5), Scaled(0.25), Scaled(0.125)]
    [finding] = explain(layers, run(layers, torch.ones(2, 3)))
    assert (finding.kind, finding.cause, finding.count) == ("recompilation", "value-guard", 2)
    assert finding.location.code == 'return x * self.scale if kind == "full" else x + self.scale'
    assert "scale == " in finding.torch_reason and not finding.is_blocking


def test_a_tensor_of_another_dtype_needs_a_program() -> None:
    layers: list[nn.Module] = [Scaled(0.5)]
    steps = [run(layers, torch.ones(2, 3)), run(layers, torch.ones(2, 3, dtype=torch.float64))]
    [finding] = explain(layers, *steps)
    assert (finding.cause, finding.location.file) == ("tensor-guard", "")


def test_equal_layers_and_later_steps_share_a_program() -> None:
    layers: list[nn.Module] = [Scaled(0.5), Scaled(0.5)]
    assert explain(layers, run(layers, torch.ones(2, 3)), run(layers, torch.zeros(2, 3))) == []


def test_a_module_that_runs_twice_in_a_step_may_have_two_programs() -> None:
    """As the rotary factors of a model with two kinds of layers."""
    module = Scaled(0.5)

    def step() -> None:
        module(torch.ones(2, 3), "full")
        module(torch.ones(2, 3), "sliding")

    assert explain([module], step, step) == []


def test_the_modules_run_their_own_code_afterwards() -> None:
    module = Unsupported()
    with pytest.raises(NotImplementedError):  # an error of the model is raised
        trace_phase([Region("layer/0", module)], [run([module], torch.ones(2))], StepHolder())
    assert get_compiled_call(module) is None
