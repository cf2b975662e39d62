"""Packages of a model whose layers keep state in slots: export, a start from them, and its tokens.

A package is the exported program itself, as in test_packaged_families.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.step import runner as runner_module
from tcdeploy.kernels.state.mechanisms import MECHANISMS
from tcdeploy.planning.recipe import Recipe
from tcdeploy.programs.passes import foreign_ops
from tcdeploy.start.packages import start_from_packages
from tcdeploy.start.planned import StartRequest
from tcdeploy.start.prepare import prepare
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine_loop import generate_tokens, new_tokens
from tests.exported_programs import exported_programs
from tests.running_sum import HYBRID, SUMS_ONLY, VOCAB_SIZE, register, save_model, unregister
from tests.start.test_packaged_start import greedy_tokens

PROMPTS = [
    [(7 * position + 31 * row) % VOCAB_SIZE for position in range(n)] for row, n in enumerate((90, 1, 33, 20, 5))
]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The op is in the namespace of the test. Those of real mechanisms are in ours, which a start imports."""
    register()
    monkeypatch.setattr(foreign_ops, "AVAILABLE_NAMESPACES", {*foreign_ops.AVAILABLE_NAMESPACES, "tcdeploy_test"})
    yield
    unregister()


@pytest.mark.parametrize("layers", [HYBRID, SUMS_ONLY], ids=["hybrid", "sums only"])
@pytest.mark.parametrize("shapes", ["bucket", "dynamic"])
def test_a_start_from_packages_gives_the_tokens_of_transformers(
    tmp_path: Path, layers: tuple[str, ...], shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = save_model(tmp_path / "model", layers), tmp_path / "cache"
    recipe = Recipe(
        model=model, programs="aot", cache_dir=str(cache), buckets=(32,), batch_sizes=(4,), shapes=shapes,
        mixed_steps="on",
    )  # fmt: skip
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [greedy_tokens(reference, prompt) for prompt in PROMPTS]
    with exported_programs():
        first = prepare(recipe, needs_model=True).engine
        assert generate_tokens(first, PROMPTS, SamplingParams(max_tokens=12)) == expected
        monkeypatch.setattr(MECHANISMS["running_sum"], "forward", None)  # neither traced nor called
        deployment = start_from_packages(StartRequest(recipe))
        assert deployment is not None
        engine = deployment.engine
        assert not engine.runner.has_model and [record.outcome for record in deployment.records] == ["hit"] * 2
        assert generate_tokens(engine, PROMPTS, SamplingParams(max_tokens=12)) == expected
        monkeypatch.setattr(runner_module, "PROMPT_LOGPROBS_CHUNK", 20)  # each piece runs the whole chunk
        scored = new_tokens(engine, PROMPTS, SamplingParams(max_tokens=12, prompt_logprobs=1))
        assert [[token.token_id for token in tokens] for tokens in scored] == expected
        assert run_round(recorded_canary(engine)) == []
    [path] = cache.glob("aot/*/decode-4*.json")
    calls = json.loads(path.read_text())["calls"]
    state = [name for call in calls for name in call["inputs"] if name.startswith("state/")]
    slots = [call for call in calls if "step/decode.slots" in call["inputs"]]
    kinds = {"linear_attention": ["sums"], "full_attention": ["k", "v"], "moe": []}
    assert state == [f"state/{number}/{name}" for number, kind in enumerate(layers) for name in kinds[kind]]
    assert len(slots) == len(layers)
