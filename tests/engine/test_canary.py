"""The canary passes on an undamaged engine, finds planted damage, and leaves no trace in the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tcdeploy.engine.check.canary import Canary, CanaryDifference, make_cases
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.schedule.step_batch import StepBatch
from tcdeploy.engine.step.batch import PrefillBuffers
from tcdeploy.engine.step.rows import RowAssignment
from tcdeploy.planning.plan import make_plan
from tests.block_checks import assert_idle
from tests.engine_loop import generate_tokens
from tests.machines import H100, LLAMA_8B, make_recipe

EXPONENT_BIT = 30  # the highest exponent bit of a float32


def run_case(canary: Canary, number: int) -> CanaryDifference | None:
    check = canary.check(number)
    while True:
        try:
            next(check)
        except StopIteration as end:
            return end.value


def recorded_canary(engine: Engine) -> Canary:
    canary = Canary(engine)
    while canary.unrecorded:
        for _ in canary.record_next():
            pass
    return canary


def max_blocks(canary: Canary) -> int:
    """The most KV blocks that a case takes while it runs."""
    return max(sum(map(canary._blocks_for, case.prompts)) for case in canary.cases)


def run_round(canary: Canary) -> list[CanaryDifference]:
    return [difference for number in range(len(canary.cases)) if (difference := run_case(canary, number)) is not None]


@contextmanager
def flipped_bit(weight: torch.Tensor, index: tuple[int, ...], bit: int = EXPONENT_BIT) -> Iterator[None]:
    """Flip one bit of a float32 weight in place, and flip it back."""
    bits, mask = weight.data.view(torch.int32), 1 << bit
    bits[index] ^= mask
    try:
        yield
    finally:
        bits[index] ^= mask


@pytest.fixture
def engine(tiny_deployment: Any) -> Engine:
    """A new engine, with empty blocks.

    Otherwise blocks could contain K and V of the same requests from an earlier test, and a planted fault that writes
    them to a wrong block would not be found.
    """
    runner = tiny_deployment.engine.runner
    for spec in tiny_deployment.planned.architecture.attention_layers:
        for tensor in runner.model.get_submodule(spec.path).tcdeploy.state:
            tensor.zero_()
    return Engine(runner)


@pytest.fixture
def canary(engine: Engine) -> Canary:
    return recorded_canary(engine)


def test_every_bucket_and_a_chunked_prompt_have_a_case(canary: Canary, engine: Engine) -> None:
    assert {case.bucket for case in canary.cases} == set(engine.plan.buckets)
    assert [case.name for case in canary.cases] == [
        "prefill:32", "prefill:128", "prefill:32 in two chunks", "decode:1", "decode:4",
    ]  # fmt: skip
    assert not canary.unrepeatable


def test_each_case_runs_its_bucket(canary: Canary, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = engine.runner.graphs.run
    monkeypatch.setattr(engine.runner.graphs, "run", lambda buffers: ran.append(buffers.bucket.name) or run(buffers))
    for number, case in enumerate(canary.cases):
        ran.clear()
        assert run_case(canary, number) is None
        assert case.bucket.name in ran
        assert ran.count("prefill:32") == (2 if "chunks" in case.name else int(case.name == "prefill:32"))


@pytest.mark.parametrize("rounds", [10, pytest.param(50, marks=pytest.mark.long)])
def test_rounds_pass_on_other_blocks_and_leak_nothing(canary: Canary, engine: Engine, rounds: int) -> None:
    free, counts = engine.allocator.num_allocatable, dict(engine.runner.step_counts)
    used: set[int] = set()
    allocate = engine.allocator.allocate

    def record(count: int) -> list[int]:
        blocks = allocate(count)
        used.update(blocks)
        return blocks

    engine.allocator.allocate = record  # type: ignore[method-assign]
    for _ in range(rounds):
        assert run_round(canary) == []
    assert engine.allocator.num_allocatable == free == engine.allocator.capacity
    assert_idle(engine.allocator)
    assert not engine.runner.decode_rows.seq_lens.any(), "no row is left"
    assert engine.runner.step_counts == counts, "the steps do not count as load"
    assert len(used) > 4 * max_blocks(canary), "the blocks differ between rounds"


def test_an_interrupted_case_frees_blocks_and_rows_after_every_step(canary: Canary, engine: Engine) -> None:
    params = SamplingParams(max_tokens=4)
    expected = generate_tokens(engine, [[5, 6, 7]], params)
    for number in range(len(canary.cases)):
        for steps in range(1, 6):
            check = canary.check(number)
            for _, _ in zip(range(steps), check, strict=False):
                pass
            check.close()
            assert_idle(engine.allocator)
            assert not engine.runner.decode_rows.seq_lens.any()
        assert generate_tokens(engine, [[5, 6, 7]], params) == expected
        engine.allocator.reset_prefix_cache()
    assert run_round(canary) == []


def test_an_interrupted_recording_starts_again_and_frees_blocks_and_rows(engine: Engine) -> None:
    canary, expected = Canary(engine), [case.name for case in recorded_canary(engine).cases]
    while canary.unrecorded:
        name = canary.unrecorded[0].name
        for steps in itertools.count(1):
            recording = canary.record_next()
            if not all(next(recording, "ended") is None for _ in range(steps)):
                break
            recording.close()
            assert canary.unrecorded[0].name == name
            assert_idle(engine.allocator)
    assert [case.name for case in canary.cases] == expected and not canary.unrepeatable
    assert run_round(canary) == []


def test_the_prefix_cache_is_neither_read_nor_extended(canary: Canary, engine: Engine) -> None:
    prompt = list(canary.cases[1].prompts[0])
    generate_tokens(engine, [prompt], SamplingParams(max_tokens=2))
    registered = dict(engine.allocator._registry)
    assert registered
    assert run_round(canary) == []
    assert engine.allocator._registry == registered


def test_prefixes_are_evicted_only_if_no_block_is_free(engine: Engine) -> None:
    canary, block = recorded_canary(engine), engine.plan.block_size
    prompt = [3 + position % 900 for position in range(20 * block)]
    generate_tokens(engine, [prompt], SamplingParams(max_tokens=2))
    before = len(engine.allocator._registry)
    assert run_round(canary) == [] and len(engine.allocator._registry) == before
    held = engine.allocator.allocate(len(engine.allocator._free))
    assert run_round(canary) == []
    assert before - max_blocks(canary) <= len(engine.allocator._registry) < before
    engine.allocator.release(held)


def test_sampled_requests_before_and_after_give_the_same_tokens(canary: Canary, engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, repetition_penalty=1.3, seed=3)
    before = generate_tokens(engine, [[40, 41], [9] * 50], params)
    assert run_round(canary) == []
    assert generate_tokens(engine, [[40, 41], [9] * 50], params) == before


def weights(model: Any) -> dict[str, torch.Tensor]:
    layer = model.model.layers[1]
    return {"lm_head": model.get_output_embeddings().weight, "mlp": layer.mlp.down_proj.weight}


@pytest.mark.parametrize("name", ["lm_head", "mlp"])
def test_a_flipped_weight_bit_is_found(name: str, canary: Canary, engine: Engine) -> None:
    weight = weights(engine.runner.model)[name]
    with flipped_bit(weight, (37, 11)):
        differences = run_round(canary)
    assert differences, "found in at least one case"
    assert "expected token" in str(differences[0]) and differences[0].case.bucket.name in str(differences[0])
    assert run_round(canary) == [], "the difference goes with the damage"


def test_a_prompt_written_to_a_wrong_block_is_found(
    canary: Canary, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, block = PrefillBuffers.fill, engine.plan.block_size

    def misplaced(self: PrefillBuffers, *arguments: Any) -> None:
        fill(self, *arguments)
        prefill = self.buffers().metadata.prefill
        assert prefill is not None
        prefill.slot_mapping[:block] += 100 * block

    monkeypatch.setattr(PrefillBuffers, "fill", misplaced)
    names = {difference.case.name for difference in run_round(canary)}
    assert {"prefill:32", "prefill:128", "prefill:32 in two chunks", "decode:1", "decode:4"} == names


def test_a_decode_row_with_a_stale_block_is_found(
    canary: Canary, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = RowAssignment.apply

    def stale(self: RowAssignment, batch: StepBatch) -> None:
        apply(self, batch)
        self.decode_rows.block_table[0, 0] = 100

    monkeypatch.setattr(RowAssignment, "apply", stale)
    assert {difference.case.name for difference in run_round(canary)} == {case.name for case in canary.cases}


def test_a_wrong_program_is_found_in_its_bucket(
    canary: Canary, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of one bucket are scaled: the tokens stay the same, and the log-probabilities do not."""
    runner = engine.runner
    logits: Callable[..., torch.Tensor] = runner._logits

    def scaled(buffers: Any, *arguments: Any) -> torch.Tensor:
        return logits(buffers, *arguments) * (1.01 if buffers.bucket.name == "decode:4" else 1)

    monkeypatch.setattr(runner, "_logits", scaled)
    differences = run_round(canary)
    assert [difference.case.name for difference in differences] == ["decode:4"]
    assert differences[0].expected[0] == differences[0].actual[0], "only the log-probability differs"


@contextmanager
def ties(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Raise a second token of each row to a logit near that of the first. The item is the distance, below 0 for less.

    The rows after the first are scaled by 1 + 0.01 if the list has a second item.
    """
    logits, distance = engine.runner._logits, [-5e-5]

    def tied(buffers: Any, *arguments: Any) -> torch.Tensor:
        values: torch.Tensor = logits(buffers, *arguments).clone()
        top, token = values.max(-1, keepdim=True)
        rows = slice(0, 1)
        values[rows] = values[rows].scatter(1, (token[rows] + 1) % values.shape[1], top[rows] + distance[0])
        if len(distance) > 1 and values.shape[0] > 1:
            values[1:] *= 1.01
        return values

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_logits", tied)
        yield distance


def test_a_near_tie_that_goes_the_other_way_is_no_difference(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows then continue with another token, so their later log-probabilities are not compared."""
    with ties(engine, monkeypatch) as distance:
        canary = recorded_canary(engine)
        assert run_round(canary) == [] and not canary.unrepeatable
        distance[0] = 5e-5
        assert run_round(canary) == []


def test_another_token_beyond_a_near_tie_is_a_difference(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with ties(engine, monkeypatch) as distance:
        canary = recorded_canary(engine)
        distance[0] = 1e-2
        differences = run_round(canary)
    assert {difference.case.name for difference in differences} == {case.name for case in canary.cases}
    assert all(difference.expected[0] != difference.actual[0] for difference in differences)


def test_another_token_by_chance_as_likely_as_the_recorded_one_is_a_difference(
    canary: Canary, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are exchanged: the new one has the recorded log-probability, the recorded one has lost it."""
    logits: Callable[..., torch.Tensor] = engine.runner._logits
    monkeypatch.setattr(engine.runner, "_logits", lambda *arguments: logits(*arguments).roll(1, dims=-1))
    differences = run_round(canary)
    assert len(differences) == len(canary.cases)
    assert all(abs(difference.expected[1] - difference.actual[1]) < 1e-4 for difference in differences)


def test_the_other_rows_of_a_batch_with_a_near_tie_are_still_compared(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ties(engine, monkeypatch) as distance:
        canary = recorded_canary(engine)
        distance[:] = [5e-5, 1.0]
        differences = run_round(canary)
    assert [difference.case.name for difference in differences] == ["decode:4"]
    assert differences[0].row > 0


def test_logits_of_nan_are_a_difference(canary: Canary, engine: Engine) -> None:
    weight = engine.runner.model.get_output_embeddings().weight
    saved = weight.data[:, 0].clone()
    weight.data[:, 0] = float("nan")
    try:
        assert len(run_round(canary)) == len(canary.cases)
    finally:
        weight.data[:, 0] = saved


def test_a_case_whose_first_runs_differ_is_not_used(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine.runner
    logits, calls = runner._logits, iter(range(1000))

    def noisy(buffers: Any, *arguments: Any) -> torch.Tensor:
        scale = 1 + 0.05 * next(calls) if buffers.bucket.name == "decode:4" else 1
        return logits(buffers, *arguments) * scale

    monkeypatch.setattr(runner, "_logits", noisy)
    canary = recorded_canary(engine)
    assert [difference.case.name for difference in canary.unrepeatable] == ["decode:4"]
    assert "decode:4" not in {case.name for case in canary.cases}


def test_cases_fit_into_a_small_cache(engine: Engine) -> None:
    """Buckets with more rows than blocks are left out; the scheduler cannot fill them either."""
    block = engine.plan.block_size
    for num_blocks in (1, 3, 6):
        cases = make_cases(engine.plan, engine.vocab_size, num_blocks)
        for case in cases:
            assert sum(-(-(len(prompt) + 4) // block) for prompt in case.prompts) <= num_blocks
        assert ("decode:4" in {case.name for case in cases}) == (num_blocks >= 4)


def test_a_dynamic_bucket_with_graphs_is_checked_at_three_sizes() -> None:
    plan = make_plan(make_recipe(), H100, LLAMA_8B)
    sizes = [(case.name, case.min_step_tokens) for case in make_cases(plan, 1000, 1000) if case.bucket.is_prefill]
    assert sizes == [
        ("prefill:2-2048", 0), ("prefill:2-2048 at 512 tokens", 512), ("prefill:2-2048 at 2048 tokens", 2048),
        ("prefill:2-2048 in two chunks", 0),
    ]  # fmt: skip
    [small] = [case for case in make_cases(make_plan(make_recipe(context=64), H100, LLAMA_8B), 1000, 1000)
               if case.min_step_tokens]  # fmt: skip
    assert small.min_step_tokens == 64
