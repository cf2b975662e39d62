"""Prefix reuse of models with state in slots: tokens equal those of transformers' `generate`, and hits are counted.

Programs are traced by Dynamo and not compiled, as in test_hybrid_models.py. Snapshots are taken from 32 tokens on
instead of 512 and 4,096, so that short prompts have them.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.engine.check.inputs import make_timing_batch
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.planning import memory, sizes
from tests import hybrid_models, running_sum
from tests.conftest import reset_programs
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine.test_continuous_batching import check_random_traffic
from tests.engine.test_slot_state import MODELS, assert_idle, deploy_traced
from tests.engine.test_snapshots import FAULTS, check_slots
from tests.engine_loop import generate_despite_failures, generate_tokens, new_tokens

TOKENS = 16
MIN_TOKENS = 32
SCARCE_BLOCKS = 30  # of 16 tokens; the longest request takes 21
SUMS = "sums of hybrid layers", "sums only"
QUICK = SUMS[0], "qwen3_5_text", "bamba"  # the others with scripts/test --long


class Served:
    """A model, its deployment with few KV blocks and few snapshots, and prompts with common prefixes."""

    def __init__(self, family: str, folder: Path) -> None:
        reset_programs()
        is_sum = family in SUMS
        layers = MODELS["sums only" if family == "sums only" else "hybrid"]
        self.model = (
            running_sum.save_model(folder / "model", layers)
            if is_sum else hybrid_models.save_model(family, folder / "model", max_position_embeddings=1024)
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            for module in (memory, sizes):
                patch.setattr(module, "MIN_SNAPSHOT_TOKENS", MIN_TOKENS)
            patch.setattr(memory, "SNAPSHOT_FRACTION", 0.9)
            patch.setattr(memory, "MAX_SNAPSHOTS_PER_SEQUENCE", 1)
            self.deployment = deploy_traced(
                self.model, str(folder / "cache"), buckets=(32, 128), kv_blocks=SCARCE_BLOCKS, mixed_steps="on"
            )
        self.engine: Engine = self.deployment.engine
        assert self.engine.plan.snapshots == 4
        prefixes = self.engine.scheduler.prefixes
        prefixes.min_snapshot_tokens = prefixes.min_lone_snapshot_tokens = MIN_TOKENS

    def answers(self, prompts: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
        return hybrid_models.answers(self.model, prompts, tokens)

    def tokens(self, prompts: list[list[int]], **params: Any) -> list[list[int]]:
        return generate_tokens(self.engine, prompts, SamplingParams(max_tokens=TOKENS, **params))

    def hits(self, prompts: list[list[int]]) -> list[int]:
        """Cached tokens of each prompt, run after the other. Their tokens must be those of `generate`."""
        received = [new_tokens(self.engine, [prompt], SamplingParams(max_tokens=TOKENS))[0] for prompt in prompts]
        assert [[token.token_id for token in tokens] for tokens in received] == self.answers(prompts)
        return [tokens[0].cached_tokens for tokens in received]


# Of Nemotron-H, `generate` and the forward pass of transformers differ (docs/models.md).
NAMES = [*SUMS, *(family for family in hybrid_models.FAMILIES if family != "nemotron_h")]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in NAMES],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running_sum.register()
    yield Served(request.param, tmp_path_factory.mktemp("served"))
    running_sum.unregister()


@pytest.fixture(autouse=True)
def empty_cache(served: Served) -> Iterator[None]:
    served.engine.allocator.reset_prefix_cache()
    yield
    assert_idle(served.engine)
    served.engine.scheduler.schedule()  # registers what the last step wrote
    check_slots(served.engine.allocator.snapshots)


def random_tokens(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, hybrid_models.VOCAB_SIZE) for _ in range(length)]


def test_hits_at_each_kind_of_border_change_no_token(served: Served) -> None:
    instructions = random_tokens(150, 1)
    users = [[*instructions, *random_tokens(length, 10 + length)] for length in (9, 20, 60)]
    first, second, third = users
    [answer] = served.answers([third])
    turn = [*third, *answer, *random_tokens(5, 3)]
    assert served.hits([first, first, second, third, turn]) == [0, 144, 144, 144, 208]
    assert served.hits([turn[:16] + first]) == [0], "blocks alone are no hit"


def test_a_border_of_two_prompts_is_kept_for_the_third(served: Served) -> None:
    instructions = random_tokens(70, 2)
    prompts = [[*instructions, *random_tokens(70, 20 + number)] for number in range(3)]
    assert served.hits(prompts) == [0, 0, 64]


def test_several_prompts_of_a_step_are_kept_and_found(served: Served) -> None:
    prompts = [random_tokens(33 + number, 30 + number) for number in range(4)]
    expected = served.answers(prompts)
    assert served.tokens([prompt[:1] for prompt in prompts]) == served.answers([prompt[:1] for prompt in prompts])
    assert served.tokens(prompts) == expected
    received = new_tokens(served.engine, prompts[::-1], SamplingParams(max_tokens=TOKENS))
    assert [[token.token_id for token in tokens] for tokens in received] == expected[::-1]
    assert [tokens[0].cached_tokens for tokens in received] == [32] * 4


def test_random_traffic_with_preemption_and_aborts_changes_no_token(served: Served) -> None:
    scheduler, hits = served.engine.scheduler, []
    preempted, admit = scheduler.preemptions, scheduler.prefixes.admit
    scheduler.prefixes.admit = lambda sequence, match: (hits.append(len(match.blocks)), admit(sequence, match))[1]  # type: ignore[method-assign]
    try:
        check_random_traffic(served.engine, 40, reference=hybrid_models.load_reference(served.model))
    finally:
        scheduler.prefixes.admit = admit  # type: ignore[method-assign]
    assert scheduler.preemptions > preempted, "the test needs preemptions"
    assert sum(map(bool, hits)) > 5, "the test needs hits"


def shared_prompts() -> list[list[int]]:
    prefixes = [random_tokens(length, 50 + length) for length in (48, 100)]
    return [
        [*prefixes[number % 2][: 48 + 26 * (number % 3)], *random_tokens(1 + 23 * (number % 4), 60 + number)]
        for number in range(12)
    ]


def turns_of(prompt: list[int], answer: list[int]) -> list[tuple[list[int], list[int]]]:
    """(prompt, stop token ids) of a chat's first turn, which ends at its ninth token, and of its second one, twice."""
    next_turn = [*prompt, *answer[: answer.index(answer[8]) + 1], 7, 8]
    return [(prompt, [answer[8]]), (next_turn, []), (next_turn, [])]


def run_chats(served: Served) -> Iterator[list[list[int]]]:
    """The answers of three chats at a time. More chats at once would evict each other's snapshots."""
    prompts = shared_prompts()
    chats = [turns_of(prompt, answer) for prompt, answer in zip(prompts, served.answers(prompts), strict=True)]
    for begin in range(0, len(chats), 3):
        received: dict[int, list[int]] = {}
        for turn in range(3):
            for chat in chats[begin : begin + 3]:
                prompt, stops = chat[turn]
                received[served.engine.submit(prompt, SamplingParams(max_tokens=TOKENS, stop_token_ids=stops))] = []
                for token in served.engine.step() if turn == 1 else ():  # else several prompts begin in one step
                    received[token.request_id].append(token.token_id)
            while served.engine.has_work:
                for token in served.engine.step():
                    received[token.request_id].append(token.token_id)
        yield list(received.values())


def expected_chats(served: Served) -> list[list[list[int]]]:
    prompts = shared_prompts()
    answers = served.answers(prompts)
    stopped = [answer[: answer.index(answer[8]) + 1] for answer in answers]
    turns = [turns_of(*each)[1][0] for each in zip(prompts, answers, strict=True)]
    second = served.answers(turns)
    groups = [slice(begin, begin + 3) for begin in range(0, len(prompts), 3)]
    return [stopped[group] + second[group] + second[group] for group in groups]


def test_turns_of_chats_equal_generate(served: Served) -> None:
    assert [*run_chats(served)] == expected_chats(served)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("served", [SUMS[0], "qwen3_5_text"], indirect=True)
def test_a_planted_fault_changes_tokens(
    served: Served, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_chats(served)
    with monkeypatch.context() as patch:
        fault(patch)
        assert any(map(operator.ne, run_chats(served), expected))  # chats after the first difference do not run
    served.engine.allocator.reset_prefix_cache()


def test_a_failed_step_leaves_no_snapshot(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, run, calls = served.engine, served.engine.runner.run, []

    def failing(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) % 7 == 0:  # some of these steps would have kept or restored a state
            for tensor in engine.runner.slot_states.tensors:
                tensor[engine.plan.slots :].fill_(float("nan"))
            raise RuntimeError("planted")
        return run(batch)

    monkeypatch.setattr(engine.runner, "run", failing)
    prompts = shared_prompts()
    tokens = generate_despite_failures(engine, prompts, SamplingParams(max_tokens=TOKENS))
    assert tokens == served.answers(prompts)
    assert any(batch.snapshots for batch in calls) and len(calls) > 14


def test_batches_between_steps_leave_snapshots_as_they_are(served: Served) -> None:
    engine, prompt = served.engine, random_tokens(70, 4)
    assert served.hits([prompt]) == [0]
    with engine.paused(12):
        for bucket in engine.plan.buckets:
            make_timing_batch(engine.runner, bucket, 20).run()
    assert run_round(recorded_canary(engine)) == []
    assert served.hits([prompt]) == [64]


def test_prompts_with_log_probabilities_beside_hits(served: Served) -> None:
    prompt = random_tokens(70, 5)
    served.hits([prompt])
    engine, received = served.engine, {}
    for k in (0, None, 0, None):
        received[engine.submit(prompt, SamplingParams(max_tokens=TOKENS, prompt_logprobs=k))] = (k, [])
    while engine.has_work:
        for token in engine.step():
            received[token.request_id][1].append(token)
    for k, tokens in received.values():
        assert [token.token_id for token in tokens] == served.answers([prompt])[0]
        assert tokens[0].cached_tokens == (64 if k is None else 0)
        if k is not None:
            chosen = [each.chosen for each in tokens[0].prompt_logprobs]
            assert chosen == pytest.approx(hybrid_models.prompt_logprobs(served.model, prompt), abs=1e-4)


@pytest.mark.parametrize("served", [SUMS[0]], indirect=True)
def test_the_third_prompt_with_a_long_prefix_finds_it_by_default(served: Served, tmp_path: Path) -> None:
    """With the thresholds and the budget of a plan, and no requested KV blocks."""
    reset_programs()
    model = hybrid_models.save_model("lfm2", tmp_path / "model", max_position_embeddings=1024)
    deployment = deploy_traced(model, str(tmp_path / "cache"), buckets=(256,), batch_sizes=(1,))
    assert deployment.engine.plan.snapshots == 2, "for 1,024 tokens"
    prompts = [[*random_tokens(600, 6), *random_tokens(20, 70 + number)] for number in range(3)]
    received = [new_tokens(deployment.engine, [prompt], SamplingParams(max_tokens=4))[0] for prompt in prompts]
    assert [tokens[0].cached_tokens for tokens in received] == [0, 0, 592]
    expected = hybrid_models.answers(model, prompts, 4)
    assert [[token.token_id for token in tokens] for tokens in received] == expected
