"""Continuous batching on the real programs: whatever runs beside a request, its tokens are transformers' own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tcdeploy.compiler.ledger import measure_compiles
from tcdeploy.engine.engine import Engine, NewToken
from tcdeploy.engine.sequence import SamplingParams
from tcdeploy.errors import SpaceError, UsageError
from tests.conftest import prepare_tiny

TOKENS = 48
SCARCE_BLOCKS = 25  # of 16 slots: the longest request alone takes 22 of 24, so its neighbours must go


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Mixed lengths, several longer than the largest bucket (128); two pairs share a beginning."""
    source = random.Random(5)
    lengths = (300, 3, 129, 64, 1, 250, 31, 17)
    made = [[source.randrange(3, 900) for _ in range(length)] for length in lengths]
    return [*made, made[0][:200] + [7, 8, 9], made[5][:100] + [11]]


@pytest.fixture(scope="module")
def answers(prompts: list[list[int]], reference_tiny: Any) -> list[list[int]]:
    """Transformers' own greedy continuation of each, alone; on past the end of a text, where `generate` stops."""

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


def test_the_device_knows_every_block_of_every_row_by_one_copy_a_step(
    cache_dir: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks that run out: rows come, move, lose what was taken ahead, and come back."""
    engine = prepare_tiny(cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    row_assignment, copies = engine.runner.row_assignment, []
    bring, upload = row_assignment.upload_block_table, row_assignment._upload_blocks

    def checked() -> None:
        before = len(copies)
        bring()
        assert len(copies) - before <= 1
        for row, sequence in enumerate(engine.scheduler.running):
            assert row_assignment.state.block_table[row, : len(sequence.blocks)].tolist() == sequence.blocks

    monkeypatch.setattr(row_assignment, "upload_block_table", checked)
    monkeypatch.setattr(row_assignment, "_upload_blocks", lambda grown: (copies.append(grown), upload(grown))[1])
    preempted = engine.scheduler.preemptions
    engine.generate(prompts, SamplingParams(max_new_tokens=TOKENS))
    assert engine.scheduler.preemptions > preempted and len(copies) > TOKENS // 16
    assert_idle(engine)


def test_blocks_go_up_when_a_prompt_is_on_its_way(tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before: a prefill reads a table of its own, and each launch in front of it holds the first token up."""
    engine, done = tiny_deployment.engine, []
    for owner, name in ((engine.runner, "_run"), (engine.runner.row_assignment, "_upload_blocks")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda given, name=name, call=call: (done.append(name), call(given))[1])
    engine.generate([list(range(10, 30))], SamplingParams(max_new_tokens=2))
    assert done == ["_run", "_upload_blocks", "_run"]
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    engine.allocator.assert_consistent()
    assert engine.allocator.free == engine.allocator.capacity
    assert not engine.has_work


def test_requests_that_arrive_at_any_time_get_the_tokens_they_would_get_alone(
    tiny_deployment: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    engine, params = tiny_deployment.engine, SamplingParams(max_new_tokens=TOKENS)
    engine.allocator.reset_prefix_cache()
    found: dict[int, list[int]] = {}
    ids = []
    with measure_compiles() as serving:
        for prompt in prompts:
            ids.append(engine.submit(prompt, params))
            found[ids[-1]] = []
            for token in engine.step() + engine.step():
                found[token.request_id].append(token.token_id)
        drain(engine, found)
    assert [found[request_id] for request_id in ids] == answers
    assert serving.counts.compiles == 0
    assert_idle(engine)


def test_tokens_survive_pre_emption(cache_dir: str, prompts: list[list[int]], answers: list[list[int]]) -> None:
    engine = prepare_tiny(cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    before = engine.scheduler.preemptions
    assert engine.generate(prompts, SamplingParams(max_new_tokens=TOKENS)) == answers
    assert engine.scheduler.preemptions > before, "blocks were not scarce, so this shows nothing"
    assert_idle(engine)


def test_a_known_beginning_is_not_computed_again_and_changes_no_token(
    tiny_deployment: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    engine, params = tiny_deployment.engine, SamplingParams(max_new_tokens=TOKENS)
    engine.allocator.reset_prefix_cache()
    computed = []
    for number in (0, 0, 8):  # the prompt, the same prompt, and one that begins like it
        request_id = engine.submit(prompts[number], params)
        sequence = engine._requests[request_id]
        found: dict[int, list[int]] = {request_id: []}
        drain(engine, found)
        assert found[request_id] == answers[number]
        computed.append(len(prompts[number]) - sequence.prefix_hit_tokens)
    assert computed == [300, 300 - 18 * 16, 203 - 12 * 16]


def test_an_aborted_request_frees_its_blocks_and_disturbs_nobody(
    tiny_deployment: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    engine, params = tiny_deployment.engine, SamplingParams(max_new_tokens=TOKENS)
    found: dict[int, list[int]] = {}
    ids = [engine.submit(prompt, params) for prompt in prompts]
    found.update((request_id, []) for request_id in ids)
    gone = [ids[0], ids[3], ids[7], ids[9]]  # running, and still waiting
    for number in range(14):
        for token in engine.step():
            found[token.request_id].append(token.token_id)
        if number in (1, 4, 9, 13):
            engine.abort(gone[(1, 4, 9, 13).index(number)])
    at_abort = {request_id: len(found[request_id]) for request_id in gone}
    drain(engine, found)
    for number, request_id in enumerate(ids):
        if request_id in gone:
            assert len(found[request_id]) == at_abort[request_id], "a token came after the abort"
            assert found[request_id] == answers[number][: at_abort[request_id]]
        else:
            assert found[request_id] == answers[number]
    assert_idle(engine)


def test_a_seeded_request_is_the_same_alone_in_a_batch_and_after_pre_emption(
    cache_dir: str, tiny_deployment: Any, prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_new_tokens=TOKENS, temperature=0.8, top_k=40, top_p=0.95, seed=17)
    alone = [tiny_deployment.engine.generate([prompt], params)[0] for prompt in prompts]
    assert tiny_deployment.engine.generate(prompts, params) == alone
    scarce = prepare_tiny(cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    before = scarce.scheduler.preemptions
    assert scarce.generate(prompts, params) == alone
    assert scarce.scheduler.preemptions > before


def test_rows_are_sampled_each_by_its_own_parameters(
    tiny_deployment: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """A greedy request between sampled and penalised ones is still greedy."""
    engine = tiny_deployment.engine
    asked = [
        SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=1),
        SamplingParams(max_new_tokens=TOKENS),
        SamplingParams(max_new_tokens=TOKENS, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=TOKENS, temperature=0.7, min_p=0.1, seed=2),
    ]
    alone = [engine.generate([prompts[number]], params)[0] for number, params in enumerate(asked)]
    found: dict[int, list[int]] = {}
    for number, params in enumerate(asked):
        found[engine.submit(prompts[number], params)] = []
    drain(engine, found)
    assert list(found.values()) == alone
    assert alone[1] == answers[1]
    assert alone[2] != answers[2], "the penalties did nothing, so this shows nothing"
    assert len(set(alone[2])) > len(set(answers[2])), "penalised tokens repeat less"


def test_logprobs_are_those_of_the_model(tiny_deployment: Any, reference_tiny: Any) -> None:
    engine, prompt = tiny_deployment.engine, [40, 41, 42, 43]
    tokens: list[NewToken] = list(engine.stream([prompt], SamplingParams(max_new_tokens=6, logprobs=3)))
    ids = torch.tensor([prompt + [token.token_id for token in tokens]])
    with torch.no_grad():
        wanted = reference_tiny(ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    for token, row in zip(tokens, wanted, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.chosen == pytest.approx(row[token.token_id].item(), abs=1e-4)
        top = row.topk(3)
        assert [one for one, _ in token.logprobs.top] == top.indices.tolist()
        assert [value for _, value in token.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert next(engine.stream([prompt], SamplingParams(max_new_tokens=1))).logprobs is None


def test_a_stop_token_is_the_last_though_the_device_ran_on(tiny_deployment: Any, answers: list[list[int]]) -> None:
    engine = tiny_deployment.engine
    prompt, free = [40, 41, 42], engine.generate([[40, 41, 42]], SamplingParams(max_new_tokens=20))[0]
    stop = free[7]
    beside = engine.submit([9] * 50, SamplingParams(max_new_tokens=30))
    tokens = list(engine.stream([prompt], SamplingParams(max_new_tokens=20, stop_token_ids=(stop,))))
    assert [token.token_id for token in tokens] == free[: free.index(stop) + 1]
    assert [token.finish_reason for token in tokens][-1] == "stop"
    engine.abort(beside)
    while engine.has_work:
        engine.step()
    assert_idle(engine)


def test_two_streams_of_one_engine_share_its_steps(tiny_deployment: Any) -> None:
    engine, params = tiny_deployment.engine, SamplingParams(max_new_tokens=12)
    alone = [engine.generate([prompt], params)[0] for prompt in ([40, 41, 42], [7] * 40)]
    first, second = engine.stream([[40, 41, 42]], params), engine.stream([[7] * 40], params)
    found: list[list[int]] = [[], []]
    for _ in range(12):
        found[0].append(next(first).token_id)
        found[1].append(next(second).token_id)
    assert found == alone
    assert list(first) == list(second) == []
    assert_idle(engine)


@pytest.mark.parametrize(
    ("prompt", "asked", "error", "words"),
    [
        ([], {}, UsageError, "empty"),
        ([5, 10**9], {}, UsageError, "no token id"),
        ([-1], {}, UsageError, "no token id"),
        (["a"], {}, UsageError, "no token id"),
        ([5, True], {}, UsageError, "no token id"),
        ([5] * 2048, {"max_new_tokens": 1}, UsageError, "exceed the context"),
        ([5], {"max_new_tokens": 10**6}, UsageError, "exceed the context"),
        ([5], {"temperature": float("nan")}, UsageError, "temperature"),
        ([5], {"min_p": 1.5}, UsageError, "min"),
        ([5], {"top_p": 0.0}, UsageError, "top"),
        ([5], {"repetition_penalty": 0.0}, UsageError, "repetition"),
        ([5], {"logprobs": 99}, UsageError, "logprobs"),
    ],
)
def test_what_cannot_be_served_is_a_typed_error_and_harms_nothing(
    tiny_deployment: Any, prompt: list[int], asked: dict[str, Any], error: type[Exception], words: str
) -> None:
    engine = tiny_deployment.engine
    beside = engine.submit([40, 41, 42], SamplingParams(max_new_tokens=3))
    with pytest.raises(error, match=words):
        engine.submit(prompt, SamplingParams(**asked))
    found: dict[int, list[int]] = {beside: []}
    drain(engine, found)
    assert len(found[beside]) == 3
    assert_idle(engine)


def test_more_blocks_than_exist_are_refused_at_once(cache_dir: str) -> None:
    engine = prepare_tiny(cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    longest = engine.allocator.capacity * 16
    assert longest == engine.plan.context, "KV limits the context here"
    with pytest.raises((UsageError, SpaceError), match="context"):
        engine.submit([5] * longest, SamplingParams(max_new_tokens=1))
    assert len(engine.generate([[5] * (longest - 2)], SamplingParams(max_new_tokens=2))[0]) == 2


def test_to_abort_what_is_not_open_is_a_typed_error(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    with pytest.raises(UsageError, match="no open request 99999"):
        engine.abort(99999)
    request_id = engine.submit([40, 41, 42], SamplingParams(max_new_tokens=1))
    drain(engine, {request_id: []})
    with pytest.raises(UsageError, match=f"no open request {request_id}"):
        engine.abort(request_id)
    assert_idle(engine)


def test_a_step_that_raises_loses_nothing_and_leaves_no_false_prefix(
    tiny_deployment: Any, prompts: list[list[int]], answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler moved on as if the step had run: whatever it believed to be in the cache must be forgotten."""
    engine, params = tiny_deployment.engine, SamplingParams(max_new_tokens=TOKENS)
    for method, failing_call in (("prefill", 0), ("prefill", 2), ("decode", 0), ("decode", 7)):
        engine.allocator.reset_prefix_cache()
        run, calls = getattr(engine.runner, method), []

        def failing(*args: Any, run: Any = run, calls: list[int] = calls, at: int = failing_call) -> Any:
            calls.append(1)
            if len(calls) == at + 1:
                raise RuntimeError("out of luck")
            return run(*args)

        monkeypatch.setattr(engine.runner, method, failing)
        ids = [engine.submit(prompt, params) for prompt in prompts]
        found: dict[int, list[int]] = {request_id: [] for request_id in ids}
        with pytest.raises(RuntimeError, match="out of luck"):
            drain(engine, found)
        drain(engine, found)
        monkeypatch.undo()
        assert [found[request_id] for request_id in ids] == answers, (method, failing_call)
        assert engine.generate(prompts, params) == answers, "prefixes of before are right or gone"
        assert_idle(engine)


def test_tokens_of_submitted_requests_wait_while_a_stream_drives_the_engine(tiny_deployment: Any) -> None:
    engine, params = tiny_deployment.engine, SamplingParams(max_new_tokens=6)
    [alone] = engine.generate([[40, 41, 42]], params)
    request_id = engine.submit([40, 41, 42], params)
    engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20))
    found: dict[int, list[int]] = {request_id: []}
    drain(engine, found)
    assert found[request_id] == alone
    assert_idle(engine)


def test_tokens_that_wait_are_gone_with_an_abort(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    request_id = engine.submit([40, 41, 42], SamplingParams(max_new_tokens=60))
    engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=10))
    assert engine._buffered_tokens, "nothing waits, so this shows nothing"
    engine.abort(request_id)
    while engine.has_work:
        assert engine.step() == []
    assert_idle(engine)


def test_a_request_aborted_inside_its_stream_ends_the_stream(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    stream = engine.stream([[40, 41, 42]], SamplingParams(max_new_tokens=30))
    next(stream)
    [request_id] = engine._requests
    engine.abort(request_id)
    assert list(stream) == []
    while engine.has_work:
        engine.step()
    assert_idle(engine)
