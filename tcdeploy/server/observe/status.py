"""The server's figures at one moment, as typed data, and the /status document, which the page at / shows.

/metrics reads the same figures. Percentiles cover the last 2,000 samples, the token rate the last 5 seconds, and the
graphs 15 minutes; Prometheus keeps longer histories, but its histograms have only fixed buckets. The page itself
contains no data of the model, so it is served without the API key; it prompts for the key, and sends it with each
request.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from typing import Any

from tcdeploy.engine.schedule.scheduler import SchedulerStats
from tcdeploy.engine.schedule.step_costs import StepTotals
from tcdeploy.engine.thread.canary_schedule import CanaryStats
from tcdeploy.host.percentile import percentile
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.server.settings import StartTier

WINDOW_SIZE = 2000  # samples per percentile
RATE_WINDOW_S = 5.0
RATE_SAMPLE_S = 0.1
INTERVAL_S = 2.0
CAPACITY = 450  # samples: 15 minutes
WHILE_LOADING: dict[str, Any] = {  # figures of the model in /status
    "kv_cache_usage": 0.0, "recompiles": 0, "tier": None, "num_buckets": 0, "stage_seconds": {},
    "weights_gb_per_second": None, "import_seconds": {}, "generation_defaults": {},
}  # fmt: skip


@dataclass(frozen=True)
class ModelFigures:
    """Figures that exist once the model is loaded."""

    kv_cache_usage: float  # share of the KV blocks in use, 0 to 1
    step_counts: Mapping[str, int]  # steps by bucket name
    computed_tokens: Mapping[str, int]  # tokens or rows by bucket name, padding included
    padding_tokens: Mapping[str, int]  # padding by bucket name: tokens of prefill, rows of decode
    step_totals: Mapping[str, StepTotals]  # measured and predicted time by kind of step
    step_corrections: Mapping[str, float]  # factor of the predictions by kind of step
    late_launches: int  # steps launched after the device had completed the previous one
    uncaptured_runs: int  # forward passes without the CUDA graph of their bucket
    late_captures: int  # CUDA graphs captured since the model was loaded
    longest_late_capture_seconds: float  # the longest pause that one of these captures caused
    missed_shapes: Mapping[str, int]  # requests beyond the largest bucket, by the bucket that would hold them
    recompiles: int  # compilations since the model was loaded
    stage_seconds: Mapping[str, float]  # start-up time by stage
    import_seconds: Mapping[str, float]  # of the start-up time, that of imports, by package
    weights_gb_per_second: float | None  # of our reader threads; None if they have read nothing
    generation_defaults: Mapping[str, Any]  # sampling parameters and stop tokens of requests that leave them out
    records: tuple[BucketRecord, ...]  # cache outcome, parity and variant of each bucket that runs its programs
    tier: StartTier  # "eager" until every bucket runs its programs
    num_buckets: int
    failed_buckets: int  # those that continue to run eagerly


@dataclass(frozen=True)
class ServerFigures:
    model_name: str
    state: str  # "ready", "loading", "draining", "dead" or "canary failed"
    uptime_seconds: float
    scheduler: SchedulerStats
    rejections: Mapping[str, int]  # requests that admission rejected, by reason
    model: ModelFigures | None  # None while loading
    canary: CanaryStats = CanaryStats()  # zeros while loading, and without a canary


class RecentStats:
    """Counts since the start, and a window of samples. Used by the event loop only."""

    def __init__(self) -> None:
        self.time_to_first_token: deque[float] = deque(maxlen=WINDOW_SIZE)  # seconds
        self.inter_token_latency: deque[float] = deque(maxlen=WINDOW_SIZE)  # seconds
        self.first_tokens = 0
        self.finished = 0
        self.tokens = 0
        self._rate_samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])  # (time, total tokens)

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
        samples = list(self._samples)[-max_samples:] if max_samples > 0 else []
        return {"interval_seconds": INTERVAL_S, "capacity": CAPACITY, "end": self._num_samples, "samples": samples}


def page() -> str:
    return files("tcdeploy.server").joinpath("page.html").read_text("utf-8")


def page_headers(page: str) -> dict[str, str]:
    """Headers that forbid the page to run other scripts and to connect to other servers."""
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def status_json(figures: ServerFigures, recent: RecentStats) -> dict[str, Any]:
    model = figures.model
    return {
        "model": figures.model_name,
        "state": figures.state,
        "uptime_seconds": figures.uptime_seconds,
        "running": figures.scheduler.running + figures.scheduler.prefilling,
        "waiting": figures.scheduler.waiting,
        "finished": recent.finished,
        "generation_tokens": recent.tokens,
        "tokens_per_second": recent.tokens_per_second(),
        "rejections": sum(figures.rejections.values()),
        **{name: getattr(model, name, default) for name, default in WHILE_LOADING.items()},
        "latency": [
            _latency_json("first token", list(recent.time_to_first_token)),
            _latency_json("between tokens", list(recent.inter_token_latency)),
        ],
        "buckets": [_bucket_json(model, record) for record in model.records] if model else [],
    }


def _latency_json(name: str, seconds: list[float]) -> dict[str, Any]:
    percentiles = {f"p{q}": percentile(seconds, q) if seconds else None for q in (50, 90, 99)}
    return {"name": name, "count": len(seconds), **percentiles}


def _bucket_json(model: ModelFigures, record: BucketRecord) -> dict[str, Any]:
    parity = ("max_difference", "eager_max_difference", "kl", "eager_kl")
    return {
        **{name: getattr(record, name) for name in ("bucket", "outcome", "variant")},
        **{name: getattr(record.parity, name) for name in parity},
        "steps": model.step_counts.get(record.bucket, 0),
        "padding_tokens": model.padding_tokens.get(record.bucket, 0),
    }
