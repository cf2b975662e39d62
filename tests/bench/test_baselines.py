"""Baselines are timed per token, and generate the tokens that transformers' `generate` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcdeploy.bench import baselines
from tcdeploy.bench.baselines import BaselineModel
from tcdeploy.bench.timing import Timestamps
from tcdeploy.errors import TcdeployError

PROMPTS = [[3 + (5 * position + row) % 240 for position in range(20)] for row in range(2)]


@pytest.fixture
def plan(tiny_deployment: Any) -> Any:
    return tiny_deployment.plan


@pytest.mark.parametrize("name", ["eager", "generate"])
def test_each_token_of_a_batch_has_a_time(name: str, reference_tiny: Any, plan: Any) -> None:
    times = BaselineModel(name, reference_tiny, plan).token_times(PROMPTS, 6)
    assert len(times) == 6
    assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize("name", ["eager", "generate"])
def test_a_new_shape_first_runs_untimed(
    name: str, reference_tiny: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline, runs = BaselineModel(name, reference_tiny, plan), []
    run_timed = baseline._run_timed
    monkeypatch.setattr(
        baseline, "_run_timed", lambda prompts, new_tokens: runs.append(new_tokens) or run_timed(prompts, new_tokens)
    )
    baseline.token_times(PROMPTS, 3)
    baseline.token_times(PROMPTS, 3)
    baseline.first_call_seconds(PROMPTS, 2)
    baseline.token_times(PROMPTS, 2)
    assert runs == [3, 3, 3, 2, 2]


def test_the_eager_loop_generates_the_tokens_of_generate(reference_tiny: Any) -> None:
    ids = torch.tensor(PROMPTS)
    input_ids: list[torch.Tensor] = []
    hook = reference_tiny.register_forward_pre_hook(
        lambda module, args, kwargs: input_ids.append(kwargs["input_ids"]), with_kwargs=True
    )
    try:
        with torch.no_grad():
            baselines._run_eager(reference_tiny, ids, 7, Timestamps("cpu"))
    finally:
        hook.remove()
    generated = reference_tiny.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(torch.cat(input_ids, dim=1), generated)


def test_generation_does_not_stop_at_the_end_token(
    reference_tiny: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated = reference_tiny.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    monkeypatch.setattr(reference_tiny.generation_config, "eos_token_id", int(generated[0, -1]))
    assert len(BaselineModel("generate", reference_tiny, plan).token_times(PROMPTS[:1], 6)) == 6


def test_too_few_tokens_are_an_error(reference_tiny: Any, plan: Any) -> None:
    baseline = BaselineModel("eager", reference_tiny, plan)
    baseline._run = lambda model, ids, new_tokens, timestamps: timestamps.record()
    with pytest.raises(TcdeployError, match="generated 1 tokens instead of 6"):
        baseline.token_times(PROMPTS, 6)


def test_generate_has_a_note_on_a_cpu_that_it_is_not_compiled(reference_tiny: Any, plan: Any) -> None:
    assert "not compiled" in BaselineModel("generate", reference_tiny, plan).note
    assert BaselineModel("eager", reference_tiny, plan).note == ""
