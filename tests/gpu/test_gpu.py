"""What only a GPU can show: whole-step graphs, Triton and FlashAttention inside real programs, and no compile after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tcdeploy.compiler.ledger import measured
from tcdeploy.compiler.programs import sealed
from tcdeploy.engine.sequence import SamplingParams
from tcdeploy.pipeline import Deployment, prepare
from tcdeploy.recipe import build_recipe
from tests.conftest import forget_programs
from tests.families import KINDS_OF_LAYERS, SERVED, save_config

pytestmark = pytest.mark.gpu
PROMPTS = [
    [3 + (5 * position + row) % 240 for position in range(length)] for row, length in enumerate((1, 47, 130, 300))
]


def deploy(model: str, cache_dir: str, **flags: Any) -> Deployment:
    forget_programs()
    asked = {
        "model": model,
        "buckets": (32, 128),
        "batch_sizes": (1, 4),
        "context": 512,
        "cache_dir": cache_dir,
        **flags,
    }
    return prepare(build_recipe(asked, environ={}))


@pytest.mark.parametrize("graphs", ["step", "none"])
def test_float32_tokens_on_the_gpu_equal_transformers_generate(
    cache_dir: str, reference_tiny: Any, graphs: str
) -> None:
    """The same arithmetic as on the CPU: Triton prefill and decode, replayed from graphs."""
    deployment = deploy("builtin:tiny", cache_dir, dtype="float32", graphs=graphs)
    assert [record.captured for record in deployment.records] == [False, False, graphs == "step", graphs == "step"]
    with measured() as serving, sealed():
        ours = deployment.engine.generate(PROMPTS, SamplingParams(max_new_tokens=30))
    assert serving.counts.compiles == 0
    for prompt, answer in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        out = reference_tiny.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=None
        )
        assert answer == out[0, len(prompt) :].tolist()


def test_a_replayed_graph_gives_what_the_programs_give(cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir)
    runner = deployment.engine.runner
    deployment.engine.generate(PROMPTS, SamplingParams(max_new_tokens=3))
    for bucket in deployment.plan.decode_buckets:
        replayed = runner.rerun(bucket).logits.clone()
        assert torch.equal(replayed, runner.rerun_uncaptured(bucket).logits)


@pytest.mark.parametrize("family", list(SERVED))
def test_every_family_is_right_in_bfloat16(family: str, cache_dir: str, tmp_path: Path) -> None:
    deployment = deploy(save_config(family, tmp_path), cache_dir, load_format="dummy")
    kinds = KINDS_OF_LAYERS.get(family, 1)
    assert [record.programs for record in deployment.records] == [kinds] * 4
    assert all(record.parity.passed for record in deployment.records)
    with measured() as serving, sealed():
        deployment.engine.generate(PROMPTS, SamplingParams(max_new_tokens=5))
    assert serving.counts.compiles == 0


@pytest.mark.parametrize(("region", "graphs"), [("blocks", "region"), ("layer", "region"), ("blocks", "step")])
def test_per_region_graphs_are_right_too(region: str, graphs: str, cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir, region=region, graphs=graphs)
    assert all(record.parity.passed for record in deployment.records)
    params = SamplingParams(max_new_tokens=8)
    ours = deployment.engine.generate(PROMPTS[:2], params)
    assert ours == deploy("builtin:tiny", cache_dir).engine.generate(PROMPTS[:2], params)


def test_a_dynamic_range_serves_every_length(cache_dir: str) -> None:
    deployment = deploy("builtin:tiny", cache_dir, shapes="dynamic")
    assert deployment.records[0].programs == 1
    with measured() as serving, sealed():
        deployment.engine.generate(PROMPTS, SamplingParams(max_new_tokens=3))
    assert serving.counts.compiles == 0


@pytest.mark.parametrize("backend", ["torch-flash", "flash-attn-2", "flash-attn-3", "flash-attn-4"])
def test_each_flash_attention_that_is_installed_serves_a_whole_model(
    backend: str, cache_dir: str, tmp_path: Path
) -> None:
    """Prompts of one token, of several chunks, and of a chunk with one token left."""
    from tcdeploy.environment import installed_flash_packages

    if backend != "torch-flash" and backend not in dict(installed_flash_packages()):
        pytest.skip(f"{backend} is not installed")
    folder = save_config("llama", tmp_path, hidden_size=256, head_dim=64)
    deployment = deploy(folder, cache_dir, load_format="dummy", attention=backend)
    assert all(record.parity.passed for record in deployment.records)
    deployment.engine.generate([*PROMPTS, [5] * 129], SamplingParams(max_new_tokens=4))


def test_a_model_too_large_for_the_gpu_is_told_before_loading(run_cli: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248}
    folder = save_config("llama", tmp_path, **sizes)
    result = run_cli("warm", folder, "--load-format", "dummy")
    assert result.returncode == 7
    assert "weights leave no room for KV" in result.stderr
