"""An FP8 KV cache on a GPU: the Triton kernels in captured steps, against the reference that rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.programs.stances import fail_on_recompile
from tests.conftest import TINY
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine.test_continuous_batching import check_random_traffic
from tests.engine_loop import generate_tokens
from tests.gpu.test_gpu import PROMPTS, deploy
from tests.scaled_kv import RoundingReference, layer_scales, save_with_tensors

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = BUILTIN_MODELS[TINY]
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    return save_with_tensors(source, tmp_path_factory.mktemp("tiny") / "model", layer_scales(layers, 0.008, 0.005))


@pytest.mark.parametrize("graphs", ["step", "none"])
@pytest.mark.parametrize("shapes", ["bucket", "dynamic"])
def test_captured_steps_give_the_tokens_of_the_reference(
    graphs: str, shapes: str, tiny: Path, cache_dir: str, tmp_path: Path
) -> None:
    if (graphs, shapes) == ("none", "dynamic"):
        pytest.skip("dynamic shapes are the default of captured steps")
    flags = {"buckets": (128,)} if shapes == "dynamic" else {}
    deployment = deploy(
        str(tiny), cache_dir, dtype="float32", kv_dtype="fp8", graphs=graphs, shapes=shapes, mixed_steps="on", **flags
    )
    assert deployment.plan.kv_dtype == "float8_e4m3fn"
    assert (deployment.plan.prefill_attention, deployment.plan.decode_attention) == ("triton", "triton")
    with measure_compiles() as serving, fail_on_recompile():
        answers = generate_tokens(deployment.engine, PROMPTS, SamplingParams(max_tokens=30))
        assert run_round(recorded_canary(deployment.engine)) == []
    assert serving.counts.compiles == 0
    check_random_traffic(deployment.engine, 60)
    rounding = RoundingReference(tiny, tmp_path, dtype="float32", device="cuda", buckets=(64,), batch_sizes=(4,))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer == rounding.likeliest(prompt, answer)


@pytest.mark.parametrize("programs", ["jit", "aot"])
def test_bfloat16_steps_with_fused_rope_pass_their_check(programs: str, tiny: Path, cache_dir: str) -> None:
    deployment = deploy(str(tiny), cache_dir, dtype="bfloat16", kv_dtype="fp8", programs=programs)
    assert all(record.captured and record.parity.passed for record in deployment.records)
    assert max(map(len, generate_tokens(deployment.engine, PROMPTS, SamplingParams(max_tokens=30)))) > 1
