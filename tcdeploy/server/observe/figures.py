"""The server's figures at one moment, as typed data. /metrics and /status both read them from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tcdeploy.engine.schedule.scheduler import SchedulerStats
from tcdeploy.engine.schedule.step_costs import StepTotals
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.server.settings import StartTier
from tcdeploy.server.worker.canary import CanaryStats


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
