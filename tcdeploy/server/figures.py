"""The server's figures at one moment, as typed data. /metrics and /status both read them from here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tcdeploy.cache.manifest import BucketRecord
from tcdeploy.engine.scheduler import SchedulerStats

if TYPE_CHECKING:
    from tcdeploy.server.server_state import ServerState
    from tcdeploy.server.service import Service


@dataclass(frozen=True)
class ModelFigures:
    """Figures that exist once the model is loaded."""

    kv_cache_usage: float  # share of the KV blocks in use, 0 to 1
    step_counts: Mapping[str, int]  # steps by bucket name
    padding_tokens: Mapping[str, int]  # padding by bucket name: tokens of prefill, rows of decode
    uncaptured_runs: int  # forward passes without the CUDA graph of their bucket
    missed_shapes: Mapping[str, int]  # requests beyond the largest bucket, by the bucket that would hold them
    recompiles: int  # compilations since the model was loaded
    stage_seconds: Mapping[str, float]  # start-up time by stage
    records: tuple[BucketRecord, ...]  # cache outcome, parity and variant of each bucket


@dataclass(frozen=True)
class ServerFigures:
    model_name: str
    state: str  # "ready", "loading", "draining" or "dead"
    uptime_seconds: float
    scheduler: SchedulerStats
    rejections: Mapping[str, int]  # requests that admission rejected, by reason
    model: ModelFigures | None  # None while loading


def collect_figures(state: ServerState) -> ServerFigures:
    return ServerFigures(
        model_name=state.settings.model,
        state=state.unready_reason or "ready",
        uptime_seconds=time.time() - state.start_time,
        scheduler=state.worker.stats,
        rejections=dict(state.admission.rejections),
        model=None if state.service is None else _collect_model_figures(state.service),
    )


def _collect_model_figures(service: Service) -> ModelFigures:
    deployment, runner = service.deployment, service.deployment.engine.runner
    return ModelFigures(
        kv_cache_usage=service.worker.stats.used_blocks / deployment.engine.allocator.capacity,
        # list(): the engine thread may add a bucket meanwhile
        step_counts={bucket.name: count for bucket, count in list(runner.step_counts.items())},
        padding_tokens={bucket.name: count for bucket, count in list(runner.padding_tokens.items())},
        uncaptured_runs=runner.uncaptured_runs,
        missed_shapes=dict(service.missed_shapes.counts),
        recompiles=service.recompiles(),
        stage_seconds=dict(deployment.stage_seconds),
        records=tuple(deployment.records),
    )
