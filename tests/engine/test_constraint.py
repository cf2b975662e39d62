"""A constrained answer obeys at every token, and whoever runs beside it does not notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tcdeploy.compiler.ledger import measure_compiles
from tcdeploy.engine.engine import Engine, NewToken
from tcdeploy.engine.sequence import SamplingParams
from tests.conftest import prepare_tiny
from tests.engine.constraints import MASKER, SumConstraint

LENGTH = 20
VOCAB = 2000  # the model's is 2048: a tokenizer may have less than its model
PROMPTS = [[random.Random(seed).randrange(3, 900) for _ in range(length)] for seed, length in enumerate((5, 300, 64))]


def submit(engine: Engine, prompt: list[int], found: dict[int, list[NewToken]], **asked: Any) -> int:
    request_id = engine.submit(prompt, SamplingParams(**{"max_new_tokens": 40, **asked}))
    found[request_id] = []
    return request_id


def drain(engine: Engine, found: dict[int, list[NewToken]]) -> None:
    while engine.has_work:
        for token in engine.step():
            found[token.request_id].append(token)


def ids_of(tokens: list[NewToken]) -> list[int]:
    return [token.token_id for token in tokens]


def assert_idle(engine: Engine) -> None:
    engine.allocator.assert_consistent()
    assert engine.allocator.free == engine.allocator.capacity


@pytest.fixture(scope="module")
def constrained_reference(reference_tiny: Any) -> Callable[[list[int]], list[int]]:
    """What plain transformers says, greedy, where the form forbids all else."""

    @torch.no_grad()
    def answer(prompt: list[int]) -> list[int]:
        chain, tokens = SumConstraint(LENGTH, VOCAB), []
        for _ in range(LENGTH):
            scores = reference_tiny(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            allowed = torch.tensor([chain.allows(tokens, token_id) for token_id in range(len(scores))])
            tokens.append(int(scores.where(allowed, -torch.inf).argmax()))
        return tokens

    return answer


def test_a_greedy_answer_is_the_most_likely_that_obeys(
    tiny_deployment: Any, constrained_reference: Callable[[list[int]], list[int]]
) -> None:
    """Prompts of one chunk and of several, all at once."""
    engine, found = tiny_deployment.engine, {}
    chain = SumConstraint(LENGTH, VOCAB)
    with measure_compiles() as serving:
        for prompt in PROMPTS:
            submit(engine, prompt, found, constraint=chain)
        drain(engine, found)
    assert [ids_of(tokens) for tokens in found.values()] == [constrained_reference(prompt) for prompt in PROMPTS]
    assert [tokens[-1].finish_reason for tokens in found.values()] == ["stop"] * 3
    assert serving.counts.compiles == 0
    assert [matcher.mask_positions for matcher in chain.matchers] == [list(range(LENGTH))] * 3, (
        "asked once for each token"
    )
    assert_idle(engine)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.5, "seed": 3}, {"temperature": 0.9, "seed": 4, "top_k": 3, "top_p": 0.9},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.5}, {"logit_bias": ((77, 100.0),)}, {"logprobs": 2},
    ],
    ids=str,
)  # fmt: skip
def test_it_obeys_however_it_is_sampled_alone_and_in_a_batch(tiny_deployment: Any, asked: dict[str, Any]) -> None:
    engine = tiny_deployment.engine
    alone, together = {}, {}
    for prompt in PROMPTS:
        submit(engine, prompt, alone, constraint=SumConstraint(LENGTH, VOCAB), **asked)
        drain(engine, alone)
    chain = SumConstraint(LENGTH, VOCAB)
    for prompt in PROMPTS:
        submit(engine, prompt, together, constraint=chain, **asked)
    drain(engine, together)
    for one, other, matcher in zip(alone.values(), together.values(), chain.matchers, strict=True):
        assert ids_of(one) == ids_of(other) == matcher.accepted
        assert one[-1].finish_reason == "stop" and len(one) == LENGTH


def test_neighbours_get_the_tokens_that_they_get_alone(tiny_deployment: Any) -> None:
    """They come and go while constrained ones do, so that rows move; prompts of several chunks come in between."""
    engine, source = tiny_deployment.engine, random.Random(2)
    prompts = [[source.randrange(3, 900) for _ in range(length)] for length in (3, 140, 9, 40, 2, 77, 300, 6)]
    kinds: list[dict[str, Any]] = [{}, {"constraint": SumConstraint(LENGTH, VOCAB)}, {"temperature": 0.8, "seed": 9}]
    asked = [{**kinds[number % 3], "max_new_tokens": 12 + 5 * number} for number in range(len(prompts))]
    alone: dict[int, list[NewToken]] = {}
    for prompt, one in zip(prompts, asked, strict=True):
        submit(engine, prompt, alone, **one)
        drain(engine, alone)
    together: dict[int, list[NewToken]] = {}
    for prompt, one in zip(prompts, asked, strict=True):
        submit(engine, prompt, together, **one)
        for token in engine.step() + engine.step():
            together[token.request_id].append(token)
    drain(engine, together)
    assert [ids_of(tokens) for tokens in together.values()] == [ids_of(tokens) for tokens in alone.values()]
    assert_idle(engine)


def test_without_a_constraint_no_token_is_read_before_the_next_step_is_launched(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, order, found = tiny_deployment.engine, [], {}

    def note(name: str) -> None:
        run = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *args: (order.append(name), run(*args))[1])

    for name in ("_launch_forward", "_collect", "_launch_sampling"):
        note(name)
    submit(engine, PROMPTS[0], found, max_new_tokens=3, temperature=1.0)
    drain(engine, found)
    assert order[:5] == ["_launch_forward", "_launch_sampling", "_launch_forward", "_launch_sampling", "_collect"]
    order.clear()
    submit(engine, PROMPTS[0], found, max_new_tokens=3, constraint=SumConstraint(3, VOCAB))
    drain(engine, found)
    assert order[:5] == ["_launch_forward", "_launch_sampling", "_launch_forward", "_collect", "_launch_sampling"], (
        "the model is under way meanwhile"
    )


def test_its_limit_of_tokens_cuts_it(tiny_deployment: Any) -> None:
    engine, found = tiny_deployment.engine, {}
    submit(engine, PROMPTS[0], found, constraint=SumConstraint(LENGTH, VOCAB), max_new_tokens=LENGTH - 1)
    submit(engine, PROMPTS[0], found, constraint=SumConstraint(LENGTH, VOCAB), max_new_tokens=LENGTH)
    drain(engine, found)
    ends = [(len(tokens), tokens[-1].finish_reason) for tokens in found.values()]
    assert ends == [(LENGTH - 1, "length"), (LENGTH, "stop")]


def test_a_stop_token_of_the_request_still_ends_it(tiny_deployment: Any) -> None:
    engine, found = tiny_deployment.engine, {}
    submit(engine, PROMPTS[0], found, constraint=SumConstraint(LENGTH, VOCAB))
    drain(engine, found)
    [whole] = found.values()
    submit(engine, PROMPTS[0], found, constraint=SumConstraint(LENGTH, VOCAB), stop_token_ids=(whole[4].token_id,))
    drain(engine, found)
    cut = [*found.values()][1]
    first = ids_of(whole).index(whole[4].token_id)
    assert ids_of(cut) == ids_of(whole)[: first + 1] and cut[-1].finish_reason == "stop"


def test_a_step_asks_for_its_masks_together(tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one masker: each call of a library may wait for Python's lock."""
    engine, found, asked = tiny_deployment.engine, {}, []
    fill = MASKER.fill
    monkeypatch.setattr(
        MASKER, "fill", lambda matcher_rows, masks: (asked.append(len(matcher_rows)), fill(matcher_rows, masks))
    )
    chain = SumConstraint(LENGTH, VOCAB)
    for prompt in PROMPTS:
        submit(engine, prompt, found, constraint=chain)
    submit(engine, PROMPTS[0], found, constraint=Broken())
    drain(engine, found)
    assert max(asked) == len(PROMPTS) and sum(asked) == len(PROMPTS) * LENGTH
    assert len(asked) < 2 * LENGTH, "one call for each row"
    assert [tokens[-1].finish_reason for tokens in found.values()] == ["stop", "stop", "stop", "error"]
    assert_idle(engine)


class Broken:
    """Allows nothing and accepts nothing: what a grammar does that has reached its limits."""

    @property
    def masker(self) -> Broken:
        return self

    def start(self) -> Broken:
        return self

    def fill(self, matcher_rows: Any, masks: Any) -> None:
        pass

    def accept(self, token_id: int) -> Any:
        return "error"


def test_a_constraint_that_fails_ends_its_request_alone(tiny_deployment: Any) -> None:
    engine, found = tiny_deployment.engine, {}
    plain = engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=9))[0]
    submit(engine, PROMPTS[1], found, constraint=Broken(), temperature=1.0)
    submit(engine, PROMPTS[0], found, max_new_tokens=9)
    drain(engine, found)
    broken, other = found.values()
    assert [token.finish_reason for token in broken] == ["error"]
    assert ids_of(other) == plain
    assert_idle(engine)


def test_pre_emption_changes_no_token(cache_dir: str, tiny_deployment: Any) -> None:
    prompts = [[random.Random(seed).randrange(3, 900) for _ in range(120)] for seed in range(3)]
    asked = {"max_new_tokens": 60, "temperature": 0.8, "seed": 5}
    alone: dict[int, list[NewToken]] = {}
    for prompt in prompts:
        submit(tiny_deployment.engine, prompt, alone, constraint=SumConstraint(50, VOCAB), **asked)
        drain(tiny_deployment.engine, alone)
    scarce = prepare_tiny(cache_dir, context=400, kv_blocks=27).engine
    before, together = scarce.scheduler.preemptions, {}
    for prompt in prompts:
        submit(scarce, prompt, together, constraint=SumConstraint(50, VOCAB), **asked)
    drain(scarce, together)
    assert scarce.scheduler.preemptions > before, "blocks were not scarce, so this shows nothing"
    assert [ids_of(tokens) for tokens in together.values()] == [ids_of(tokens) for tokens in alone.values()]
    assert_idle(scarce)


@pytest.mark.parametrize(("method", "failing_call"), [("prefill", 0), ("decode", 0), ("decode", 7), ("sample", 6)])
def test_a_step_that_raises_loses_no_token(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch, method: str, failing_call: int,
    constrained_reference: Callable[[list[int]], list[int]],
) -> None:  # fmt: skip
    """Before the tokens of the step before were read, and after."""
    engine, found, calls = tiny_deployment.engine, {}, []
    engine.allocator.reset_prefix_cache()
    run = getattr(engine.runner, method)

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == failing_call + 1:
            raise RuntimeError("out of luck")
        return run(*args)

    monkeypatch.setattr(engine.runner, method, failing)
    chain = SumConstraint(LENGTH, VOCAB)
    for prompt in PROMPTS:
        submit(engine, prompt, found, constraint=chain)
    with pytest.raises(RuntimeError, match="out of luck"):
        drain(engine, found)
    drain(engine, found)
    assert [ids_of(tokens) for tokens in found.values()] == [constrained_reference(prompt) for prompt in PROMPTS]
    assert [matcher.accepted for matcher in chain.matchers] == [ids_of(tokens) for tokens in found.values()]
    assert_idle(engine)


def test_an_aborted_answer_is_told_nothing_more(tiny_deployment: Any) -> None:
    engine, found, chain = tiny_deployment.engine, {}, SumConstraint(LENGTH, VOCAB)
    gone = submit(engine, PROMPTS[0], found, constraint=chain)
    stays = submit(engine, PROMPTS[2], found, constraint=chain)
    for _ in range(6):
        for token in engine.step():
            found[token.request_id].append(token)
    engine.abort(gone)
    known = list(chain.matchers[0].accepted)
    drain(engine, found)
    assert chain.matchers[0].accepted == known == ids_of(found[gone])
    assert len(found[stays]) == LENGTH
    assert_idle(engine)


def test_parameters_with_a_constraint_are_equal_where_it_is_the_same() -> None:
    chain = SumConstraint(1, 1)
    one, other = (SamplingParams(constraint=chain) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != SamplingParams(constraint=SumConstraint(1, 1)) != SamplingParams()
