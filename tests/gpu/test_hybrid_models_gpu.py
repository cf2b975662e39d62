"""Models with state in slots, in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.stances import fail_on_recompile
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine_loop import generate_tokens
from tests.gpu.test_gpu import PROMPTS, deploy
from tests.gpu.test_slot_state_gpu import check_captured_steps
from tests.hybrid_models import FAMILIES, answers, save_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shapes", ["bucket", "dynamic"])
def test_captured_steps_give_the_tokens_of_generate(cache_dir: str, tmp_path: Path, family: str, shapes: str) -> None:
    model = save_model(family, tmp_path / "model")
    check_captured_steps(model, cache_dir, shapes, answers(model, PROMPTS, 30))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_passes_the_parity_check(cache_dir: str, tmp_path: Path, family: str) -> None:
    """With the head sizes of published models where the config has them, as the tuning constants are for these.

    A token is sent to all experts: in bfloat16, the choice between two of nearly equal scores may differ.
    """
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128} if family.startswith("qwen3") else {}
    if "num_experts_per_tok" in FAMILIES[family]:
        sizes["num_experts_per_tok"] = 4
    model = save_model(family, tmp_path / "model", **sizes)
    deployment = deploy(model, cache_dir, dtype="bfloat16", graphs="step", mixed_steps="on")
    engine = deployment.engine
    assert all(record.captured and record.parity.passed for record in deployment.records)
    with measure_compiles() as serving, fail_on_recompile():
        tokens = generate_tokens(engine, PROMPTS, SamplingParams(max_tokens=30))
        engine.allocator.reset_prefix_cache()
        assert generate_tokens(engine, PROMPTS, SamplingParams(max_tokens=30)) == tokens
        assert run_round(recorded_canary(engine)) == []
    assert serving.counts.compiles == 0
