"""Inputs in FP8 on a GPU: products of codes in captured steps, against the reference that rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.kernels.linear import fp8_inputs
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.stances import fail_on_recompile
from tests.conftest import TINY
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine_loop import generate_tokens
from tests.gpu.test_gpu import PROMPTS, deploy
from tests.machines import decision_named

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 tensor cores"
    ),
]
FLAGS: dict[str, Any] = {"dtype": "bfloat16", "quantize": "fp8", "batch_sizes": (1, 4, 32)}


@pytest.mark.parametrize("programs", ["jit", "aot"])
@pytest.mark.parametrize("shapes", ["bucket", "dynamic"])
def test_captured_steps_pass_their_check_and_repeat(programs: str, shapes: str, cache_dir: str) -> None:
    flags = {**FLAGS, **({"buckets": (128,)} if shapes == "dynamic" else {"buckets": (32, 128)})}
    deployment = deploy(TINY, cache_dir, programs=programs, shapes=shapes, mixed_steps="on", **flags)
    assert deployment.plan.fp8_min_rows == 17
    assert decision_named(deployment.plan, "activations").reason.startswith("--quantize fp8 quantises them too")
    assert all(record.captured and record.parity.passed for record in deployment.records)
    with measure_compiles() as serving, fail_on_recompile():
        answers = generate_tokens(deployment.engine, PROMPTS, SamplingParams(max_tokens=30))
        assert run_round(recorded_canary(deployment.engine)) == []
    assert serving.counts.compiles == 0 and max(map(len, answers)) > 1


def test_programs_multiply_codes_only_if_the_plan_says_so(cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    right = fp8_inputs.scaled_product

    def record(codes: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(codes))
        return right(codes, *rest)

    monkeypatch.setattr(fp8_inputs, "scaled_product", record)
    assert deploy(TINY, cache_dir, fp8_activations="off", **FLAGS).plan.fp8_min_rows == 0
    assert rows == []
    deploy(TINY, cache_dir, **FLAGS)
    assert 32 in rows
