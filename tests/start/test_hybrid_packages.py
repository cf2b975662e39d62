"""Packages of models with gated delta nets and short convolutions: export, a start from them, and from a bundle.

Except for the bundle, a package is the exported program itself, as in test_packaged_families.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.kernels.state.mechanisms import MECHANISMS
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.packages import start_from_packages
from tcdeploy.start.planned import StartRequest
from tcdeploy.start.prepare import prepare
from tests.conftest import RunCLI
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine_loop import generate_tokens, new_tokens
from tests.exported_programs import exported_programs
from tests.hybrid_models import VOCAB_SIZE, answers, save_model
from tests.start.test_packaged_start import FLAGS, PROMPT, run_script

PROMPTS = [
    [3 + (7 * position + 31 * row) % (VOCAB_SIZE - 3) for position in range(n)]
    for row, n in enumerate((90, 1, 33, 20, 5))
]
TOKENS = 12
_DELTA_NET = "0/conv 0/delta 1/conv 1/delta 2/k 2/v"
STATES = {
    "qwen3_next": _DELTA_NET, "qwen3_5_text": _DELTA_NET, "kimi_linear": _DELTA_NET,
    "olmo_hybrid": _DELTA_NET, "mamba2": "0/conv 0/ssm 1/conv 1/ssm 2/conv 2/ssm",
    "lfm2": "0/conv 1/k 1/v 2/conv", "bamba": "0/conv 0/ssm 1/conv 1/ssm 2/k 2/v",
    "falcon_h1": "0/conv 0/ssm 1/k 1/v 2/conv 2/ssm 3/k 3/v",
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        pytest.param("qwen3_next", "bucket", marks=pytest.mark.long),  # as the next one, and experts
        ("qwen3_5_text", "dynamic"),
        ("lfm2", "bucket"),
        ("kimi_linear", "dynamic"),
        ("bamba", "dynamic"),  # its layers return (hidden states, None)
        pytest.param("olmo_hybrid", "bucket", marks=pytest.mark.long),
        ("mamba2", "dynamic"),
        ("falcon_h1", "bucket"),  # (hidden states,), and two states
    ],
)
def test_a_start_from_packages_gives_the_tokens_of_transformers(
    tmp_path: Path, family: str, shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = save_model(family, tmp_path / "model"), tmp_path / "cache"
    recipe = Recipe(
        model=model, programs="aot", cache_dir=str(cache), buckets=(32,), batch_sizes=(4,), shapes=shapes,
        mixed_steps="on",
    )  # fmt: skip
    expected = answers(model, PROMPTS, TOKENS)
    with exported_programs():
        first = prepare(recipe, needs_model=True).engine
        assert generate_tokens(first, PROMPTS, SamplingParams(max_tokens=TOKENS)) == expected
        for mechanism in MECHANISMS.values():
            monkeypatch.setattr(mechanism, "forward", None)  # neither traced nor called
        deployment = start_from_packages(StartRequest(recipe))
        assert deployment is not None
        engine = deployment.engine
        assert not engine.runner.has_model and [record.outcome for record in deployment.records] == ["hit"] * 2
        assert generate_tokens(engine, PROMPTS, SamplingParams(max_tokens=TOKENS)) == expected
        assert run_round(recorded_canary(engine)) == []
        prefixes = engine.scheduler.prefixes
        prefixes.min_snapshot_tokens = prefixes.min_lone_snapshot_tokens = 32
        engine.allocator.reset_prefix_cache()
        for cached_tokens in (0, 80):
            received = new_tokens(engine, PROMPTS, SamplingParams(max_tokens=TOKENS))
            assert [[token.token_id for token in tokens] for tokens in received] == expected
            assert received[0][0].cached_tokens == cached_tokens
    [path] = cache.glob("aot/*/decode-4*.json")
    inputs = [name for call in json.loads(path.read_text())["calls"] for name in call["inputs"]]
    state = [name for name in inputs if name.startswith("state/")]
    assert state == [f"state/{name}" for name in STATES[family].split()]


@pytest.mark.long
def test_a_bundle_starts_without_a_compiler_and_modelling_code(tmp_path: Path, run_cli: RunCLI) -> None:
    model = save_model("qwen3_5_text", tmp_path / "model")
    bundle, unpacked = str(tmp_path / "model.tcb"), str(tmp_path / "unpacked")
    packed = run_cli("cache", "pack", model, *FLAGS, "--cache-dir", str(tmp_path / "cache"), "--out", bundle)
    assert packed.returncode == 0, packed.stderr
    assert run_cli("cache", "unpack", bundle, unpacked, "--allow-unsigned").returncode == 0
    tokens, outcomes, imported = run_script(unpacked, model)
    assert (outcomes, imported) == ([["hit", 0]] * 2, [])
    assert [tokens] == answers(model, [list(PROMPT)], len(tokens))
