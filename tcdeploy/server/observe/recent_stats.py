"""Latencies and token rate of the most recent requests, for /status. Prometheus' histograms have only fixed buckets."""

from __future__ import annotations

import time
from collections import deque

WINDOW_SIZE = 2000  # samples per percentile
RATE_WINDOW_S = 5.0
RATE_SAMPLE_S = 0.1


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
