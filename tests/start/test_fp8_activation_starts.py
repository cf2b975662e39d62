"""Models whose layers quantise inputs start, and the parity check compares them with a reference that rounds.

Plans quantise inputs on GPUs only, so the decision is replaced. On a CPU the same programs run, with a product of codes
in float32. Decode batches of 4 rows keep their inputs, and those of 20 do not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from tcdeploy.engine.check import rounded_inputs
from tcdeploy.engine.check.parity_check import FAILED, ParityChecker
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import CompileError
from tcdeploy.kernels.linear import fp8_scheme
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.planning import plan as planning
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.programs.passes import fp8_inputs
from tcdeploy.programs.passes.nodes import insert_call
from tcdeploy.start.eager import check_eager_steps
from tcdeploy.start.model_code import load_uncompiled
from tcdeploy.start.prepare import prepare
from tests.conftest import TINY, reset_programs
from tests.engine_loop import generate_tokens
from tests.exported_programs import exported_programs

MIN_ROWS = 17
FLAGS: dict[str, Any] = {
    "buckets": (64,), "batch_sizes": (4, 20), "dtype": "bfloat16", "quantize": "fp8", "context": 128, "kv_blocks": 192,
}  # fmt: skip
PROMPTS = [list(range(40, 90)), [5, 6, 7]]


@pytest.fixture(autouse=True)
def quantising(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "decide_fp8_min_rows", lambda *_: MIN_ROWS)


def recipe(cache_dir: Path | str, **flags: Any) -> Any:
    return build_recipe({"model": TINY, "cache_dir": str(cache_dir), **FLAGS, **flags}, environ={})


def eager_engine(cache_dir: Path, **flags: Any) -> Engine:
    """An engine of uncompiled steps that have passed their check."""
    planned, runner = load_uncompiled(recipe(cache_dir, **flags))
    for bucket in planned.plan.buckets:
        runner.run_eagerly(bucket)
    check_eager_steps(runner, ParityChecker(runner, planned.architecture, planned.config))
    return Engine(runner)


def test_programs_pass_their_check_and_a_later_start_compiles_nothing(cache_dir: str) -> None:
    first = prepare(recipe(cache_dir, batch_sizes=(20,)))
    assert [record.outcome for record in first.records] == ["miss"] * 2
    layers = [module for module in first.engine.runner.model.modules() if isinstance(module, SchemeLinear)]
    assert layers and all(layer.fp8_min_rows == MIN_ROWS for layer in layers)
    tokens = generate_tokens(first.engine, PROMPTS, SamplingParams(max_tokens=12))
    again = prepare(recipe(cache_dir, batch_sizes=(20,)), needs_model=True)
    assert [(record.outcome, record.compiles) for record in again.records] == [("reused", 0)] * 2
    assert generate_tokens(again.engine, PROMPTS, SamplingParams(max_tokens=12)) == tokens


def test_packages_quantise_inputs_and_pass_their_check(tmp_path: Path) -> None:
    """A start from packages fills the KV cache with prefill packages, which quantise too."""
    with exported_programs():
        first = prepare(recipe(tmp_path, programs="aot"))
        again = prepare(recipe(tmp_path, programs="aot"))
        assert first.engine.runner.has_model and not again.engine.runner.has_model
        assert [(record.outcome, record.compiles) for record in again.records] == [("hit", 0)] * 3


def test_eager_steps_pass_their_check(tmp_path: Path) -> None:
    eager_engine(tmp_path)


def test_a_short_prefill_quantises_as_a_long_one(tmp_path: Path) -> None:
    engine = eager_engine(tmp_path)
    layer = next(module for module in engine.runner.model.modules() if isinstance(module, SchemeLinear))
    seen: list[int] = []
    real = fp8_scheme.quantise_inputs

    def record(scheme: str, x: Tensor) -> Any:
        seen.append(x.shape[:-1].numel())
        return real(scheme, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_scheme, "quantise_inputs", record)
        generate_tokens(engine, [[5, 6, 7]], SamplingParams(max_tokens=3))
    assert layer.fp8_min_rows == MIN_ROWS
    assert seen and set(seen) <= {3, 64}, "decode steps of one row keep their inputs"


# Faults


def without_scales(function: Callable[..., Any]) -> Callable[..., Any]:
    def change(scheme: str, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = function(scheme, x)
        return codes, torch.full_like(scales, 1 / 32)

    return change


def with_scales_of_the_next_token(function: Callable[..., Any]) -> Callable[..., Any]:
    def change(scheme: str, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = function(scheme, x)
        return codes, scales.roll(1, -2)

    return change


def two_bits_of_mantissa(function: Callable[..., Any]) -> Callable[..., Any]:
    def change(scheme: str, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = function(scheme, x)
        return codes.float().to(torch.float8_e5m2).to(codes.dtype), scales

    return change


@pytest.mark.parametrize("plant", [without_scales, with_scales_of_the_next_token, two_bits_of_mantissa])
def test_a_fault_of_eager_steps_fails_the_check(plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_scheme, "quantise_inputs", plant(fp8_scheme.quantise_inputs))
    with pytest.raises(CompileError, match=FAILED):
        eager_engine(tmp_path)


def test_a_reference_that_does_not_round_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_inputs, "_round", lambda mask, layer, inputs: None)
    with pytest.raises(CompileError, match=FAILED):
        eager_engine(tmp_path)


def test_a_fault_of_programs_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of codes are multiplied by the scales of the weight, but not by those of the inputs."""
    insert_codes = fp8_inputs._insert_codes

    def without_scales_of_inputs(graph: Graph, x: Node, group: int) -> Any:
        codes = insert_codes(graph, x, group)
        zeros = insert_call(graph, torch.ops.aten.mul.Tensor, codes.scales, 0.0)
        return codes._replace(scales=insert_call(graph, torch.ops.aten.add.Tensor, zeros, 1 / 32))

    monkeypatch.setattr(fp8_inputs, "_insert_codes", without_scales_of_inputs)
    reset_programs()  # torch would use the programs of an earlier test, whose pass was right
    with pytest.raises(CompileError, match=f"prefill:64 {FAILED}"):
        prepare(recipe(tmp_path, batch_sizes=(4,)))
