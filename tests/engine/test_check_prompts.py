"""The prompts on which buckets are checked: lengths, packing, windows and tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.check.check_prompts import (
    BEYOND_WINDOW,
    FIRST_UNCHECKED_PROMPT,
    NUM_LONG_PROMPTS,
    CheckPrompts,
    checked_rows,
    special_token_ids,
)
from tcdeploy.planning.plan import Bucket

PREFILL, LARGE_PREFILL, DECODE = Bucket("prefill", 64), Bucket("prefill", 8192), Bucket("decode", 4)


def make_prompts(window: int = 0, config: dict[str, Any] | None = None, seed: int = 0, **changes: Any) -> CheckPrompts:
    values = {"kv_blocks": 1000, "block_size": 16, "context": 2048, "max_prefill_sequences": 8, "mixed_steps": False}
    plan: Any = SimpleNamespace(**{**values, "buckets": (PREFILL, DECODE), "fp8_min_rows": 0, **changes})
    layers = (SimpleNamespace(window=window), SimpleNamespace(window=0))
    architecture: Any = SimpleNamespace(attention_layers=layers, vocab_size=300)
    return CheckPrompts(plan, architecture, SimpleNamespace(to_dict=lambda: config or {}), seed)


def lengths(prompts: CheckPrompts, bucket: Bucket) -> list[int]:
    return [prefix.length for prefix in prompts.batch(bucket)]


def test_a_prefill_check_packs_three_unequal_prompts_and_leaves_padding() -> None:
    assert lengths(make_prompts(), PREFILL) == [39, 16, 8]


@pytest.mark.parametrize("changes", [{"max_prefill_sequences": 2}, {"kv_blocks": 5}])
def test_a_prefill_check_is_one_prompt_if_three_do_not_fit(changes: dict[str, int]) -> None:
    assert lengths(make_prompts(**changes), PREFILL) == [64]


def test_a_large_bucket_is_filled_with_prompts_of_limited_length() -> None:
    found = lengths(make_prompts(context=8192), LARGE_PREFILL)
    assert found == [2048, 2048, 1024, 2048] and sum(found) < LARGE_PREFILL.size


def test_a_decode_check_has_unequal_rows_of_several_blocks() -> None:
    assert lengths(make_prompts(), DECODE) == [53, 41, 34, 27]
    assert lengths(make_prompts(), Bucket("decode", 8)) == [53, 41, 34, 27, 20, 13, 48, 41]
    many = lengths(make_prompts(kv_blocks=2000), Bucket("decode", 256))
    assert sum(length > 16 for length in many) >= 10, "in checked rows"


def test_a_prompt_of_a_decode_row_has_the_same_length_in_all_buckets() -> None:
    """So that the reference has logits of few lengths."""
    buckets = tuple(Bucket("decode", size) for size in (1, 4, 17, 256))
    prompts = make_prompts(kv_blocks=2000, buckets=(PREFILL, *buckets))
    short = [prefix for prefix in prompts.all_prefixes() if prefix.prompt >= NUM_LONG_PROMPTS]
    assert len(short) == len({prefix.prompt for prefix in short}) == 15
    assert len({prefix.length for prefix in short}) == 6


def test_no_two_rows_of_a_decode_check_have_the_same_prompt() -> None:
    """A row that reads the keys of another row would otherwise get the right logits."""
    for size in (1, 4, 17, 256):
        bucket = Bucket("decode", size)
        prompts = make_prompts(kv_blocks=2000, buckets=(PREFILL, bucket))
        numbers = [prefix.prompt for prefix in prompts.batch(bucket)]
        assert len({*numbers}) == size
        beginnings = {tuple(prompts.token_ids(prefix)[:2]) for prefix in prompts.batch(bucket)}
        assert len(beginnings) > 0.9 * size
        checked = {prefix.prompt for prefix in prompts.checked(bucket)}
        assert checked <= {0, *range(NUM_LONG_PROMPTS, FIRST_UNCHECKED_PROMPT)}


def test_a_decode_check_has_short_rows_if_blocks_are_scarce() -> None:
    assert max(lengths(make_prompts(kv_blocks=5), DECODE)) <= 16


def test_sequences_reach_beyond_the_window() -> None:
    prompts = make_prompts(window=512)
    assert lengths(prompts, DECODE)[0] == 512 + BEYOND_WINDOW
    assert [prefix.length for prefix in prompts.continued(PREFILL)] == [512 + BEYOND_WINDOW]


@pytest.mark.parametrize("changes", [{"window": 4096}, {"window": 512, "kv_blocks": 30}])
def test_a_window_beyond_the_context_or_the_kv_cache_is_not_reached(changes: dict[str, int]) -> None:
    prompts = make_prompts(**changes)
    assert lengths(prompts, DECODE)[0] == 53
    assert [prefix.length for prefix in prompts.continued(PREFILL)] == [39]


def test_prefixes_of_a_prompt_begin_with_the_same_tokens() -> None:
    prompts = make_prompts()
    first, second = prompts.batch(DECODE)[:2]
    shorter = first._replace(length=10)
    assert prompts.token_ids(shorter) == prompts.token_ids(first)[:10]
    assert prompts.token_ids(second) != prompts.token_ids(first)[: second.length]


def test_the_same_tokens_are_checked_in_every_run_and_others_with_another_seed() -> None:
    prefix = make_prompts().batch(DECODE)[0]
    assert make_prompts().token_ids(prefix) == make_prompts().token_ids(prefix)
    assert make_prompts(seed=1).token_ids(prefix) != make_prompts().token_ids(prefix)


def test_special_tokens_are_left_out() -> None:
    config = {"eos_token_id": [2, 3], "pad_token_id": None, "vision": {"image_token_index": 7}, "id2label": {0: "a"}}
    assert special_token_ids(config) == {2, 3, 7}
    prompts = make_prompts(config={"image_token_id": 5, "eos_token_id": list(range(6, 300))})
    assert set(prompts.token_ids(prompts.batch(PREFILL)[0])) <= {0, 1, 2, 3, 4}


def test_many_decode_rows_are_sampled_evenly() -> None:
    rows = checked_rows(Bucket("decode", 256), 256)
    assert len(rows) == 16 and rows[0] == 0 and rows[-1] == 255
    assert checked_rows(PREFILL, 3) == [0, 1, 2]
