"""`Engine.paused`: batches of the warm-up run between two steps, and no request notices."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.check.inputs import make_timing_batch
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.sequence import SamplingParams
from tests.block_checks import assert_idle
from tests.conftest import prepare_tiny
from tests.engine_loop import generate_tokens

SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, seed=3, frequency_penalty=0.5, logit_bias=((5, 2.0),))
GREEDY = SamplingParams(max_tokens=20)
KV_BLOCKS = 40


@pytest.fixture(scope="module")
def engine(cache_dir: str) -> Engine:
    engine: Engine = prepare_tiny(cache_dir, kv_blocks=KV_BLOCKS).engine
    return engine


def answers(engine: Engine, pause_every: int | None = None, num_blocks: int = 20) -> list[list[int]]:
    """The tokens of four requests, with warm-up batches of all buckets after every `pause_every` steps."""
    source = random.Random(8)
    prompts = [[source.randrange(3, 900) for _ in range(length)] for length in (150, 40, 3, 70)]
    ids = [
        engine.submit(prompt, params)
        for prompt, params in zip(prompts, [GREEDY, SAMPLED, GREEDY, SAMPLED], strict=True)
    ]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    steps = 0
    while engine.has_work:
        for token in engine.step():
            tokens[token.request_id].append(token.token_id)
        steps += 1
        if pause_every and steps % pause_every == 0:
            run_batches(engine, num_blocks)
    assert_idle(engine.allocator)
    return list(tokens.values())


def run_batches(engine: Engine, num_blocks: int) -> None:
    with engine.paused(num_blocks), engine.runner.uncounted_steps():
        for bucket in engine.plan.buckets:
            batch = make_timing_batch(engine.runner, bucket, 24)
            used = {block for sequence in batch.sequences for block in sequence.blocks}
            assert used <= set(engine.runner.reserved_blocks or ())
            batch.run()


@pytest.mark.parametrize("pause_every", [1, 2, 5])
def test_requests_get_the_same_tokens_if_batches_run_between_their_steps(engine: Engine, pause_every: int) -> None:
    engine.allocator.reset_prefix_cache()
    expected = answers(engine)
    engine.allocator.reset_prefix_cache()
    assert answers(engine, pause_every) == expected


def test_cached_prefixes_stay_valid_if_all_blocks_are_reserved(engine: Engine) -> None:
    expected = answers(engine)
    assert answers(engine, pause_every=3, num_blocks=engine.allocator.capacity) == expected


def test_cached_prefixes_are_kept_if_enough_blocks_are_free(engine: Engine) -> None:
    engine.allocator.reset_prefix_cache()
    prompt = [7] * 64
    generate_tokens(engine, [prompt], GREEDY)
    run_batches(engine, 20)
    matched = engine.allocator.match(prompt)
    assert len(matched) == 3, "all full blocks but the one with the last token"
    engine.allocator.release(matched)


def test_pauses_are_not_counted_as_preemptions_or_steps(engine: Engine) -> None:
    before, steps = engine.scheduler.preemptions, engine.runner.step_counts.total()
    run_batches(engine, 20)
    assert (engine.scheduler.preemptions, engine.runner.step_counts.total()) == (before, steps)


def test_an_allocator_of_given_blocks_has_no_others() -> None:
    allocator = BlockAllocator(100, 16, [3, 9, 4])
    assert allocator.capacity == allocator.num_allocatable == 3
    assert allocator.allocate(3) == [3, 9, 4] and allocator.num_allocatable == 0


def test_the_blocks_of_a_bucket_are_those_of_its_largest_batch(cache_dir: str) -> None:
    deployment: Any = prepare_tiny(cache_dir, kv_blocks=KV_BLOCKS)
    plan = deployment.plan
    config: Any = type("Config", (), {"to_dict": lambda self: {}})()
    prompts = CheckPrompts(plan, deployment.planned.architecture, config, seed=0)
    for bucket in plan.buckets:
        lengths = [prefix.length for prefix in prompts.batch(bucket)]
        assert prompts.blocks_needed(bucket) >= sum(-(-length // plan.block_size) for length in lengths)
        assert prompts.blocks_needed(bucket) <= plan.kv_blocks - 1
