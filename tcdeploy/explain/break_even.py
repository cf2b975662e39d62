"""When compiling pays: the seconds that it takes, set against the milliseconds that it saves. Does not import torch.

A cold start compiles all programs, a warm start loads them from the cache; both then capture CUDA graphs. The seconds
of a bucket are what compiling it adds to a start. Loading the model is not counted, since it takes the same time
without programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tcdeploy.cache.manifest import BucketRecord
from tcdeploy.planning.plan import Plan

MIN_SAVING = 0.02  # of the uncompiled time; a smaller difference is noise
OUTPUT_TOKENS = 128  # of the request for which whole requests are counted
PROMPT_TOKENS = 128


@dataclass(frozen=True)
class BucketPayoff:
    """One bucket. `cold_seconds`, `warm_seconds`: compiling or loading, and capturing; None: not known.

    break_even_steps_*: steps after which the saved time exceeds these seconds. None: never, or not known.
    tokens_per_step: of a full bucket.
    """

    bucket: str
    tokens_per_step: int
    uncompiled_ms: float
    compiled_ms: float
    cold_seconds: float | None
    warm_seconds: float | None

    @property
    def saved_ms(self) -> float:
        """Per step; 0 if the difference is noise, or if the program is slower."""
        return _saving(self.uncompiled_ms, self.compiled_ms)

    @property
    def break_even_tokens_cold(self) -> int | None:
        return self._tokens(self.cold_seconds)

    @property
    def break_even_tokens_warm(self) -> int | None:
        return self._tokens(self.warm_seconds)

    def _tokens(self, seconds: float | None) -> int | None:
        steps = _times(seconds, self.saved_ms / 1e3)
        return None if steps is None else steps * self.tokens_per_step


@dataclass(frozen=True)
class RequestPayoff:
    """One request at a time: a prompt that fills a prefill bucket, and then steps of the smallest decode bucket.

    *_token_ms: of one output token, which is one decode step.
    start_seconds_*: of all buckets of the plan, since a start prepares all of them.
    """

    prompt_tokens: int
    output_tokens: int
    uncompiled_token_ms: float
    compiled_token_ms: float
    uncompiled_seconds: float
    compiled_seconds: float
    start_seconds_cold: float | None
    start_seconds_warm: float | None

    @property
    def saved_seconds(self) -> float:
        return _saving(self.uncompiled_seconds, self.compiled_seconds)

    @property
    def pays(self) -> bool:
        return self.saved_seconds > 0

    @property
    def break_even_requests_cold(self) -> int | None:
        return _times(self.start_seconds_cold, self.saved_seconds)

    @property
    def break_even_requests_warm(self) -> int | None:
        return _times(self.start_seconds_warm, self.saved_seconds)


@dataclass(frozen=True)
class Payoff:
    buckets: tuple[BucketPayoff, ...]
    request: RequestPayoff


def compute_payoff(plan: Plan, records: Sequence[BucketRecord]) -> Payoff:
    """`records`: of a start with measured step times."""
    by_name = {record.bucket: record for record in records}
    payoffs = {bucket: _bucket_payoff(by_name[bucket.name], bucket.size) for bucket in plan.buckets}
    prefill = next(
        (bucket for bucket in plan.prefill_buckets if bucket.size >= PROMPT_TOKENS), plan.prefill_buckets[-1]
    )
    decode = plan.decode_buckets[0]
    steps = max(1, min(OUTPUT_TOKENS, plan.context - prefill.size))
    request = RequestPayoff(
        prompt_tokens=prefill.size,
        output_tokens=steps,
        uncompiled_token_ms=payoffs[decode].uncompiled_ms,
        compiled_token_ms=payoffs[decode].compiled_ms,
        uncompiled_seconds=(payoffs[prefill].uncompiled_ms + steps * payoffs[decode].uncompiled_ms) / 1e3,
        compiled_seconds=(payoffs[prefill].compiled_ms + steps * payoffs[decode].compiled_ms) / 1e3,
        start_seconds_cold=_total([payoff.cold_seconds for payoff in payoffs.values()]),
        start_seconds_warm=_total([payoff.warm_seconds for payoff in payoffs.values()]),
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
    )


def _saving(uncompiled: float, compiled: float) -> float:
    saved = uncompiled - compiled
    return saved if saved > MIN_SAVING * uncompiled else 0.0


def _times(seconds: float | None, saved_seconds: float) -> int | None:
    return None if seconds is None or saved_seconds <= 0 else math.ceil(seconds / saved_seconds)


def _total(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return sum(known) if len(known) == len(seconds) else None
