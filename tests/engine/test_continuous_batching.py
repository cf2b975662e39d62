"""Continuous batching with compiled programs: a request gets transformers' tokens, whatever else is in the batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.schedule.step_batch import StepBatch
from tcdeploy.errors import SpaceError, UsageError
from tcdeploy.programs.compile_stats import measure_compiles
from tests.block_checks import assert_consistent
from tests.conftest import prepare_tiny
from tests.engine_loop import generate_tokens, new_tokens

TOKENS = 24
SCARCE_BLOCKS = 24  # of 16 tokens: the longest request alone takes 21 of 23, so the others are preempted


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Mixed lengths, several longer than the largest bucket (128); two pairs share a prefix."""
    source = random.Random(5)
    lengths = (300, 3, 129, 64, 1, 250, 31, 17)
    distinct = [[source.randrange(3, 900) for _ in range(length)] for length in lengths]
    return [*distinct, distinct[0][:200] + [7, 8, 9], distinct[5][:100] + [11]]


@pytest.fixture(scope="module")
def answers(prompts: list[list[int]], reference_tiny: Any) -> list[list[int]]:
    """Transformers' greedy continuation of each prompt alone, not stopped at EOS as `generate` would."""

    @torch.no_grad()
    def answer(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        for _ in range(TOKENS):
            ids = torch.cat([ids, reference_tiny(ids, use_cache=False).logits[:, -1:].argmax(dim=-1)], dim=1)
        return ids[0, len(prompt) :].tolist()

    return [answer(prompt) for prompt in prompts]


def drain(engine: Engine, answers: dict[int, list[int]]) -> None:
    while engine.has_work:
        for token in engine.step():
            answers[token.request_id].append(token.token_id)


def test_block_tables_are_complete_after_at_most_one_copy_per_step(
    cache_dir: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scarce blocks: rows are added, moved, stripped of lookahead blocks, preempted and restarted."""
    engine = prepare_tiny(cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    row_assignment, copies = engine.runner.row_assignment, []
    apply, upload_blocks = row_assignment.apply, row_assignment._upload_blocks

    def checked(batch: StepBatch) -> None:
        copies_before = len(copies)
        apply(batch)
        assert len(copies) - copies_before <= 1
        for row, sequence in enumerate(engine.scheduler.running if batch.num_decoding else ()):
            assert row_assignment.decode_rows.block_table[row, : len(sequence.blocks)].tolist() == sequence.blocks

    monkeypatch.setattr(row_assignment, "apply", checked)
    monkeypatch.setattr(
        row_assignment, "_upload_blocks", lambda blocks: (copies.append(blocks), upload_blocks(blocks))[1]
    )
    preempted = engine.scheduler.preemptions
    generate_tokens(engine, prompts, SamplingParams(max_tokens=TOKENS))
    assert engine.scheduler.preemptions > preempted
    assert len(copies) > TOKENS // 16 + 1, "the test needs more copies than one sequence has block boundaries"
    assert_idle(engine)


def test_block_tables_are_uploaded_after_the_prefill_is_launched(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill reads a table of its own, and each earlier launch would delay the first token."""
    engine, calls = tiny_deployment.engine, []
    for owner, name in ((engine.runner.graphs, "run"), (engine.runner.row_assignment, "_upload_blocks")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda value, name=name, call=call: (calls.append(name), call(value))[1])
    generate_tokens(engine, [list(range(10, 30))], SamplingParams(max_tokens=2))
    assert calls == ["run", "_upload_blocks", "run"]
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    assert_consistent(engine.allocator)
    assert engine.allocator.num_allocatable == engine.allocator.capacity
    assert not engine.has_work


@pytest.mark.parametrize("mixed_steps", [None, "off"])
def test_requests_that_arrive_at_any_time_get_the_tokens_they_would_get_alone(
    cache_dir: str, prompts: list[list[int]], answers: list[list[int]], mixed_steps: str | None
) -> None:
    flags = {"mixed_steps": mixed_steps} if mixed_steps else {}
    engine, params = prepare_tiny(cache_dir, **flags).engine, SamplingParams(max_tokens=TOKENS)
    engine.allocator.reset_prefix_cache()
    answers_by_id: dict[int, list[int]] = {}
    ids = []
    with measure_compiles() as serving:
        for prompt in prompts:
            ids.append(engine.submit(prompt, params))
            answers_by_id[ids[-1]] = []
            for token in engine.step() + engine.step():
                answers_by_id[token.request_id].append(token.token_id)
        drain(engine, answers_by_id)
    assert [answers_by_id[request_id] for request_id in ids] == answers
    assert serving.counts.compiles == 0
    assert_idle(engine)


@pytest.mark.parametrize("num_requests", [50, pytest.param(80, marks=pytest.mark.long)])
def test_random_traffic_with_mixed_steps_changes_no_token(
    cache_dir: str, num_requests: int, reference_tiny: Any
) -> None:
    engine = prepare_tiny(cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    preemptions = engine.scheduler.preemptions
    check_random_traffic(engine, num_requests, reference=reference_tiny)
    assert engine.scheduler.preemptions > preemptions


def random_requests(source: random.Random, num_requests: int) -> list[tuple[list[int], SamplingParams]]:
    params = [SamplingParams(max_tokens=count) for count in (1, 6, 40)]
    beginnings = [[source.randrange(3, 900) for _ in range(200)] for _ in range(4)]
    requests = []
    for _ in range(num_requests):
        shared = source.choice(beginnings)[: source.choice((0, 40, 150))]
        prompt = shared + [source.randrange(3, 900) for _ in range(source.choice((1, 7, 40, 120)))]
        requests.append((prompt, source.choice(params)))
    return requests


def check_random_traffic(engine: Engine, num_requests: int, seed: int = 21, reference: Any = None) -> None:
    """Requests that arrive at random steps, some of which are aborted, get the tokens that they get alone.

    `reference`: transformers' model in float32. One forward pass of it checks all tokens of a request. Without it, each
    request runs alone on the engine first.
    """
    source = random.Random(seed)
    requests = random_requests(source, num_requests)
    engine.allocator.reset_prefix_cache()
    alone = [] if reference else [generate_tokens(engine, [prompt], params)[0] for prompt, params in requests]
    engine.allocator.reset_prefix_cache()
    mixed_steps, schedule = [], engine.scheduler.schedule

    def noted_schedule() -> Any:
        step = schedule()
        if step is not None and step.chunks and step.decode:
            mixed_steps.append(step)
        return step

    tokens_by_id: dict[int, list[int]] = {}
    aborted: set[int] = set()
    engine.scheduler.schedule = noted_schedule  # type: ignore[method-assign]
    try:
        with measure_compiles() as serving:
            for prompt, params in requests:
                request_id = engine.submit(prompt, params)
                tokens_by_id[request_id] = []
                for _ in range(source.choice((0, 0, 1, 3))):
                    for token in engine.step():
                        tokens_by_id[token.request_id].append(token.token_id)
                if source.random() < 0.1 and request_id in engine._requests:
                    engine.abort(request_id)
                    aborted.add(request_id)
            drain(engine, tokens_by_id)
    finally:
        engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    for number, (request_id, tokens) in enumerate(tokens_by_id.items()):
        prompt, params = requests[number]
        assert request_id in aborted or len(tokens) == params.max_tokens
        assert tokens == (next_tokens(reference, prompt, tokens) if reference else alone[number][: len(tokens)])
    assert serving.counts.compiles == 0
    assert len(mixed_steps) > num_requests // 4
    assert_idle(engine)


def next_tokens(reference: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """The greedy tokens after the prompt, and after each of `tokens` but the last. Equal to `tokens` if these are
    greedy.
    """
    if not tokens:
        return []
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens[:-1]]), use_cache=False, logits_to_keep=len(tokens)).logits
    chosen: list[int] = logits[0].argmax(-1).tolist()
    return chosen


def test_preemption_changes_no_token(cache_dir: str, prompts: list[list[int]], answers: list[list[int]]) -> None:
    engine = prepare_tiny(cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    before = engine.scheduler.preemptions
    assert generate_tokens(engine, prompts, SamplingParams(max_tokens=TOKENS)) == answers
    assert engine.scheduler.preemptions > before, "the test needs preemptions"
    assert_idle(engine)


def test_a_cached_prefix_is_not_computed_again_and_changes_no_token(
    tiny_deployment: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    engine, params = tiny_deployment.engine, SamplingParams(max_tokens=TOKENS)
    engine.allocator.reset_prefix_cache()
    computed = []
    for number in (0, 0, 8):  # the prompt, the same prompt, and one with the same prefix
        request_id = engine.submit(prompts[number], params)
        sequence = engine._requests[request_id]
        answers_by_id: dict[int, list[int]] = {request_id: []}
        drain(engine, answers_by_id)
        assert answers_by_id[request_id] == answers[number]
        computed.append(len(prompts[number]) - sequence.prefix_hit_tokens)
    assert computed == [300, 300 - 18 * 16, 203 - 12 * 16]


def test_an_aborted_request_frees_its_blocks_and_changes_no_other_request(
    tiny_deployment: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    engine, params = tiny_deployment.engine, SamplingParams(max_tokens=TOKENS)
    answers_by_id: dict[int, list[int]] = {}
    ids = [engine.submit(prompt, params) for prompt in prompts]
    answers_by_id.update((request_id, []) for request_id in ids)
    aborted = [ids[0], ids[3], ids[7], ids[9]]  # running, and still waiting
    for number in range(14):
        for token in engine.step():
            answers_by_id[token.request_id].append(token.token_id)
        if number in (1, 4, 9, 13):
            engine.abort(aborted[(1, 4, 9, 13).index(number)])
    at_abort = {request_id: len(answers_by_id[request_id]) for request_id in aborted}
    drain(engine, answers_by_id)
    for number, request_id in enumerate(ids):
        if request_id in aborted:
            assert len(answers_by_id[request_id]) == at_abort[request_id], "a token came after the abort"
            assert answers_by_id[request_id] == answers[number][: at_abort[request_id]]
        else:
            assert answers_by_id[request_id] == answers[number]
    assert_idle(engine)


def test_a_seeded_request_is_the_same_alone_in_a_batch_and_after_preemption(
    cache_dir: str, tiny_deployment: Any, prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=0.8, top_k=40, top_p=0.95, seed=17)
    alone = [generate_tokens(tiny_deployment.engine, [prompt], params)[0] for prompt in prompts]
    assert generate_tokens(tiny_deployment.engine, prompts, params) == alone
    scarce = prepare_tiny(cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    before = scarce.scheduler.preemptions
    assert generate_tokens(scarce, prompts, params) == alone
    assert scarce.scheduler.preemptions > before


def test_each_row_is_sampled_with_its_own_parameters(
    tiny_deployment: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """A greedy request stays greedy beside sampled and penalised ones."""
    engine = tiny_deployment.engine
    all_params = [
        SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=1),
        SamplingParams(max_tokens=TOKENS),
        SamplingParams(max_tokens=TOKENS, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3),
        SamplingParams(max_tokens=TOKENS, temperature=0.7, min_p=0.1, seed=2),
    ]
    alone = [generate_tokens(engine, [prompts[number]], params)[0] for number, params in enumerate(all_params)]
    answers_by_id: dict[int, list[int]] = {}
    for number, params in enumerate(all_params):
        answers_by_id[engine.submit(prompts[number], params)] = []
    drain(engine, answers_by_id)
    assert list(answers_by_id.values()) == alone
    assert alone[1] == answers[1]
    assert alone[2] != answers[2], "the test needs penalties that change the tokens"
    assert len(set(alone[2])) > len(set(answers[2])), "penalised tokens repeat less"


def test_logprobs_are_those_of_the_model(tiny_deployment: Any, reference_tiny: Any) -> None:
    engine, prompt = tiny_deployment.engine, [40, 41, 42, 43]
    [tokens] = new_tokens(engine, [prompt], SamplingParams(max_tokens=6, logprobs=3))
    ids = torch.tensor([prompt + [token.token_id for token in tokens]])
    with torch.no_grad():
        expected = reference_tiny(ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    for token, row in zip(tokens, expected, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.chosen == pytest.approx(row[token.token_id].item(), abs=1e-4)
        top = row.topk(3)
        assert [token_id for token_id, _ in token.logprobs.top] == top.indices.tolist()
        assert [value for _, value in token.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert new_tokens(engine, [prompt], SamplingParams(max_tokens=1))[0][0].logprobs is None


def test_tokens_sampled_after_a_stop_token_are_dropped(tiny_deployment: Any, answers: list[list[int]]) -> None:
    engine = tiny_deployment.engine
    prompt, unstopped = [40, 41, 42], generate_tokens(engine, [[40, 41, 42]], SamplingParams(max_tokens=20))[0]
    stop = unstopped[7]
    other = engine.submit([9] * 50, SamplingParams(max_tokens=30))
    [tokens] = new_tokens(engine, [prompt], SamplingParams(max_tokens=20, stop_token_ids=(stop,)))
    assert [token.token_id for token in tokens] == unstopped[: unstopped.index(stop) + 1]
    assert [token.finish_reason for token in tokens][-1] == "stop"
    engine.abort(other)
    while engine.has_work:
        engine.step()
    assert_idle(engine)


@pytest.mark.parametrize(
    ("prompt", "changes", "error", "message"),
    [
        ([], {}, UsageError, "empty"),
        ([5, 10**9], {}, UsageError, "not a token id"),
        ([-1], {}, UsageError, "not a token id"),
        (["a"], {}, UsageError, "not a token id"),
        ([5, True], {}, UsageError, "not a token id"),
        ([5] * 2048, {"max_tokens": 1}, UsageError, "exceed the context"),
        ([5], {"max_tokens": 10**6}, UsageError, "exceed the context"),
        ([5], {"temperature": float("nan")}, UsageError, "temperature"),
        ([5], {"min_p": 1.5}, UsageError, "min"),
        ([5], {"top_p": -0.1}, UsageError, "top"),
        ([5], {"repetition_penalty": 0.0}, UsageError, "repetition"),
        ([5], {"logprobs": 99}, UsageError, "logprobs"),
    ],
)
def test_an_invalid_request_raises_a_typed_error_and_affects_no_other_request(
    tiny_deployment: Any, prompt: list[int], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = tiny_deployment.engine
    other = engine.submit([40, 41, 42], SamplingParams(max_tokens=3))
    with pytest.raises(error, match=message):
        engine.submit(prompt, SamplingParams(**changes))
    answers_by_id: dict[int, list[int]] = {other: []}
    drain(engine, answers_by_id)
    assert len(answers_by_id[other]) == 3
    assert_idle(engine)


def test_a_request_larger_than_the_cache_is_refused_on_submit(cache_dir: str) -> None:
    engine = prepare_tiny(cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    longest = engine.allocator.capacity * 16
    assert longest == engine.plan.context, "the KV cache limits the context here"
    with pytest.raises((UsageError, SpaceError), match="context"):
        engine.submit([5] * longest, SamplingParams(max_tokens=1))
    assert len(generate_tokens(engine, [[5] * (longest - 2)], SamplingParams(max_tokens=2))[0]) == 2


def test_aborting_a_request_that_is_not_open_raises_a_typed_error(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    with pytest.raises(UsageError, match="no open request 99999"):
        engine.abort(99999)
    request_id = engine.submit([40, 41, 42], SamplingParams(max_tokens=1))
    drain(engine, {request_id: []})
    with pytest.raises(UsageError, match=f"no open request {request_id}"):
        engine.abort(request_id)
    assert_idle(engine)


def test_a_failed_step_loses_no_token_and_leaves_no_wrong_prefix(
    tiny_deployment: Any, prompts: list[list[int]], answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler advanced as if the step had run, so its record of the cache must be reset."""
    engine, params = tiny_deployment.engine, SamplingParams(max_tokens=TOKENS)
    for method, failing_call in (("_run_prefill", 0), ("_run_prefill", 2), ("_run_decode", 0), ("_run_decode", 7)):
        engine.allocator.reset_prefix_cache()
        run, calls = getattr(engine.runner, method), []

        def failing(
            *args: Any, run: Any = run, calls: list[int] = calls, at: int = failing_call, **options: Any
        ) -> Any:
            calls.append(1)
            if len(calls) == at + 1:
                raise RuntimeError("out of luck")
            return run(*args, **options)

        monkeypatch.setattr(engine.runner, method, failing)
        ids = [engine.submit(prompt, params) for prompt in prompts]
        answers_by_id: dict[int, list[int]] = {request_id: [] for request_id in ids}
        with pytest.raises(RuntimeError, match="out of luck"):
            drain(engine, answers_by_id)
        drain(engine, answers_by_id)
        monkeypatch.undo()
        assert [answers_by_id[request_id] for request_id in ids] == answers, (method, failing_call)
        assert generate_tokens(engine, prompts, params) == answers, "earlier cached prefixes are correct or dropped"
        assert_idle(engine)


def test_an_abort_drops_buffered_tokens(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    request_id = engine.submit([40, 41, 42], SamplingParams(max_tokens=60))
    engine.step()
    with engine.paused(1):  # waits for the step in flight
        assert engine._buffered_tokens, "the test needs buffered tokens"
    engine.abort(request_id)
    while engine.has_work:
        assert engine.step() == []
    assert_idle(engine)
