"""Check batches are packed, unequal and padded; timing batches fill their bucket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.warmup_inputs import _packed_chunks, make_check_batch, make_timing_batch, timed_context
from tcdeploy.planning.plan import Bucket

PREFILL, DECODE = Bucket("prefill", 64), Bucket("decode", 4)


def make_runner(**changes: Any) -> Any:
    """A runner with as much of a plan as the batches need."""
    values = {"kv_blocks": 100, "block_size": 16, "context": 2048, "max_prefill_sequences": 4}
    plan = SimpleNamespace(**{**values, "prefill_buckets": (PREFILL,), **changes})
    return SimpleNamespace(plan=plan, vocab_size=300)


def lengths(batch: Any) -> list[int]:
    return [len(sequence.token_ids) for sequence in batch.sequences]


def test_a_prefill_check_packs_three_unequal_prompts_and_leaves_padding() -> None:
    assert lengths(make_check_batch(make_runner(), PREFILL)) == [39, 16, 8]


@pytest.mark.parametrize("changes", [{"max_prefill_sequences": 2}, {"kv_blocks": 5}])
def test_a_prefill_check_is_one_prompt_if_three_do_not_fit(changes: dict[str, int]) -> None:
    assert lengths(make_check_batch(make_runner(**changes), PREFILL)) == [64]


def test_a_decode_check_has_unequal_rows_and_one_of_three_blocks() -> None:
    batch = make_check_batch(make_runner(), DECODE)
    assert lengths(batch) == [37, 9, 16, 8]
    assert [len(sequence.blocks) for sequence in batch.sequences] == [3, 1, 1, 1]


def test_a_decode_check_has_one_block_per_row_if_blocks_are_scarce() -> None:
    batch = make_check_batch(make_runner(kv_blocks=5), DECODE)
    assert [len(sequence.blocks) for sequence in batch.sequences] == [1, 1, 1, 1]


def test_the_same_tokens_are_checked_in_every_run() -> None:
    first, second = (make_check_batch(make_runner(), DECODE) for _ in range(2))
    assert [sequence.token_ids for sequence in first.sequences] == [sequence.token_ids for sequence in second.sequences]
    assert all(0 <= token_id < 300 for sequence in first.sequences for token_id in sequence.token_ids)


def test_a_timing_batch_fills_its_bucket() -> None:
    assert lengths(make_timing_batch(make_runner(), PREFILL)) == [64]
    assert lengths(make_timing_batch(make_runner(kv_blocks=1000), DECODE)) == [512] * 4


@pytest.mark.parametrize(("changes", "tokens"), [({}, 384), ({"context": 100}, 100), ({"kv_blocks": 1000}, 512)])
def test_the_timed_context_is_limited_by_blocks_and_context(changes: dict[str, int], tokens: int) -> None:
    assert timed_context(make_runner(**changes).plan, DECODE) == tokens


def test_the_cache_is_filled_in_steps_of_the_largest_bucket_without_the_last_tokens() -> None:
    runner = make_runner(kv_blocks=1000)
    sequences = make_timing_batch(runner, Bucket("decode", 2)).sequences
    steps = list(_packed_chunks(sequences, runner.plan))
    assert all(sum(stop - start for _, start, stop in chunks) <= 64 for chunks in steps)
    assert all(len(chunks) <= 4 for chunks in steps)
    for sequence in sequences:
        covered = [
            position for chunks in steps for owner, start, stop in chunks if owner is sequence
            for position in range(start, stop)
        ]  # fmt: skip
        assert covered == list(range(511))
