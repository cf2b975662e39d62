"""Break-even counts are the seconds of compiling over the seconds that a step saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tcdeploy.cli.explain_display import verdict
from tcdeploy.explain.break_even import BucketPayoff, RequestPayoff, compute_payoff
from tcdeploy.planning.plan import Bucket

PREFILL, DECODE = Bucket("prefill", 64), Bucket("decode", 1)


def payoff(uncompiled_ms: float, compiled_ms: float) -> BucketPayoff:
    return BucketPayoff("decode:4", 4, uncompiled_ms, compiled_ms, cold_seconds=10.0, warm_seconds=0.5)


def test_a_bucket_pays_after_the_tokens_whose_steps_save_the_compile_time() -> None:
    assert payoff(6.0, 2.0).break_even_tokens_cold == 4 * 2500
    assert payoff(6.0, 2.0).break_even_tokens_warm == 4 * 125


def test_a_slower_program_and_one_that_is_equal_within_noise_never_pay() -> None:
    for compiled_ms in (7.0, 6.0, 5.9):
        assert payoff(6.0, compiled_ms).break_even_tokens_cold is None and payoff(6.0, compiled_ms).saved_ms == 0


def record(
    bucket: Bucket,
    eager_ms: float,
    compiled_ms: float,
    outcome: str,
    cold_seconds: float | None,
    spread_ms: float = 0.0,
) -> Any:
    return SimpleNamespace(
        bucket=bucket.name, eager_ms=eager_ms, compiled_ms=compiled_ms, outcome=outcome, cold_seconds=cold_seconds,
        compile_seconds=2.0, capture_seconds=1.0, eager_spread_ms=spread_ms, compiled_spread_ms=spread_ms,
    )  # fmt: skip


def plan_of(records: list[Any], context: int = 4096) -> Any:
    plan: Any = SimpleNamespace(
        buckets=(PREFILL, DECODE), prefill_buckets=(PREFILL,), decode_buckets=(DECODE,), context=context
    )
    return compute_payoff(plan, records)


def test_a_request_pays_for_all_buckets_of_the_start() -> None:
    request = plan_of([record(PREFILL, 30, 10, "hit", 20.0), record(DECODE, 5, 3, "hit", 8.0)]).request
    assert (request.prompt_tokens, request.output_tokens) == (64, 128)
    assert (request.start_seconds_cold, request.start_seconds_warm) == (30.0, 6.0)
    saved = 0.020 + 128 * 0.002
    assert request.break_even_requests_cold == -(-30.0 // saved)
    assert "pays after 109 such requests (13,952 output tokens)" in verdict(request)[1]


def test_seconds_that_are_not_known_are_not_guessed() -> None:
    """A start that compiles does not know what loading takes, and one that loads may not know what compiling took."""
    cold = plan_of([record(PREFILL, 30, 10, "miss", 20.0), record(DECODE, 5, 3, "hit", 8.0)]).request
    assert (cold.start_seconds_cold, cold.start_seconds_warm, cold.break_even_requests_warm) == (30.0, None, None)
    unknown = plan_of([record(PREFILL, 30, 10, "hit", None), record(DECODE, 5, 3, "hit", 8.0)]).request
    assert (unknown.start_seconds_cold, unknown.start_seconds_warm) == (None, 6.0)
    assert not any("cold" in sentence for sentence in verdict(unknown))


def test_the_verdict_says_when_not_to_compile() -> None:
    never = RequestPayoff(64, 128, 7.5, 7.5, 1.0, 1.0, 30.0, 6.0)
    assert not never.pays and any(sentence.startswith("do not compile this model") for sentence in verdict(never))
    pays = RequestPayoff(64, 128, 7.5, 1.5, 1.0, 0.25, 30.0, 6.0)
    assert pays.break_even_requests_cold == 40
    assert "1.00 s uncompiled (7.50 ms per output token), 0.25 s compiled (1.50 ms)" in verdict(pays)[0]
    assert verdict(pays)[-1].startswith("a single such request: 1.00 s uncompiled, 30.25 s with a cold start")


def test_a_difference_within_the_spread_of_the_measurements_is_inconclusive() -> None:
    """Times of a machine with a load average of 6: 26 against 19 ms a token, then 219 against 230."""
    for eager_ms, compiled_ms, spread_ms in ((219.0, 230.0, 40.0), (26.0, 19.0, 5.0)):
        payoff = plan_of(
            [record(bucket, eager_ms, compiled_ms, "hit", 20.0, spread_ms) for bucket in (PREFILL, DECODE)]
        )
        request = payoff.request
        assert not request.is_conclusive and not request.pays and request.break_even_requests_cold is None
        assert [bucket.is_conclusive for bucket in payoff.buckets] == [False, False]
        sentences = verdict(request)
        assert len(sentences) == 2 and sentences[1].startswith("inconclusive: the difference of ")
        assert f"± {129 * spread_ms / 1e3:.2f} s uncompiled" in sentences[1] and "idle machine" in sentences[1]


def test_a_difference_beyond_the_spread_is_conclusive_in_both_directions() -> None:
    for eager_ms, compiled_ms, start in ((26.0, 19.0, "cold start: "), (219.0, 230.0, "do not compile this model")):
        payoff = plan_of([record(bucket, eager_ms, compiled_ms, "hit", 20.0, 1.0) for bucket in (PREFILL, DECODE)])
        assert payoff.request.is_conclusive and verdict(payoff.request)[1].startswith(start)
