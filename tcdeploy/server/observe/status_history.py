"""Figures of the last 15 minutes, for the graphs of the page at /. Prometheus keeps longer histories."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from tcdeploy.host.percentile import percentile
from tcdeploy.server.observe.figures import ServerFigures
from tcdeploy.server.observe.recent_stats import RecentStats

INTERVAL_S = 2.0
CAPACITY = 450  # samples: 15 minutes


class StatusHistory:
    """One sample per INTERVAL_S. Used by the event loop only."""

    def __init__(self) -> None:
        self._samples: deque[dict[str, float | None]] = deque(maxlen=CAPACITY)
        self._num_samples = 0  # since the start
        self._tokens = self._first_tokens = 0  # at the last sample

    def sample(self, figures: ServerFigures, recent: RecentStats) -> None:
        """Append a sample of the time since the last one. `first_token_p50` is None if there was no first token."""
        num_first = min(recent.first_tokens - self._first_tokens, len(recent.time_to_first_token))
        newest = list(islice(reversed(recent.time_to_first_token), num_first))
        self._samples.append({
            "tokens_per_second": (recent.tokens - self._tokens) / INTERVAL_S,
            "first_token_p50": percentile(newest, 50) if newest else None,
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
