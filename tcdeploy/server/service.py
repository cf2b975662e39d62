"""What the routes share: the model that is served, its tokenizer and limits, and who may come in."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tcdeploy.engine.constraint import Constraint
from tcdeploy.engine.detokenizer import stop_token_ids
from tcdeploy.server.admission import Admission
from tcdeploy.server.metrics import Metrics
from tcdeploy.server.missed_shapes import MissedShapes
from tcdeploy.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
    bad_request,
    dump_tools,
)
from tcdeploy.server.status import RecentStats
from tcdeploy.server.structured_output import StructuredOutputBackend
from tcdeploy.server.tools import ToolSupport
from tcdeploy.server.validation import ModelLimits
from tcdeploy.server.vocabulary import Vocabulary
from tcdeploy.server.worker import Worker

if TYPE_CHECKING:  # torch takes seconds, in which the socket already answers
    from tcdeploy.pipeline import Deployment

OFFLOAD_THRESHOLD = 20_000  # characters: tokenized beside the event loop
log = logging.getLogger("tcdeploy.server")


class Prompt(NamedTuple):
    token_ids: list[int]
    text: str | None  # as it was given, or as the chat template wrote it


@dataclass
class Service:
    """Made before the model is there; `attach` fills the rest in."""

    worker: Worker
    admission: Admission
    model: str
    api_key: str | None = None
    max_body_bytes: int = 8 << 20
    stall_timeout: float = 30.0
    tokenizer: Any = None
    start_time: int = field(default_factory=lambda: int(time.time()))
    unknown_fields: set[str] = field(default_factory=set)
    limits: ModelLimits = ModelLimits(0, 0, ())
    metrics: Metrics = field(default_factory=Metrics)
    recent: RecentStats = field(default_factory=RecentStats)

    def __post_init__(self) -> None:
        self.metrics.register_service(self)

    def attach(self, deployment: Deployment) -> None:
        """What requests need of the model. In the engine's thread: a grammar of a large vocabulary takes a second."""
        from tcdeploy.compiler.ledger import read_counts  # torch, which is there by now

        engine = deployment.engine
        self.tokenizer = deployment.tokenizer
        self.vocabulary = Vocabulary(self.tokenizer)
        stops = stop_token_ids(engine.runner.model.generation_config)
        self.limits = ModelLimits(deployment.plan.context, engine.vocab_size, stops)
        self.structured_output = StructuredOutputBackend(self.tokenizer, stops)
        self.tools = ToolSupport(self.tokenizer, engine.runner.model)
        self.missed_shapes = MissedShapes(deployment.plan)
        self._compiles = read_counts().compiles

    def compiles_since_ready(self) -> int:
        from tcdeploy.compiler.ledger import read_counts

        return read_counts().compiles - self._compiles

    def require_ready(self) -> None:
        if self.worker.deployment is None:
            raise ApiError(503, "the server is loading", code="loading", retry_after=1)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(
                404, f"the model {name[:200]!r} is not served here: {self.model} is", "model", "model_not_found"
            )

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self.start_time,
            "owned_by": "tcdeploy",
            "max_model_len": self.limits.context,
        }

    def count_unknown_fields(self, request: GenerationRequest) -> None:
        """A field that nobody knows is let through, and told once."""
        for name in set(request.model_extra or {}) - self.unknown_fields:
            if len(self.unknown_fields) < 1000:
                self.unknown_fields.add(name)
                self.metrics.unknown_fields.inc()
                log.warning("a request has the unknown field %.80r, which means nothing here", name)

    async def prompts(self, request: CompletionRequest | ChatRequest) -> list[Prompt]:
        if isinstance(request, ChatRequest):
            template_kwargs = {"add_generation_prompt": request.add_generation_prompt is not False}
            return [
                await self._render_chat(
                    request.messages, self._checked_template_kwargs(request) | template_kwargs, request.usable_tools
                )
            ]
        made = []
        for given in request.prompts:
            if isinstance(given, str):
                made.append(Prompt(await self._encode(given), given))
            else:
                self._check_token_ids(given)
                wants_text = isinstance(request, CompletionRequest) and request.echo
                made.append(Prompt(given, await self.detokenize(given, "prompt") if wants_text else None))
            if not made[-1].token_ids:
                raise bad_request("a prompt is empty", "prompt")
        return made

    def _checked_template_kwargs(self, request: ChatRequest) -> dict[str, Any]:
        """Variables of the model's template; no arguments of transformers' own, which can bring another template."""
        given = request.chat_template_kwargs or {}
        own = {"tools", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        if taken := sorted(own & given.keys()):
            raise bad_request(f"chat_template_kwargs cannot set {taken[0]}", "chat_template_kwargs")
        return given

    async def constraint(self, request: CompletionRequest | ChatRequest, prompts: list[Prompt]) -> Constraint | None:
        """What holds the request's answers to the form that it demands; None where it demands none."""
        if request.output_schema is not None:
            return await self.structured_output.compile_json_schema(request.output_schema, "response_format")
        if isinstance(request, ChatRequest) and request.forced_tools:
            self.structured_output.require("tool_choice")
            return await self.structured_output.compile_lark(
                self.tools.grammar(request, prompts[0].text or ""), "tools"
            )
        return None

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("give a prompt or messages", "prompt")
        if request.messages is not None:
            template_kwargs = {"add_generation_prompt": request.add_generation_prompt is not False}
            return (await self._render_chat(request.messages, template_kwargs, dump_tools(request.tools))).token_ids
        return await self._encode(request.prompt or "", request.add_special_tokens)

    async def detokenize(self, token_ids: list[int], field: str = "tokens") -> str:
        def decode() -> str:
            self._check_token_ids(token_ids, field)
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

        return decode() if len(token_ids) < OFFLOAD_THRESHOLD else await asyncio.to_thread(decode)

    def tokenizer_info(self) -> dict[str, Any]:
        """The names that vLLM gives of the same route; no path of this machine among them."""
        own = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return {
            "tokenizer_class": type(self.tokenizer).__name__,
            **{name: getattr(self.tokenizer, name) for name in own},
        }

    def _check_token_ids(self, token_ids: list[int], field: str = "prompt") -> None:
        last = self.limits.vocab_size - 1
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= last:
            raise bad_request(f"token ids go from 0 to {last}", field)

    async def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        def encode() -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

        return encode() if len(text) < OFFLOAD_THRESHOLD else await asyncio.to_thread(encode)

    async def _render_chat(
        self, messages: list[Message], template_kwargs: dict[str, Any], tools: list[dict[str, Any]]
    ) -> Prompt:
        if not messages:
            raise bad_request("there are no messages", "messages")
        if not self.tokenizer.chat_template:
            raise bad_request(f"{self.model} has no chat template", "messages")
        self.tools.check(tools)
        template_kwargs = {**template_kwargs, "tools": tools} if tools else template_kwargs

        def encode() -> Prompt:
            given = [message.for_template() for message in messages]
            try:
                text = self.tokenizer.apply_chat_template(given, tokenize=False, **template_kwargs)
            except Exception as error:  # the template's own refusals, in Jinja's classes
                raise bad_request(f"the chat template refuses these messages: {error}", "messages") from None
            return Prompt(list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids), text)

        size = sum(len(str(message.content)) for message in messages) + len(str(tools))
        return encode() if size < OFFLOAD_THRESHOLD else await asyncio.to_thread(encode)
