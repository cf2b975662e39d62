"""Driving the engine: contexts are reset, blocks are released, and no step is counted twice."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.bench import decode
from tcdeploy.bench.engine_driver import (
    Prompts,
    SteadyRun,
    decode_step,
    drain,
    measure_ttft,
    placed_sequences,
    prefill_step,
    run_steady,
    steady_shape,
    submit,
)
from tests.block_checks import assert_idle


@pytest.fixture
def engine(tiny_deployment: Any) -> Any:
    engine = tiny_deployment.engine
    yield engine
    assert not engine.has_work
    assert_idle(engine.allocator)


@pytest.fixture
def prompts(tiny_deployment: Any) -> Prompts:
    return Prompts(tiny_deployment.planned.architecture.vocab_size, seed=1)


def test_prompts_are_drawn_from_the_seed(prompts: Prompts) -> None:
    first, second = prompts.draw(50), prompts.draw(50)
    assert first != second and max(first) < 2048
    assert Prompts(2048, seed=1).draw(50) == first != Prompts(2048, seed=2).draw(50)


def test_a_restored_step_starts_at_the_same_context_each_time(engine: Any, prompts: Prompts) -> None:
    with placed_sequences(engine, prompts, 4, 40) as sequences:
        restore, step = decode_step(engine, sequences)
        lengths = engine.runner.decode_rows.seq_lens
        for _ in range(3):
            restore()
            assert lengths[:4].tolist() == [40] * 4
            step()
            assert lengths[:4].tolist() == [41] * 4
    assert lengths.tolist() == [0] * len(lengths)


def test_blocks_are_released_when_a_measurement_fails(engine: Any, prompts: Prompts) -> None:
    free = engine.allocator.num_allocatable
    with pytest.raises(ZeroDivisionError), placed_sequences(engine, prompts, 2, 40):
        assert engine.allocator.num_allocatable == free - 2 * 3
        raise ZeroDivisionError
    assert engine.allocator.num_allocatable == free


def test_a_prompt_longer_than_the_largest_bucket_is_prefilled_in_chunks(engine: Any, prompts: Prompts) -> None:
    largest = engine.plan.prefill_buckets[-1].size
    lengths: list[int] = []
    run = engine.runner.run
    with placed_sequences(engine, prompts, 1, 2 * largest + 1) as (sequence,):
        step = prefill_step(engine, sequence)
        engine.runner.run = lambda batch: lengths.extend(len(chunk.token_ids) for chunk in batch.chunks)
        try:
            step()
        finally:
            del engine.runner.run
        assert engine.runner.run == run
        step()
    assert lengths == [largest, largest, 1]


def test_submit_returns_the_sequence_of_the_request(engine: Any, prompts: Prompts) -> None:
    prompt = prompts.draw(9)
    sequence = submit(engine, prompt, 3)
    drain(engine)
    assert (sequence.token_ids[:9], sequence.num_output_tokens, sequence.finish_reason) == (prompt, 3, "length")


def test_time_to_first_token_is_measured_without_prefix_hits(engine: Any, prompts: Prompts) -> None:
    prompt = prompts.draw(64)
    measure_ttft(engine, prompt)
    hits: list[int] = []
    match = engine.allocator.match
    engine.allocator.match = lambda *prefix: hits.append(len(match(*prefix))) or []  # type: ignore[func-returns-value]
    try:
        assert measure_ttft(engine, prompt) > 0
    finally:
        del engine.allocator.match
    assert hits == [0]


@pytest.mark.parametrize("count", [1, 4])
def test_in_a_steady_run_every_step_generates_a_token_of_every_request(
    engine: Any, prompts: Prompts, count: int
) -> None:
    shape = steady_shape(engine.plan, count, 64, 12)
    assert shape
    steady = run_steady(engine, [prompts.draw(shape.prompt_length) for _ in range(count)], shape.new_tokens, 12)
    assert (steady.steps, steady.tokens) == (12, 12 * count)
    assert steady.wall_seconds > 0
    assert steady.host_seconds is None, "on a CPU, host time cannot be measured separately"


def test_a_run_whose_first_request_ends_early_is_repeated_with_shorter_prompts(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the limit of a step's time splits the prompts: the estimate expects that none decodes early."""
    plan, runs = replace(tiny_deployment.plan, context=256), []

    def estimate(*arguments: Any) -> Any:
        *shape, early_steps = arguments
        return steady_shape(*shape, 0 if early_steps is None else early_steps)

    def record(*arguments: Any) -> SteadyRun:
        runs.append(run_steady(*arguments))
        return runs[-1]

    monkeypatch.setattr(decode, "steady_shape", estimate)
    monkeypatch.setattr(decode, "run_steady", record)
    deployment = SimpleNamespace(plan=plan, engine=tiny_deployment.engine)
    prompts = Prompts(tiny_deployment.planned.architecture.vocab_size, 0)
    run = decode._run_steady(deployment, prompts, 4, 256, 12)  # type: ignore[arg-type]
    assert run is runs[1] and run.tokens == 12 * 4
    assert runs[0].tokens < 12 * 4 and not tiny_deployment.engine.has_work


def test_a_steady_run_is_shortened_to_a_small_kv_cache(tiny_deployment: Any) -> None:
    """The cache has blocks for four sequences of 64 tokens, and one spare block each."""
    plan = replace(tiny_deployment.plan, kv_blocks=4 * 5 + 1, context=1024)
    shape = steady_shape(plan, 4, 512, 1000)
    assert shape and shape.prompt_length + shape.new_tokens <= 64
    assert shape.steps < 1000
    assert steady_shape(replace(plan, kv_blocks=4 + 1), 4, 512, 10) is None
