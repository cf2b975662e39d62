"""Break-even points: after how many tokens and requests compiling has saved the time that it takes. No torch.

A cold start compiles all programs, a warm start loads them from the cache; both then capture CUDA graphs. The seconds
of a bucket are the time that its programs and graphs add to a start. Loading the model is not counted, since it takes
the same time without programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.plan import Plan

MIN_SAVING = 0.02  # fraction of the uncompiled time; a smaller saving is noise
# Lengths of the request whose break-even point is computed.
OUTPUT_TOKENS = 128
PROMPT_TOKENS = 128  # at least, if the plan has such a prefill bucket


@dataclass
class BucketPayoff:
    """Times of one bucket. None: not measured."""

    bucket: str
    tokens_per_step: int  # of a full bucket
    uncompiled_ms: float
    compiled_ms: float
    cold_seconds: float | None  # to compile its programs and to capture
    warm_seconds: float | None  # to load its programs and to capture
    uncompiled_spread_ms: float = 0.0  # half of the range of several measurements
    compiled_spread_ms: float = 0.0
    is_conclusive: bool = field(init=False)
    saved_ms: float = field(init=False)  # per step; 0 if the difference is noise, or if the program is slower
    break_even_tokens_cold: int | None = field(init=False)  # after which the saved time exceeds cold_seconds
    break_even_tokens_warm: int | None = field(init=False)

    def __post_init__(self) -> None:
        spread = self.uncompiled_spread_ms + self.compiled_spread_ms
        self.is_conclusive, self.saved_ms = _compare(self.uncompiled_ms, self.compiled_ms, spread)
        self.break_even_tokens_cold = _break_even(self.cold_seconds, self.saved_ms / 1e3, self.tokens_per_step)
        self.break_even_tokens_warm = _break_even(self.warm_seconds, self.saved_ms / 1e3, self.tokens_per_step)


@dataclass
class RequestPayoff:
    """One request at a time: a prompt that fills a prefill bucket, and then steps of the smallest decode bucket."""

    prompt_tokens: int
    output_tokens: int
    uncompiled_token_ms: float  # of one output token, which is one decode step
    compiled_token_ms: float
    uncompiled_seconds: float
    compiled_seconds: float
    start_seconds_cold: float | None  # of all buckets of the plan, as a start prepares all of them; None: not measured
    start_seconds_warm: float | None
    uncompiled_spread_seconds: float = 0.0
    compiled_spread_seconds: float = 0.0
    is_conclusive: bool = field(init=False)
    pays: bool = field(init=False)
    break_even_requests_cold: int | None = field(init=False)
    break_even_requests_warm: int | None = field(init=False)

    def __post_init__(self) -> None:
        spread = self.uncompiled_spread_seconds + self.compiled_spread_seconds
        self.is_conclusive, saved = _compare(self.uncompiled_seconds, self.compiled_seconds, spread)
        self.pays = saved > 0
        self.break_even_requests_cold = _break_even(self.start_seconds_cold, saved, 1)
        self.break_even_requests_warm = _break_even(self.start_seconds_warm, saved, 1)


@dataclass(frozen=True)
class Payoff:
    buckets: tuple[BucketPayoff, ...]
    request: RequestPayoff


def compute_payoff(plan: Plan, records: Sequence[BucketRecord]) -> Payoff:
    """`records`: the buckets of a start that measured step times."""
    by_name = {record.bucket: record for record in records}
    payoffs = {bucket: _bucket_payoff(by_name[bucket.name], bucket.size) for bucket in plan.buckets}
    prefill = next(
        (bucket for bucket in plan.prefill_buckets if bucket.size >= PROMPT_TOKENS), plan.prefill_buckets[-1]
    )
    decode = plan.decode_buckets[0]
    steps = max(1, min(OUTPUT_TOKENS, plan.context - prefill.size))

    def seconds(field: str) -> float:
        return (getattr(payoffs[prefill], field) + steps * getattr(payoffs[decode], field)) / 1e3

    request = RequestPayoff(
        prompt_tokens=prefill.size,
        output_tokens=steps,
        uncompiled_token_ms=payoffs[decode].uncompiled_ms,
        compiled_token_ms=payoffs[decode].compiled_ms,
        uncompiled_seconds=seconds("uncompiled_ms"),
        compiled_seconds=seconds("compiled_ms"),
        start_seconds_cold=_sum_if_known([payoff.cold_seconds for payoff in payoffs.values()]),
        start_seconds_warm=_sum_if_known([payoff.warm_seconds for payoff in payoffs.values()]),
        uncompiled_spread_seconds=seconds("uncompiled_spread_ms"),
        compiled_spread_seconds=seconds("compiled_spread_ms"),
    )
    return Payoff(tuple(payoffs.values()), request)


def _bucket_payoff(record: BucketRecord, tokens_per_step: int) -> BucketPayoff:
    assert record.eager_ms is not None and record.compiled_ms is not None
    is_warm = record.outcome in ("hit", "reused")
    return BucketPayoff(
        bucket=record.bucket,
        tokens_per_step=tokens_per_step,
        uncompiled_ms=record.eager_ms,
        compiled_ms=record.compiled_ms,
        cold_seconds=None if record.cold_seconds is None else record.cold_seconds + record.capture_seconds,
        warm_seconds=record.compile_seconds + record.capture_seconds if is_warm else None,
        uncompiled_spread_ms=record.eager_spread_ms or 0.0,
        compiled_spread_ms=record.compiled_spread_ms or 0.0,
    )


def _compare(uncompiled: float, compiled: float, spread: float) -> tuple[bool, float]:
    """(whether the intervals of the measurements do not overlap, the saving; 0 if it is noise or negative)."""
    saved = uncompiled - compiled
    is_conclusive = spread == 0.0 or abs(saved) > spread
    return is_conclusive, saved if is_conclusive and saved > MIN_SAVING * uncompiled else 0.0


def _break_even(seconds: float | None, saved_seconds: float, size: int) -> int | None:
    """The size of all steps that save at least `seconds`, of which each saves `saved_seconds`."""
    return None if seconds is None or saved_seconds <= 0 else math.ceil(seconds / saved_seconds) * size


def _sum_if_known(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return sum(known) if len(known) == len(seconds) else None
