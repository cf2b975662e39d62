"""State of the server from its first second (/health, /ready, /metrics, /status), and the served model.

A `Service` is built after the model is loaded, so no field is optional: its deployment, and what the endpoints derive
from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tcdeploy import __version__
from tcdeploy.engine.schedule.constraint import Constraint
from tcdeploy.engine.thread.canary_schedule import CanaryStats
from tcdeploy.engine.thread.engine_thread import EngineThread
from tcdeploy.host.progress import StageProgress
from tcdeploy.models.location import local_folder
from tcdeploy.models.weights.weight_paths import weight_files
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest, CompletionRequest
from tcdeploy.server.apis.openai.validation import ModelLimits
from tcdeploy.server.apis.responses.store import ResponseStore
from tcdeploy.server.generate.admission import RETRY_AFTER_S, Admission
from tcdeploy.server.generate.choice import Vocabulary
from tcdeploy.server.generate.text_encoder import TextEncoder
from tcdeploy.server.generate.tokenization import Prompt, PromptTokenizer
from tcdeploy.server.http.json_steps import JsonLimits
from tcdeploy.server.http.request_parsing import LargeBodyParser
from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.observe.missed_shapes import MissedShapes
from tcdeploy.server.observe.status import ModelFigures, ServerFigures, StatusHistory
from tcdeploy.server.observe.telemetry import Telemetry
from tcdeploy.server.output.structured.bad_words import BadWords
from tcdeploy.server.output.structured.output_constraint import OutputConstraint
from tcdeploy.server.output.structured.schema_numbers import UnsupportedSchemaError
from tcdeploy.server.output.structured.structured_output import (
    GrammarMatcher,
    StructuredOutputBackend,
    constraint_error,
    parse_schema,
)
from tcdeploy.server.output.tools import ToolSupport
from tcdeploy.server.settings import ServerSettings
from tcdeploy.start.record.factors import sampled_digest
from tcdeploy.text.conversation import replace_chat_template
from tcdeploy.text.template_probe import template_form

if TYPE_CHECKING:  # importing torch takes seconds; the socket answers before
    from tcdeploy.engine.engine import Engine
    from tcdeploy.planning.plan import Bucket, Plan
    from tcdeploy.start.deployment import Deployment

MAX_UNKNOWN_FIELDS = 1000  # names that are logged and counted
MAX_FIELD_NAME_CHARS = 200  # of such a name
FINGERPRINT_DIGITS = 10  # as many as OpenAI's
log = logging.getLogger("tcdeploy.server")


@dataclass(frozen=True)
class Service:
    """What requests need of the loaded model."""

    settings: ServerSettings
    deployment: Deployment
    engine_thread: EngineThread
    admission: Admission
    metrics: Metrics
    prompt_tokenizer: PromptTokenizer
    vocabulary: Vocabulary
    limits: ModelLimits
    structured_output: StructuredOutputBackend
    tools: ToolSupport
    missed_shapes: MissedShapes
    compiles_at_load: int
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    unknown_fields: set[str] = field(default_factory=set)  # names that have been logged

    @property
    def engine(self) -> Engine:
        """For the engine thread only."""
        return self.deployment.engine

    def recompiles(self) -> int:
        """Compilations since the model was loaded, without those between two steps after an eager start."""
        from tcdeploy.programs.compile_stats import read_counts

        swaps = self.deployment.swaps
        return read_counts().compiles - self.compiles_at_load - (swaps.compiles if swaps else 0)

    @property
    def json_limits(self) -> JsonLimits:
        """Limits for texts and lists of token ids. Longer ones are not valid in any field."""
        max_tokens, max_chars = self.limits.tokenize_tokens, self.prompt_tokenizer.encoder.max_chars_per_token
        string_chars = self.settings.max_body_bytes if max_chars is None else max_tokens * max_chars
        return JsonLimits(string_chars, max_tokens, self.limits.context)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 if `name` is another model."""
        if name is not None and name not in self.model_names:
            names = " and ".join(map(repr, self.model_names))
            message = f"the model {name[:200]!r} does not exist; this server serves {names}"
            raise ApiError(404, message, "model", "model_not_found")

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.settings.model, *self.settings.model_aliases

    def model_card(self, name: str) -> dict[str, Any]:
        """The model's entry in /v1/models under one of its names."""
        return {
            "id": name, "object": "model", "created": self.created, "owned_by": "tcdeploy",
            "max_model_len": self.limits.context,
        }  # fmt: skip

    def count_unknown_fields(self, names: Iterable[str]) -> None:
        """Log and count each unknown field once. The request is served."""
        for name in {name[:MAX_FIELD_NAME_CHARS] for name in names} - self.unknown_fields:
            if len(self.unknown_fields) < MAX_UNKNOWN_FIELDS:
                self.unknown_fields.add(name)
                self.metrics.unknown_fields.inc()
                log.warning("ignored the unknown request field %.80r", name)

    async def constraint(self, request: CompletionRequest | ChatRequest, prompts: list[Prompt]) -> Constraint | None:
        """The grammar that the request's output must follow, or its bad words, or None. Raises ApiError 400."""
        if isinstance(request, ChatRequest) and request.forced_tools:
            await self.structured_output.check_available("tool_choice")
            schemas = [tool["function"].get("parameters") for tool in request.forced_tools]
            self.structured_output.check_size(schemas, "tools")
            try:
                lark = await asyncio.to_thread(self.tools.grammar, request, prompts[0].text or "")
            except UnsupportedSchemaError as error:
                raise constraint_error("schema", error, "tools") from None
            return await self.structured_output.compile_lark(lark, "tools")
        if request.output_constraint is not None:
            if isinstance(request, ChatRequest) and request.usable_tools:
                return await self._calls_or_content(request, request.output_constraint, prompts[0].text or "")
            return await self.structured_output.compile(request.output_constraint)
        if request.bad_words and (bad_words := await self.prompt_tokenizer.bad_words(request.bad_words)):
            return BadWords(bad_words)
        return None

    async def _calls_or_content(
        self, request: ChatRequest, constraint: OutputConstraint, prompt: str
    ) -> GrammarMatcher:
        """The grammar of tool calls, or JSON that follows `constraint`. Raises ApiError 400."""
        backend = self.structured_output
        await backend.check_available(constraint.field)
        schema = parse_schema(constraint)
        backend.check_size([schema], constraint.field)
        backend.check_size([tool["function"].get("parameters") for tool in request.usable_tools], "tools")
        try:
            lark = await asyncio.to_thread(self.tools.calls_or_content_grammar, request, prompt, schema)
            return await backend.compile_lark(lark, "tools")
        except (ApiError, UnsupportedSchemaError) as error:
            await backend.compile_json_schema(schema, constraint.field)  # raises an error that names the right field
            raise error if isinstance(error, ApiError) else constraint_error("schema", error, "tools") from None


@dataclass
class ServerState:
    """`service` is None while the model is loading, and is assigned once."""

    settings: ServerSettings
    engine_thread: EngineThread
    admission: Admission
    metrics: Metrics = field(default_factory=Metrics)
    start_time: float = field(default_factory=time.time)
    service: Service | None = None
    large_body_parser: LargeBodyParser = field(default_factory=LargeBodyParser)
    history: StatusHistory = field(default_factory=StatusHistory)
    telemetry: Telemetry | None = None
    stored_responses: ResponseStore = field(default_factory=ResponseStore)
    progress: StageProgress = field(default_factory=StageProgress)

    def __post_init__(self) -> None:
        self.metrics.register_figures(self.figures)

    @property
    def unready_reason(self) -> str:
        """Why /ready answers 503: "loading", "draining", "dead", "canary failed", or "" if the server is ready."""
        return "dead" if self.engine_thread.failure else self.admission.closed_reason or self._canary_reason

    @property
    def unwarm_reason(self) -> str:
        """Why /ready?level=warm answers 503: as `unready_reason`, or which buckets still run eagerly."""
        swaps = self.service.deployment.swaps if self.service else None
        return self.unready_reason or (swaps.describe() if swaps else "")

    def readiness(self, reason: str) -> dict[str, Any]:
        """The body of /ready. `reason`: why it answers 503; "" if the server is ready."""
        if reason != "loading":
            return {"status": reason or "ready"}
        progress, position, left = self.progress, self.progress.position, self.progress.seconds_left
        return {
            "status": reason, "stage": position.stage or None, "step": position.step or None,
            "step_number": position.number or None, "num_steps": position.total or None,
            "detail": position.detail or None, "seconds": round(progress.seconds, 3),
            "seconds_left": None if left is None else round(left, 3),
        }  # fmt: skip

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is alive and, with --canary-strict, no canary has ever differed."""
        return not self.engine_thread.failure and not self._canary_reason

    @property
    def _canary_reason(self) -> str:
        """Permanent: a device that gave a wrong result once may pass the next round."""
        canary = self.engine_thread.canary
        return "canary failed" if self.settings.canary_strict and canary and canary.stats.failures else ""

    def figures(self) -> ServerFigures:
        return ServerFigures(
            model_name=self.settings.model, state=self.unready_reason or "ready",
            uptime_seconds=time.time() - self.start_time, scheduler=self.engine_thread.stats,
            rejections=dict(self.admission.rejections),
            canary=self.engine_thread.canary.stats if self.engine_thread.canary else CanaryStats(),
            model=None if self.service is None else _model_figures(self.service),
        )  # fmt: skip

    def require_service(self) -> Service:
        """Raises ApiError 503 while the model is loading."""
        if self.service is None:
            raise ApiError(503, "the server is loading", code="loading", retry_after=RETRY_AFTER_S)
        return self.service


def _model_figures(service: Service) -> ModelFigures:
    deployment, runner, swaps = service.deployment, service.deployment.engine.runner, service.deployment.swaps
    clock, defaults = deployment.engine.clock, deployment.planned.generation_defaults

    def by_name(counts: dict[Bucket, int]) -> dict[str, int]:
        return {bucket.name: count for bucket, count in list(counts.items())}  # the engine thread may add a bucket

    return ModelFigures(
        kv_cache_usage=service.engine_thread.stats.used_blocks / deployment.engine.allocator.capacity,
        step_counts=by_name(runner.step_counts), computed_tokens=by_name(runner.computed_tokens),
        padding_tokens=by_name(runner.padding_tokens), step_totals=dict(clock.totals) if clock else {},
        step_corrections=dict(clock.predictor.corrections) if clock else {},
        late_launches=deployment.engine.launch_timer.late_launches, uncaptured_runs=runner.graphs.uncaptured_runs,
        late_captures=runner.graphs.late_captures,
        longest_late_capture_seconds=runner.graphs.longest_late_capture_seconds,
        missed_shapes=dict(service.missed_shapes.counts), recompiles=service.recompiles(),
        stage_seconds=dict(deployment.stage_seconds), import_seconds=deployment.import_seconds,
        weights_gb_per_second=deployment.weights_read.gb_per_second if deployment.weights_read else None,
        generation_defaults={**defaults.sampling_params(), "stop_token_ids": list(defaults.stop_token_ids)},
        records=tuple(deployment.records if swaps is None else swaps.records),
        tier="warm" if swaps is None or swaps.is_warm else "eager", num_buckets=len(deployment.plan.buckets),
        failed_buckets=swaps.failed_buckets if swaps else 0,
    )  # fmt: skip


def build_service(
    deployment: Deployment,
    settings: ServerSettings,
    engine_thread: EngineThread,
    admission: Admission,
    metrics: Metrics,
) -> Service:
    """Build the service of a loaded deployment, in the engine thread: the event loop would not answer for the 0.1 s
    that reading a large vocabulary takes. Raises ModelError if the chat template of the settings cannot be used.
    """
    from tcdeploy.programs.compile_stats import read_counts  # imports torch, which is loaded by now

    engine, tokenizer = deployment.engine, deployment.tokenizer
    if settings.chat_template is not None:
        replace_chat_template(tokenizer, settings.chat_template)
    planned, defaults = deployment.planned, deployment.planned.generation_defaults
    limits = ModelLimits(deployment.plan.context, engine.vocab_size, defaults)
    tools = ToolSupport(tokenizer, planned.architecture.model_type, settings.tool_parser, settings.reasoning_parser)
    if unrendered := sorted(template_form(tokenizer).unrendered):  # also probes the template before the first request
        log.info("the chat template renders no messages of these kinds, which are refused: %s", ", ".join(unrendered))
    return Service(
        settings=settings, deployment=deployment, engine_thread=engine_thread, admission=admission, metrics=metrics,
        prompt_tokenizer=PromptTokenizer(tokenizer, TextEncoder(tokenizer), limits, settings.model, tools),
        vocabulary=Vocabulary(tokenizer), limits=limits,
        structured_output=StructuredOutputBackend(tokenizer, defaults.stop_token_ids), tools=tools,
        missed_shapes=MissedShapes(deployment.plan), compiles_at_load=read_counts().compiles,
        system_fingerprint=system_fingerprint(deployment.plan),
    )  # fmt: skip


def system_fingerprint(plan: Plan) -> str:
    """OpenAI's `system_fingerprint`: equal for servers with the same version, plan and weight samples.

    The plan's key covers the model's config, the hardware and the versions, but not the tokenizer. Each weight file
    contributes its name, its size and samples of its bytes, because reading a checkpoint would delay the start by
    seconds. Random weights, and files that cannot be found, are represented by the plan's key only.
    """
    digest = hashlib.sha256(f"{__version__} {plan.key} {plan.load_format}".encode())
    folder = None if plan.load_format == "dummy" else local_folder(plan.model, plan.revision)
    for path in weight_files(plan.model, folder) if folder else ():
        digest.update(f"{path.name} {path.stat().st_size} {sampled_digest(path)}".encode())
    return f"fp_{digest.hexdigest()[:FINGERPRINT_DIGITS]}"
