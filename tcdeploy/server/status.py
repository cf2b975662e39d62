"""What the page at / shows, as one JSON document: the same figures as /metrics, with percentiles made here.

Percentiles are over the last requests (tokens), not over averages; the rate is of the last few seconds.
"""

from __future__ import annotations

import time
from collections import deque
from importlib.resources import files
from typing import Any

WINDOW_SIZE = 2000  # requests, or gaps between tokens, that a percentile is taken over
RATE_WINDOW_S = 5.0


class RecentStats:
    """The latest figures of the answers that were given."""

    def __init__(self) -> None:
        self.time_to_first_token: deque[float] = deque(maxlen=WINDOW_SIZE)
        self.inter_token_latency: deque[float] = deque(maxlen=WINDOW_SIZE)
        self.finished = 0
        self.tokens = 0
        self._rate_samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def token(self) -> None:
        self.tokens += 1
        now = time.monotonic()
        if now - self._rate_samples[-1][0] >= 0.1:
            self._rate_samples.append((now, self.tokens))
            while now - self._rate_samples[0][0] > RATE_WINDOW_S and len(self._rate_samples) > 2:
                self._rate_samples.popleft()

    def tokens_per_second(self) -> float:
        now = time.monotonic()
        begin, before = next(
            ((when, count) for when, count in self._rate_samples if now - when <= RATE_WINDOW_S), (now, 0)
        )
        return (self.tokens - before) / max(now - begin, 1.0) if now > begin else 0.0


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that `share` of all reach."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def status_page() -> str:
    return files("tcdeploy.server").joinpath("page.html").read_text("utf-8")


def status(service: Any) -> dict[str, Any]:
    worker, recent = service.worker, service.recent
    deployment, stats = worker.deployment, worker.stats
    reason = "dead" if worker.failure else service.admission.closed_reason
    latency = [("first token", recent.time_to_first_token), ("between tokens", recent.inter_token_latency)]
    found: dict[str, Any] = {
        "model": service.model,
        "state": reason or "ready",
        "uptime_seconds": time.time() - service.start_time,
        "running": stats.running + stats.prefilling,
        "waiting": stats.waiting,
        "answers": recent.finished,
        "generation_tokens": recent.tokens,
        "tokens_per_second": recent.tokens_per_second(),
        "rejections": sum(service.admission.rejections.values()),
        "kv_cache_usage": 0.0,
        "recompiles": 0,
        "latency": [
            {
                "name": name,
                "count": len(values),
                **{f"p{share}": percentile(list(values), share / 100) for share in (50, 90, 99)},
            }
            for name, values in latency
        ],
        "buckets": [],
        "stage_seconds": {},
    }
    if deployment is None:
        return found
    runner = deployment.engine.runner
    step_counts = {bucket.name: count for bucket, count in list(runner.step_counts.items())}
    padding_tokens = {bucket.name: count for bucket, count in list(runner.padding_tokens.items())}
    return {
        **found,
        "kv_cache_usage": stats.used_blocks / deployment.engine.allocator.capacity,
        "recompiles": service.compiles_since_ready(),
        "stage_seconds": deployment.stage_seconds,
        "buckets": [
            {
                "bucket": record.bucket,
                "outcome": record.outcome,
                "hits": step_counts.get(record.bucket, 0),
                "padding": padding_tokens.get(record.bucket, 0),
                "max_difference": record.parity.max_difference,
                "kl": record.parity.kl,
                "candidate": record.variant,
            }
            for record in deployment.records
        ],
    }
