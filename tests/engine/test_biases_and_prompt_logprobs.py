"""Logit biases, the minimum length, and log-probabilities of the prompt."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tcdeploy.engine.engine import NewToken
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.step import runner
from tcdeploy.errors import UsageError
from tcdeploy.programs.compile_stats import measure_compiles
from tests.conftest import prepare_tiny
from tests.engine_loop import generate_tokens

PROMPT = [40, 41, 42, 7, 300]


def run(engine: Any, prompts: list[list[int]], params: SamplingParams) -> dict[int, list[NewToken]]:
    ids = [engine.submit(prompt, params) for prompt in prompts]
    tokens: dict[int, list[NewToken]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for token in engine.step():
            tokens[token.request_id].append(token)
    return tokens


def tokens_of(engine: Any, params: SamplingParams) -> list[int]:
    return generate_tokens(engine, [PROMPT], params)[0]


def test_a_bias_of_minus_100_excludes_a_token_and_one_of_100_forces_it(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    plain = tokens_of(engine, SamplingParams(max_tokens=12))
    for temperature in (0.0, 1.0):
        excluding = SamplingParams(max_tokens=12, temperature=temperature, seed=1, logit_bias=((plain[0], -100),))
        assert plain[0] not in tokens_of(engine, excluding)
        forcing = SamplingParams(max_tokens=12, temperature=temperature, seed=1, logit_bias=((77, 100.0),))
        assert tokens_of(engine, forcing) == [77] * 12
    assert tokens_of(engine, SamplingParams(max_tokens=12)) == plain, "the row is reset"


def test_a_bias_applies_to_its_own_request_only(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    plain = SamplingParams(max_tokens=20)
    drawn = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    biased = SamplingParams(max_tokens=5, logit_bias=((77, 100.0),))
    alone = [tokens_of(engine, params) for params in (plain, drawn)]
    ids = [engine.submit(PROMPT, params) for params in (biased, plain, biased, drawn, biased)]
    answers: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for token in engine.step():
            answers[token.request_id].append(token.token_id)
    assert list(answers.values()) == [[77] * 5, alone[0], [77] * 5, alone[1], [77] * 5]


def test_a_stop_token_is_excluded_before_min_tokens(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    plain = tokens_of(engine, SamplingParams(max_tokens=12))
    stops = {"max_tokens": 12, "stop_token_ids": (plain[0],)}
    assert tokens_of(engine, SamplingParams(**stops)) == plain[:1]
    longer = tokens_of(engine, SamplingParams(**stops, min_tokens=4))
    assert plain[0] not in longer[:4] and len(longer) > 4


def test_a_temperature_beyond_float32_draws_no_excluded_token(tiny_deployment: Any) -> None:
    """As infinity in float32 it would turn the logits of excluded tokens, which are -inf, into NaN."""
    stops = tuple(range(0, 400, 2))
    params = SamplingParams(max_tokens=12, min_tokens=12, temperature=1e300, seed=1, stop_token_ids=stops)
    assert not set(tokens_of(tiny_deployment.engine, params)) & set(stops)


@pytest.mark.parametrize("repetition_penalty", [1e300, 1e-300])
def test_a_repetition_penalty_beyond_float32_is_finite_and_not_zero(
    tiny_deployment: Any, repetition_penalty: float
) -> None:
    """A logit of 0 times infinity, or divided by 0, would be NaN, which is drawn."""
    engine = tiny_deployment.engine
    engine.submit(PROMPT, SamplingParams(max_tokens=2, repetition_penalty=repetition_penalty))
    engine.step()
    column = engine.runner.decode_rows.sampling.repetition
    assert column.isfinite().all() and (column > 0).all()
    assert column[0] != 1
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_of_the_prompt_are_those_of_transformers(tiny_deployment: Any, reference_tiny: Any, k: int) -> None:
    """Prompts of one token, one chunk and several chunks; the last one again, from the prefix cache."""
    engine, source = tiny_deployment.engine, random.Random(8)
    prompts = [[source.randrange(3, 900) for _ in range(length)] for length in (1, 5, 128, 129, 300)]
    generate_tokens(engine, prompts, SamplingParams(max_tokens=1))
    with measure_compiles() as serving:
        tokens_by_id = run(engine, [*prompts, prompts[-1]], SamplingParams(max_tokens=2, prompt_logprobs=k))
    assert serving.counts.compiles == 0
    for prompt, tokens in zip([*prompts, prompts[-1]], tokens_by_id.values(), strict=True):
        first, second = tokens
        assert second.prompt_logprobs is None and first.prompt_logprobs is not None
        with torch.no_grad():
            expected = reference_tiny(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        assert len(first.prompt_logprobs) == len(prompt) - 1
        for position, entry in enumerate(first.prompt_logprobs):
            assert entry.chosen == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-3)
            assert len(entry.top) == k
            values = [value for _, value in entry.top]
            assert values == pytest.approx(expected[position].topk(k).values.tolist(), abs=1e-3)


def test_prompt_logprobs_survive_preemption(cache_dir: str) -> None:
    engine, source = prepare_tiny(cache_dir, context=400, kv_blocks=27).engine, random.Random(9)
    prompts = [[source.randrange(3, 900) for _ in range(120)] for _ in range(3)]
    params = SamplingParams(max_tokens=60, prompt_logprobs=0)
    alone = [next(iter(run(engine, [prompt], params).values())) for prompt in prompts]
    together = list(run(engine, prompts, params).values())
    assert engine.scheduler.preemptions > 0
    for tokens_alone, tokens_together in zip(alone, together, strict=True):
        assert [token.token_id for token in tokens_alone] == [token.token_id for token in tokens_together]
        values = [
            [entry.chosen for entry in tokens[0].prompt_logprobs or ()] for tokens in (tokens_alone, tokens_together)
        ]
        assert values[0] == pytest.approx(values[1], abs=1e-3)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": ((5, float("nan")),)}, {"logit_bias": ((5, 101),)}, {"logit_bias": ((-1, 1),)},
        {"logit_bias": tuple((i, 1.0) for i in range(513))}, {"min_tokens": -1}, {"min_tokens": True},
        {"prompt_logprobs": 21}, {"logit_bias": (5, 1.0)}, {"logit_bias": {5, 6}},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SamplingParams(**params)


@pytest.mark.parametrize("logit_bias", [{5: 1.0, 7: -2.0}, [(5, 1.0), (7, -2.0)], [[5, 1.0], [7, -2.0]]])
def test_biases_may_be_a_mapping_or_pairs(logit_bias: Any) -> None:
    params = SamplingParams(logit_bias=logit_bias)
    assert params == SamplingParams(logit_bias=((5, 1.0), (7, -2.0))) and hash(params)


def test_a_bias_outside_the_vocabulary_is_refused(tiny_deployment: Any) -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        tiny_deployment.engine.submit(PROMPT, SamplingParams(logit_bias=((10**6, 1.0),)))


def test_prompt_logprobs_in_pieces_run_the_body_once_and_are_equal(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of three chunks; the head computes 32 tokens at a time."""
    engine, source = tiny_deployment.engine, random.Random(6)
    prompt = [source.randrange(3, 900) for _ in range(300)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    model = engine.runner.model
    heads: list[int] = []
    hooks = [model.get_output_embeddings().register_forward_hook(lambda *_: heads.append(1))]
    layers: list[int] = []
    first_layer = model.get_decoder().layers[0]
    call = first_layer._compiled_call_impl
    monkeypatch.setattr(first_layer, "_compiled_call_impl", lambda *a, **k: (layers.append(1), call(*a, **k))[1])
    try:
        results = []
        for rows in (512, 32):
            monkeypatch.setattr(runner, "PROMPT_LOGPROBS_CHUNK", rows)
            layers.clear()
            heads.clear()
            [tokens] = run(engine, [prompt], params).values()
            results.append(([entry.chosen for entry in tokens[0].prompt_logprobs or ()], len(layers), len(heads)))
    finally:
        for hook in hooks:
            hook.remove()
    assert "forward" not in vars(model.base_model)
    (whole, whole_passes, whole_heads), (pieces, piece_passes, piece_heads) = results
    assert whole == pieces and len(whole) == 299
    assert whole_passes == piece_passes == 6, "three chunks, each once as a step and once for its logprobs"
    assert piece_heads > whole_heads
