"""State of the server from its first second, before the model is loaded. Answers /health, /ready, /metrics, /status."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.apis.responses.store import ResponseStore
from tcdeploy.server.generate.admission import RETRY_AFTER_S, Admission
from tcdeploy.server.http.request_parsing import RequestParser
from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.observe.status import ModelFigures, ServerFigures, StatusHistory
from tcdeploy.server.observe.telemetry import Telemetry
from tcdeploy.server.service import Service
from tcdeploy.server.settings import ServerSettings
from tcdeploy.server.worker.canary import CanaryStats
from tcdeploy.server.worker.worker import Worker


@dataclass
class ServerState:
    """`service` is None while the model is loading, and is assigned once."""

    settings: ServerSettings
    worker: Worker
    admission: Admission
    metrics: Metrics = field(default_factory=Metrics)
    start_time: float = field(default_factory=time.time)
    service: Service | None = None
    parser: RequestParser = field(default_factory=RequestParser)
    history: StatusHistory = field(default_factory=StatusHistory)
    telemetry: Telemetry | None = None
    stored_responses: ResponseStore = field(default_factory=ResponseStore)

    def __post_init__(self) -> None:
        self.metrics.register_figures(self.figures)

    @property
    def unready_reason(self) -> str:
        """Why /ready answers 503: "loading", "draining", "dead", "canary failed", or "" if the server is ready."""
        return "dead" if self.worker.failure else self.admission.closed_reason or self._canary_reason

    @property
    def unwarm_reason(self) -> str:
        """Why /ready?level=warm answers 503: as `unready_reason`, or which buckets still run eagerly."""
        swaps = self.service.deployment.swaps if self.service else None
        return self.unready_reason or (swaps.describe() if swaps else "")

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is alive and, with --canary-strict, no canary has ever differed."""
        return not self.worker.failure and not self._canary_reason

    @property
    def _canary_reason(self) -> str:
        """Permanent: a device that gave a wrong result once may pass the next round."""
        canary = self.worker.canary
        return "canary failed" if self.settings.canary_strict and canary and canary.stats.failures else ""

    def figures(self) -> ServerFigures:
        return ServerFigures(
            model_name=self.settings.model,
            state=self.unready_reason or "ready",
            uptime_seconds=time.time() - self.start_time,
            scheduler=self.worker.stats,
            rejections=dict(self.admission.rejections),
            canary=self.worker.canary.stats if self.worker.canary else CanaryStats(),
            model=None if self.service is None else _model_figures(self.service),
        )

    def require_service(self) -> Service:
        """Raises ApiError 503 while the model is loading."""
        if self.service is None:
            raise ApiError(503, "the server is loading", code="loading", retry_after=RETRY_AFTER_S)
        return self.service


def _model_figures(service: Service) -> ModelFigures:
    deployment, runner = service.deployment, service.deployment.engine.runner
    clock, swaps = deployment.engine.clock, deployment.swaps
    return ModelFigures(
        kv_cache_usage=service.worker.stats.used_blocks / deployment.engine.allocator.capacity,
        # list(): the engine thread may add a bucket meanwhile
        step_counts={bucket.name: count for bucket, count in list(runner.step_counts.items())},
        computed_tokens={bucket.name: count for bucket, count in list(runner.computed_tokens.items())},
        padding_tokens={bucket.name: count for bucket, count in list(runner.padding_tokens.items())},
        step_totals=dict(clock.totals) if clock else {},
        step_corrections=dict(clock.predictor.corrections) if clock else {},
        late_launches=deployment.engine.launch_timer.late_launches,
        uncaptured_runs=runner.uncaptured_runs,
        late_captures=runner.graphs.late_captures,
        longest_late_capture_seconds=runner.graphs.longest_late_capture_seconds,
        missed_shapes=dict(service.missed_shapes.counts),
        recompiles=service.recompiles(),
        stage_seconds=dict(deployment.stage_seconds),
        import_seconds=deployment.import_seconds,
        weights_gb_per_second=deployment.weights_read.gb_per_second if deployment.weights_read else None,
        generation_defaults={
            **deployment.generation_defaults.sampling_params(),
            "stop_token_ids": list(deployment.generation_defaults.stop_token_ids),
        },
        records=tuple(deployment.records if swaps is None else swaps.records),
        tier="warm" if swaps is None or swaps.is_warm else "eager",
        num_buckets=len(deployment.plan.buckets),
        failed_buckets=swaps.failed_buckets if swaps else 0,
    )
