"""What a server's clients ask beyond sampling: biases, a least length, and the log-probabilities of the prompt."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tcdeploy.compiler.ledger import measure_compiles
from tcdeploy.engine import runner
from tcdeploy.engine.engine import NewToken
from tcdeploy.engine.sequence import SamplingParams
from tcdeploy.errors import UsageError
from tests.conftest import prepare_tiny

PROMPT = [40, 41, 42, 7, 300]


def run(engine: Any, prompts: list[list[int]], params: SamplingParams) -> dict[int, list[NewToken]]:
    ids = [engine.submit(prompt, params) for prompt in prompts]
    found: dict[int, list[NewToken]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for token in engine.step():
            found[token.request_id].append(token)
    return found


def tokens_of(engine: Any, params: SamplingParams) -> list[int]:
    return engine.generate([PROMPT], params)[0]


def test_a_forbidden_token_never_comes_and_a_wanted_one_always(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    plain = tokens_of(engine, SamplingParams(max_new_tokens=12))
    for temperature in (0.0, 1.0):
        forbidden = SamplingParams(max_new_tokens=12, temperature=temperature, seed=1, logit_bias=((plain[0], -100),))
        assert plain[0] not in tokens_of(engine, forbidden)
        wanted = SamplingParams(max_new_tokens=12, temperature=temperature, seed=1, logit_bias=((77, 100.0),))
        assert tokens_of(engine, wanted) == [77] * 12
    assert tokens_of(engine, SamplingParams(max_new_tokens=12)) == plain, "the row is as it was"


def test_a_bias_is_its_own_requests_alone(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    plain = SamplingParams(max_new_tokens=20)
    drawn = SamplingParams(max_new_tokens=20, temperature=0.8, seed=3)
    biased = SamplingParams(max_new_tokens=5, logit_bias=((77, 100.0),))
    alone = [tokens_of(engine, params) for params in (plain, drawn)]
    asked = [biased, plain, biased, drawn, biased]
    ids = [engine.submit(PROMPT, params) for params in asked]
    found: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for token in engine.step():
            found[token.request_id].append(token.token_id)
    assert list(found.values()) == [[77] * 5, alone[0], [77] * 5, alone[1], [77] * 5]


def test_a_stop_token_waits_for_the_least_length(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    plain = tokens_of(engine, SamplingParams(max_new_tokens=12))
    stops = {"max_new_tokens": 12, "stop_token_ids": (plain[0],)}
    assert tokens_of(engine, SamplingParams(**stops)) == plain[:1]
    held = tokens_of(engine, SamplingParams(**stops, min_new_tokens=4))
    assert plain[0] not in held[:4] and len(held) > 4


@pytest.mark.parametrize("wanted", [0, 3])
def test_logprobs_of_the_prompt_are_those_of_transformers(
    tiny_deployment: Any, reference_tiny: Any, wanted: int
) -> None:
    """Prompts of one token, of one chunk and of several; one whose keys are in the cache already."""
    engine, source = tiny_deployment.engine, random.Random(8)
    prompts = [[source.randrange(3, 900) for _ in range(length)] for length in (1, 5, 128, 129, 300)]
    engine.generate(prompts, SamplingParams(max_new_tokens=1))
    with measure_compiles() as serving:
        found = run(engine, [*prompts, prompts[-1]], SamplingParams(max_new_tokens=2, prompt_logprobs=wanted))
    assert serving.counts.compiles == 0
    for prompt, tokens in zip([*prompts, prompts[-1]], found.values(), strict=True):
        first, second = tokens
        assert second.prompt_logprobs is None and first.prompt_logprobs is not None
        with torch.no_grad():
            expected = reference_tiny(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        assert len(first.prompt_logprobs) == len(prompt) - 1
        for position, one in enumerate(first.prompt_logprobs):
            assert one.chosen == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-3)
            assert len(one.top) == wanted
            values = [value for _, value in one.top]
            assert values == pytest.approx(expected[position].topk(wanted).values.tolist(), abs=1e-3)


def test_they_survive_pre_emption(cache_dir: str) -> None:
    engine, source = prepare_tiny(cache_dir, context=400, kv_blocks=27).engine, random.Random(9)
    prompts = [[source.randrange(3, 900) for _ in range(120)] for _ in range(3)]
    params = SamplingParams(max_new_tokens=60, prompt_logprobs=0)
    alone = [next(iter(run(engine, [prompt], params).values())) for prompt in prompts]
    together = list(run(engine, prompts, params).values())
    assert engine.scheduler.preemptions > 0
    for one, other in zip(alone, together, strict=True):
        assert [token.token_id for token in one] == [token.token_id for token in other]
        values = [[entry.chosen for entry in tokens[0].prompt_logprobs or ()] for tokens in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-3)


@pytest.mark.parametrize(
    "bad",
    [
        {"logit_bias": ((5, float("nan")),)}, {"logit_bias": ((5, 101),)}, {"logit_bias": ((-1, 1),)},
        {"logit_bias": tuple((i, 1.0) for i in range(513))}, {"min_new_tokens": -1}, {"min_new_tokens": True},
        {"prompt_logprobs": 21},
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SamplingParams(**bad)


def test_a_bias_of_a_token_that_is_none_is_refused(tiny_deployment: Any) -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        tiny_deployment.engine.submit(PROMPT, SamplingParams(logit_bias=((10**6, 1.0),)))


def test_scoring_in_pieces_runs_the_body_once_and_gives_the_same(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of three chunks; the head takes 32 tokens at a time."""
    engine, source = tiny_deployment.engine, random.Random(6)
    prompt = [source.randrange(3, 900) for _ in range(300)]
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=2)
    model = engine.runner.model
    heads: list[int] = []
    hooks = [model.get_output_embeddings().register_forward_hook(lambda *_: heads.append(1))]
    layers: list[int] = []
    first_layer = model.get_decoder().layers[0]
    call = first_layer._compiled_call_impl
    monkeypatch.setattr(first_layer, "_compiled_call_impl", lambda *a, **k: (layers.append(1), call(*a, **k))[1])
    try:
        found = []
        for rows in (512, 32):
            monkeypatch.setattr(runner, "PROMPT_LOGPROBS_CHUNK", rows)
            layers.clear()
            heads.clear()
            [tokens] = run(engine, [prompt], params).values()
            found.append(([entry.chosen for entry in tokens[0].prompt_logprobs or ()], len(layers), len(heads)))
    finally:
        for hook in hooks:
            hook.remove()
    assert "forward" not in vars(model.base_model)
    (whole, passes, few), (pieces, same, many) = found
    assert whole == pieces and len(whole) == 299
    assert passes == same == 6 and many > few, "three chunks, each once as a step and once to be scored"
