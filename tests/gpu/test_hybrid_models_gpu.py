"""Models with state in slots, in CUDA graphs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.planning import memory, sizes
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.stances import fail_on_recompile
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine.test_continuous_batching import check_random_traffic
from tests.engine_loop import generate_tokens, new_tokens
from tests.gpu.test_gpu import PROMPTS, deploy
from tests.gpu.test_slot_state_gpu import check_captured_steps
from tests.hybrid_models import FAMILIES, VOCAB_SIZE, answers, save_model

pytestmark = pytest.mark.gpu
ONE_PER_MECHANISM = ("qwen3_5_text", "kimi_linear", "bamba", "lfm2")
MIN_SNAPSHOT_TOKENS = 32


@pytest.mark.parametrize(
    ("family", "shapes"),
    [*((family, "dynamic") for family in FAMILIES), *((name, "bucket") for name in ONE_PER_MECHANISM)],
)
def test_captured_steps_give_the_tokens_of_generate(cache_dir: str, tmp_path: Path, family: str, shapes: str) -> None:
    model = save_model(family, tmp_path / "model")
    check_captured_steps(model, cache_dir, shapes, answers(model, PROMPTS, 30))


@pytest.mark.parametrize("family", ONE_PER_MECHANISM)
def test_snapshots_change_no_token(
    cache_dir: str, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is copied between captured steps. Snapshots are taken from 32 tokens on."""
    for module in (memory, sizes):
        monkeypatch.setattr(module, "MIN_SNAPSHOT_TOKENS", MIN_SNAPSHOT_TOKENS)
    model, source = save_model(family, tmp_path / "model"), random.Random(48)
    flags = {"shapes": "dynamic", "buckets": (128,), "mixed_steps": "on"}
    engine = deploy(model, cache_dir, dtype="float32", graphs="step", **flags).engine
    assert engine.plan.snapshots >= 4
    prefixes = engine.scheduler.prefixes
    prefixes.min_snapshot_tokens = prefixes.min_lone_snapshot_tokens = MIN_SNAPSHOT_TOKENS
    instructions = [source.randrange(3, VOCAB_SIZE) for _ in range(150)]
    prompts = [instructions + [source.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (9, 9, 20, 60)]
    received = [new_tokens(engine, [prompt], SamplingParams(max_tokens=30))[0] for prompt in prompts]
    assert [[token.token_id for token in tokens] for tokens in received] == answers(model, prompts, 30)
    assert [tokens[0].cached_tokens for tokens in received] == [0, 144, 144, 144]
    check_random_traffic(engine, 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_passes_the_parity_check(cache_dir: str, tmp_path: Path, family: str) -> None:
    """With the head sizes of published models where the config has them, as the tuning constants are for these.

    Each token is sent to all experts, because in bfloat16 the choice between experts with nearly equal scores may
    differ. Chunks of prompts do not depend on predicted times, because rounding depends on the chunks.
    """
    head_sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128} if family.startswith("qwen3") else {}
    head_sizes |= {"linear_head_dim": 128} if family == "kimi_linear" else {}
    if "num_experts_per_tok" in FAMILIES[family]:
        head_sizes["num_experts_per_tok"] = 4
    model = save_model(family, tmp_path / "model", **head_sizes)
    deployment = deploy(model, cache_dir, dtype="bfloat16", graphs="step", mixed_steps="on")
    engine = deployment.engine
    engine.scheduler.predictor = None
    assert all(record.captured and record.parity.passed for record in deployment.records)
    with measure_compiles() as serving, fail_on_recompile():
        tokens = generate_tokens(engine, PROMPTS, SamplingParams(max_tokens=30))
        engine.allocator.reset_prefix_cache()
        assert generate_tokens(engine, PROMPTS, SamplingParams(max_tokens=30)) == tokens
        assert run_round(recorded_canary(engine)) == []
    assert serving.counts.compiles == 0
