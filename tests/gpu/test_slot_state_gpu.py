"""State in slots within CUDA graphs: the model of tests/running_sum.py, with captured decode and mixed steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.stances import fail_on_recompile
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine.test_continuous_batching import check_random_traffic
from tests.engine_loop import generate_tokens
from tests.gpu.test_gpu import PROMPTS, deploy
from tests.running_sum import HYBRID, SUMS_ONLY, register, save_model, unregister

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    unregister()


def check_captured_steps(model: str, cache_dir: str, shapes: str, expected: list[list[int]]) -> None:
    """In float32, with chunked prompts and mixed steps; graphs of further sizes are captured while the engine is idle.

    In the last round, slots of new sequences contain NaN. expected: 30 tokens for each of PROMPTS.
    """
    flags = {"buckets": (128,)} if shapes == "dynamic" else {}
    deployment = deploy(model, cache_dir, dtype="float32", graphs="step", shapes=shapes, mixed_steps="on", **flags)
    engine = deployment.engine
    assert all(record.captured and record.parity.passed for record in deployment.records)
    with measure_compiles() as serving, fail_on_recompile():
        for _ in range(2):
            assert generate_tokens(engine, PROMPTS, SamplingParams(max_tokens=30)) == expected
        while engine.capture_next_graph():
            pass
        assert run_round(recorded_canary(engine)) == []
        engine.allocator.reset_prefix_cache()
        for tensor in engine.runner.slot_states.tensors:
            tensor.fill_(float("nan"))
        assert generate_tokens(engine, PROMPTS, SamplingParams(max_tokens=30)) == expected
    assert serving.counts.compiles == 0
    check_random_traffic(engine, 60)


@pytest.mark.parametrize("layers", [HYBRID, SUMS_ONLY], ids=["hybrid", "sums only"])
@pytest.mark.parametrize("shapes", ["bucket", "dynamic"])
def test_captured_steps_give_the_tokens_of_generate(
    cache_dir: str, tmp_path: Path, layers: tuple[str, ...], shapes: str
) -> None:
    model = save_model(tmp_path / "model", layers)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected = [
        reference.generate(
            torch.tensor([prompt]), max_new_tokens=30, do_sample=False, use_cache=False, eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]  # fmt: skip
    check_captured_steps(model, cache_dir, shapes, expected)
