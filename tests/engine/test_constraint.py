"""Constrained requests obey at every token, and do not change the tokens of other requests."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from tcdeploy.engine.engine import Engine, NewToken
from tcdeploy.engine.schedule.constraint import fill_masks
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.programs.compile_stats import measure_compiles
from tests.block_checks import assert_consistent
from tests.conftest import prepare_tiny
from tests.engine.constraints import MASKER, MODULUS, SumConstraint
from tests.engine_loop import generate_tokens

LENGTH = 12
VOCAB = 2000  # fewer than the model's 2048, as a tokenizer may have
PROMPTS = [[random.Random(seed).randrange(3, 900) for _ in range(length)] for seed, length in enumerate((5, 300, 64))]


def submit(engine: Engine, prompt: list[int], tokens_by_id: dict[int, list[NewToken]], **changes: Any) -> int:
    request_id = engine.submit(prompt, SamplingParams(**{"max_tokens": 40, **changes}))
    tokens_by_id[request_id] = []
    return request_id


def drain(engine: Engine, tokens_by_id: dict[int, list[NewToken]]) -> None:
    while engine.has_work:
        for token in engine.step():
            tokens_by_id[token.request_id].append(token)


def ids_of(tokens: list[NewToken]) -> list[int]:
    return [token.token_id for token in tokens]


def assert_idle(engine: Engine) -> None:
    assert_consistent(engine.allocator)
    assert engine.allocator.num_allocatable == engine.allocator.capacity


@pytest.fixture(scope="module")
def constrained_reference(reference_tiny: Any) -> Callable[[list[int]], list[int]]:
    """Greedy tokens of plain transformers, with all other tokens masked."""

    @functools.cache
    @torch.no_grad()
    def answer(prompt: tuple[int, ...]) -> list[int]:
        constraint, tokens = SumConstraint(LENGTH, VOCAB), []
        for _ in range(LENGTH):
            scores = reference_tiny(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1]
            allowed = torch.tensor([constraint.allows(tokens, token_id) for token_id in range(len(scores))])
            tokens.append(int(scores.where(allowed, -torch.inf).argmax()))
        return tokens

    return lambda prompt: answer(tuple(prompt))


def test_a_greedy_constrained_answer_equals_masked_transformers(
    tiny_deployment: Any, constrained_reference: Callable[[list[int]], list[int]]
) -> None:
    """Prompts of one chunk and of several, in one batch."""
    engine, tokens_by_id = tiny_deployment.engine, {}
    constraint = SumConstraint(LENGTH, VOCAB)
    with measure_compiles() as serving:
        for prompt in PROMPTS:
            submit(engine, prompt, tokens_by_id, constraint=constraint)
        drain(engine, tokens_by_id)
    assert [ids_of(tokens) for tokens in tokens_by_id.values()] == [constrained_reference(prompt) for prompt in PROMPTS]
    assert [tokens[-1].finish_reason for tokens in tokens_by_id.values()] == ["stop"] * 3
    assert serving.counts.compiles == 0
    assert [matcher.mask_positions for matcher in constraint.matchers] == [list(range(LENGTH))] * 3, (
        "one mask for each token"
    )
    assert_idle(engine)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.5, "seed": 3}, {"temperature": 0.9, "seed": 4, "top_k": 3, "top_p": 0.9},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.5}, {"logit_bias": ((77, 100.0),)}, {"logprobs": 2},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_parameters_keep_the_constraint_alone_and_in_a_batch(
    tiny_deployment: Any, changes: dict[str, Any]
) -> None:
    engine = tiny_deployment.engine
    alone, together = {}, {}
    for prompt in PROMPTS:
        submit(engine, prompt, alone, constraint=SumConstraint(LENGTH, VOCAB), **changes)
        drain(engine, alone)
    constraint = SumConstraint(LENGTH, VOCAB)
    for prompt in PROMPTS:
        submit(engine, prompt, together, constraint=constraint, **changes)
    drain(engine, together)
    for tokens, batched, matcher in zip(alone.values(), together.values(), constraint.matchers, strict=True):
        assert ids_of(tokens) == ids_of(batched) == matcher.accepted
        assert tokens[-1].finish_reason == "stop" and len(tokens) == LENGTH


def test_unconstrained_requests_get_the_tokens_they_get_alone(tiny_deployment: Any) -> None:
    """Constrained and other requests start and finish in between, so rows move; some prompts take several chunks."""
    engine, source = tiny_deployment.engine, random.Random(2)
    prompts = [[source.randrange(3, 900) for _ in range(length)] for length in (3, 140, 9, 40, 2, 77, 300, 6)]
    kinds: list[dict[str, Any]] = [{}, {"constraint": SumConstraint(LENGTH, VOCAB)}, {"temperature": 0.8, "seed": 9}]
    all_changes = [{**kinds[number % 3], "max_tokens": 12 + 5 * number} for number in range(len(prompts))]
    alone: dict[int, list[NewToken]] = {}
    for prompt, changes in zip(prompts, all_changes, strict=True):
        submit(engine, prompt, alone, **changes)
        drain(engine, alone)
    together: dict[int, list[NewToken]] = {}
    for prompt, changes in zip(prompts, all_changes, strict=True):
        submit(engine, prompt, together, **changes)
        for token in engine.step() + engine.step():
            together[token.request_id].append(token)
    drain(engine, together)
    assert [ids_of(tokens) for tokens in together.values()] == [ids_of(tokens) for tokens in alone.values()]
    assert_idle(engine)


def test_a_row_without_a_matcher_allows_every_token_whatever_was_in_the_buffer() -> None:
    """A sequence may end after its step was launched."""
    masks = numpy.full((3, 2), 0x1234, dtype=numpy.int32)
    first, second = SumConstraint(LENGTH, 64).start(), SumConstraint(LENGTH, 64).start()
    second.accepted.append(2)
    fill_masks([first, None, second], masks)
    allowed = [
        sum(1 << bit for bit in range(32) if (bit + 32 * word) % MODULUS == rest) for rest in (0, 2) for word in (0, 1)
    ]
    assert masks.view(numpy.uint32).tolist() == [allowed[:2], [2**32 - 1] * 2, allowed[2:]]


def test_without_a_constraint_no_token_is_read_before_the_next_step_is_launched(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, order, tokens_by_id = tiny_deployment.engine, [], {}

    def record_calls(name: str) -> None:
        run = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *args: (order.append(name), run(*args))[1])

    for name in ("_launch_forward", "_collect", "_launch_sampling"):
        record_calls(name)
    submit(engine, PROMPTS[0], tokens_by_id, max_tokens=3, temperature=1.0)
    drain(engine, tokens_by_id)
    assert order[:5] == ["_launch_forward", "_launch_sampling", "_launch_forward", "_launch_sampling", "_collect"]
    order.clear()
    submit(engine, PROMPTS[0], tokens_by_id, max_tokens=3, constraint=SumConstraint(3, VOCAB))
    drain(engine, tokens_by_id)
    assert order[:5] == ["_launch_forward", "_launch_sampling", "_launch_forward", "_collect", "_launch_sampling"], (
        "tokens are read while the forward pass runs"
    )


def test_max_tokens_ends_a_constrained_answer(tiny_deployment: Any) -> None:
    engine, tokens_by_id = tiny_deployment.engine, {}
    submit(engine, PROMPTS[0], tokens_by_id, constraint=SumConstraint(LENGTH, VOCAB), max_tokens=LENGTH - 1)
    submit(engine, PROMPTS[0], tokens_by_id, constraint=SumConstraint(LENGTH, VOCAB), max_tokens=LENGTH)
    drain(engine, tokens_by_id)
    ends = [(len(tokens), tokens[-1].finish_reason) for tokens in tokens_by_id.values()]
    assert ends == [(LENGTH - 1, "length"), (LENGTH, "stop")]


def test_a_stop_token_ends_a_constrained_answer(tiny_deployment: Any) -> None:
    engine, tokens_by_id = tiny_deployment.engine, {}
    submit(engine, PROMPTS[0], tokens_by_id, constraint=SumConstraint(LENGTH, VOCAB))
    drain(engine, tokens_by_id)
    [unstopped] = tokens_by_id.values()
    submit(
        engine,
        PROMPTS[0],
        tokens_by_id,
        constraint=SumConstraint(LENGTH, VOCAB),
        stop_token_ids=(unstopped[4].token_id,),
    )
    drain(engine, tokens_by_id)
    stopped = [*tokens_by_id.values()][1]
    first = ids_of(unstopped).index(unstopped[4].token_id)
    assert ids_of(stopped) == ids_of(unstopped)[: first + 1] and stopped[-1].finish_reason == "stop"


def test_a_step_makes_one_mask_call_per_masker(tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call into a grammar library may have to wait for the GIL."""
    engine, tokens_by_id, fill_sizes = tiny_deployment.engine, {}, []
    fill = MASKER.fill
    monkeypatch.setattr(
        MASKER, "fill", lambda matcher_rows, masks: (fill_sizes.append(len(matcher_rows)), fill(matcher_rows, masks))
    )
    constraint = SumConstraint(LENGTH, VOCAB)
    for prompt in PROMPTS:
        submit(engine, prompt, tokens_by_id, constraint=constraint)
    submit(engine, PROMPTS[0], tokens_by_id, constraint=FailingConstraint())
    drain(engine, tokens_by_id)
    assert max(fill_sizes) == len(PROMPTS) and sum(fill_sizes) == len(PROMPTS) * LENGTH
    assert len(fill_sizes) < 2 * LENGTH, "one call for each row"
    assert [tokens[-1].finish_reason for tokens in tokens_by_id.values()] == ["stop", "stop", "stop", "error"]
    assert_idle(engine)


class FailingConstraint:
    """Allows and accepts no token, like a grammar that has reached its limits."""

    @property
    def masker(self) -> FailingConstraint:
        return self

    def start(self) -> FailingConstraint:
        return self

    def fill(self, matcher_rows: Any, masks: Any) -> None:
        pass

    def accept(self, token_id: int) -> Any:
        return "error"


def test_a_failing_constraint_ends_only_its_own_request(tiny_deployment: Any) -> None:
    engine, tokens_by_id = tiny_deployment.engine, {}
    plain = generate_tokens(engine, [PROMPTS[0]], SamplingParams(max_tokens=9))[0]
    submit(engine, PROMPTS[1], tokens_by_id, constraint=FailingConstraint(), temperature=1.0)
    submit(engine, PROMPTS[0], tokens_by_id, max_tokens=9)
    drain(engine, tokens_by_id)
    failed, other = tokens_by_id.values()
    assert [token.finish_reason for token in failed] == ["error"]
    assert ids_of(other) == plain
    assert_idle(engine)


def test_preemption_changes_no_token(cache_dir: str, tiny_deployment: Any) -> None:
    prompts = [[random.Random(seed).randrange(3, 900) for _ in range(120)] for seed in range(3)]
    changes = {"max_tokens": 60, "temperature": 0.8, "seed": 5}
    alone: dict[int, list[NewToken]] = {}
    for prompt in prompts:
        submit(tiny_deployment.engine, prompt, alone, constraint=SumConstraint(50, VOCAB), **changes)
        drain(tiny_deployment.engine, alone)
    scarce = prepare_tiny(cache_dir, context=400, kv_blocks=27).engine
    before, together = scarce.scheduler.preemptions, {}
    for prompt in prompts:
        submit(scarce, prompt, together, constraint=SumConstraint(50, VOCAB), **changes)
    drain(scarce, together)
    assert scarce.scheduler.preemptions > before, "the test needs preemptions"
    assert [ids_of(tokens) for tokens in together.values()] == [ids_of(tokens) for tokens in alone.values()]
    assert_idle(scarce)


@pytest.mark.parametrize(
    ("method", "failing_call"), [("_run_prefill", 0), ("_run_decode", 0), ("_run_decode", 7), ("sample", 6)]
)
def test_a_failed_step_loses_no_token(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch, method: str, failing_call: int,
    constrained_reference: Callable[[list[int]], list[int]],
) -> None:  # fmt: skip
    """Failing before and after the tokens of the previous step are read."""
    engine, tokens_by_id, calls = tiny_deployment.engine, {}, []
    engine.allocator.reset_prefix_cache()
    run = getattr(engine.runner, method)

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == failing_call + 1:
            raise RuntimeError("out of luck")
        return run(*args, **options)

    monkeypatch.setattr(engine.runner, method, failing)
    constraint = SumConstraint(LENGTH, VOCAB)
    for prompt in PROMPTS:
        submit(engine, prompt, tokens_by_id, constraint=constraint)
    with pytest.raises(RuntimeError, match="out of luck"):
        drain(engine, tokens_by_id)
    drain(engine, tokens_by_id)
    assert [ids_of(tokens) for tokens in tokens_by_id.values()] == [constrained_reference(prompt) for prompt in PROMPTS]
    assert [matcher.accepted for matcher in constraint.matchers] == [ids_of(tokens) for tokens in tokens_by_id.values()]
    assert_idle(engine)


def test_an_aborted_request_accepts_no_more_tokens(tiny_deployment: Any) -> None:
    engine, tokens_by_id, constraint = tiny_deployment.engine, {}, SumConstraint(LENGTH, VOCAB)
    aborted = submit(engine, PROMPTS[0], tokens_by_id, constraint=constraint)
    other = submit(engine, PROMPTS[2], tokens_by_id, constraint=constraint)
    for _ in range(6):
        for token in engine.step():
            tokens_by_id[token.request_id].append(token)
    engine.abort(aborted)
    accepted = list(constraint.matchers[0].accepted)
    drain(engine, tokens_by_id)
    assert constraint.matchers[0].accepted == accepted == ids_of(tokens_by_id[aborted])
    assert len(tokens_by_id[other]) == LENGTH
    assert_idle(engine)


def test_parameters_compare_constraints_by_identity() -> None:
    constraint = SumConstraint(1, 1)
    params, equal = (SamplingParams(constraint=constraint) for _ in range(2))
    assert params == equal and hash(params) == hash(equal)
    assert params != SamplingParams(constraint=SumConstraint(1, 1)) != SamplingParams()
