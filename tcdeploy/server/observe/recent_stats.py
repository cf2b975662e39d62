"""Latencies and token rate of the most recent requests, for /status, and samples of 15 minutes for its graphs.

Prometheus keeps longer histories, but its histograms have only fixed buckets.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import Any

from tcdeploy.server.observe.figures import ServerFigures

WINDOW_SIZE = 2000  # samples per percentile
RATE_WINDOW_S = 5.0
RATE_SAMPLE_S = 0.1
INTERVAL_S = 2.0
CAPACITY = 450  # samples: 15 minutes


class RecentStats:
    """Counts since the start, and a window of samples. Used by the event loop only."""

    def __init__(self) -> None:
        self.time_to_first_token: deque[float] = deque(maxlen=WINDOW_SIZE)  # seconds
        self.inter_token_latency: deque[float] = deque(maxlen=WINDOW_SIZE)  # seconds
        self.first_tokens = 0
        self.finished = 0
        self.tokens = 0
        self._rate_samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])  # (time, total tokens)

    def observe_first_token(self, seconds: float) -> None:
        self.first_tokens += 1
        self.time_to_first_token.append(seconds)

    def observe_token(self) -> None:
        self.tokens += 1
        now = time.monotonic()
        if now - self._rate_samples[-1][0] >= RATE_SAMPLE_S:
            self._rate_samples.append((now, self.tokens))
            while now - self._rate_samples[0][0] > RATE_WINDOW_S and len(self._rate_samples) > 2:
                self._rate_samples.popleft()

    def tokens_per_second(self) -> float:
        """Over the last RATE_WINDOW_S seconds."""
        now = time.monotonic()
        begin, before = next(
            ((when, count) for when, count in self._rate_samples if now - when <= RATE_WINDOW_S), (now, 0)
        )
        return (self.tokens - before) / max(now - begin, 1.0) if now > begin else 0.0


def percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile; `share` is between 0 and 1. None without values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


class StatusHistory:
    """One sample per INTERVAL_S. Used by the event loop only."""

    def __init__(self) -> None:
        self._samples: deque[dict[str, float | None]] = deque(maxlen=CAPACITY)
        self._num_samples = 0  # since the start
        self._tokens = self._first_tokens = 0  # at the last sample

    def sample(self, figures: ServerFigures, recent: RecentStats) -> None:
        """Append a sample of the time since the last one. `first_token_p50` is None if there was no first token."""
        num_first = min(recent.first_tokens - self._first_tokens, len(recent.time_to_first_token))
        newest = islice(reversed(recent.time_to_first_token), num_first)
        self._samples.append({
            "tokens_per_second": (recent.tokens - self._tokens) / INTERVAL_S,
            "first_token_p50": percentile(list(newest), 0.5),
            "kv_cache_usage": figures.model.kv_cache_usage if figures.model else 0.0,
        })  # fmt: skip
        self._num_samples += 1
        self._tokens, self._first_tokens = recent.tokens, recent.first_tokens

    def json(self, max_samples: int) -> dict[str, Any]:
        """The newest samples, oldest first. `end` is the number of samples since the start of the server."""
        return {
            "interval_seconds": INTERVAL_S,
            "capacity": CAPACITY,
            "end": self._num_samples,
            "samples": list(self._samples)[-max_samples:] if max_samples > 0 else [],
        }
