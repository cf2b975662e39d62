"""One client's request on its way: its choices from the engine, told whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from tcdeploy.engine.constraint import Constraint
from tcdeploy.engine.sequence import NewToken
from tcdeploy.errors import TcdeployError
from tcdeploy.server.http import abort, is_write_paused
from tcdeploy.server.metrics import Stopwatch
from tcdeploy.server.protocol import ApiError, ChatRequest, CompletionRequest, bad_request
from tcdeploy.server.response_builder import (
    ChatResponseBuilder,
    Choice,
    CompletionResponseBuilder,
    ResponseBuilder,
    total_usage,
)
from tcdeploy.server.service import Prompt, Service
from tcdeploy.server.stop_strings import StopStringDetokenizer
from tcdeploy.server.validation import to_sampling_params
from tcdeploy.server.worker import EngineDeadError, PendingRequest, RequestGroup

KEEP_ALIVE_SECONDS = 10.0
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
log = logging.getLogger("tcdeploy.server")
GRAMMAR_ERROR_MESSAGE = "an answer cannot be kept to its schema: its grammar became too large on the way"
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
KEEP_ALIVE, DONE = b": keep-alive\n\n", b"data: [DONE]\n\n"


class ActiveRequest:
    """A request that was admitted, from now to `close`: choice i * n + j is the j-th answer to prompt i."""

    builder: ResponseBuilder
    choices: list[Choice]

    def __init__(
        self,
        service: Service,
        request: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        constraint: Constraint | None = None,
    ) -> None:
        self.service, self.request, self.prompts = service, request, prompts
        requests = [
            (prompt.token_ids, to_sampling_params(request, len(prompt.token_ids), service.limits, number, constraint))
            for prompt in prompts
            for number in range(request.choices)
        ]
        self.stopwatches = [Stopwatch(service.metrics, service.recent) for _ in requests]
        self.group = RequestGroup(service.worker, requests)

    async def submit(self) -> None:
        """To the engine with it; what only the answers and the books need is made while it works."""
        await self.group.start()
        request, service = self.request, self.service
        if isinstance(request, ChatRequest):
            self.builder = ChatResponseBuilder(request, service.model, service.vocabulary)
        else:
            self.builder = CompletionResponseBuilder(request, service.model, service.vocabulary)
        self.choices = [
            self._choice(index, self.prompts[index // request.choices]) for index in range(len(self.stopwatches))
        ]
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        for length in lengths:
            service.missed_shapes.observe_shape("prefill", length)
        service.missed_shapes.observe_shape("decode", service.admission.num_admitted)
        service.metrics.prompt_tokens.inc(sum(lengths))

    def _choice(self, index: int, prompt: Prompt) -> Choice:
        request = self.request
        echo = prompt.text if isinstance(request, CompletionRequest) and request.echo else None
        tool_parser = None
        if isinstance(request, ChatRequest) and request.usable_tools:
            tool_parser = self.service.tools.tool_parser(request, prompt.text or "")
        skip_special_tokens = (
            request.skip_special_tokens is not False and tool_parser is None
        )  # they may be the marks of a call
        return Choice(
            index=index,
            text=StopStringDetokenizer(self.service.tokenizer, request.stops, skip_special_tokens),
            tool_parser=tool_parser,
            prompt_tokens=len(prompt.token_ids),
            wants_logprobs=request.num_logprobs is not None,
            echo=echo,
            prompt_token_ids=tuple(prompt.token_ids) if echo is not None else (),
        )

    async def deltas(self, timeout_s: float | None = None) -> AsyncGenerator[dict[int, str], None]:
        """What has come to each choice (by its index) since the last time; nothing, after `timeout_s` seconds.

        First tokens are on their way to the client before they are booked, or anything else is done.
        """
        async with contextlib.aclosing(self.group.tokens(timeout_s)) as batches:
            async for tokens in batches:
                texts: dict[int, str] = {}
                timings: list[tuple[Stopwatch, bool, float | None]] = []
                now = time.perf_counter()
                try:
                    for pending, token in tokens:
                        if pending.is_open:
                            texts[pending.index] = texts.get(pending.index, "") + self._append_token(pending, token)
                            timings.append((self.stopwatches[pending.index], not pending.is_open, token.queue_seconds))
                    yield texts
                    if any(queue_seconds is not None for _, _, queue_seconds in timings):
                        await asyncio.sleep(0)  # the loop writes what was sent when nothing else is left to do
                finally:
                    for stopwatch, is_last, queue_seconds in timings:
                        stopwatch.token(now, is_last, queue_seconds)

    def _append_token(self, pending: PendingRequest, token: NewToken) -> str:
        """The text that a token adds to its choice, which may end with it."""
        choice, metrics = self.choices[pending.index], self.service.metrics
        if token.finish_reason == "error":
            raise bad_request(GRAMMAR_ERROR_MESSAGE, self.request.constraint_field)
        text = choice.receive(token, self.service.vocabulary)
        if choice.finish_reason:
            metrics.request_success.labels(choice.finish_reason).inc()
            metrics.broken_tool_calls.inc(choice.tool_parser is not None and choice.tool_parser.is_broken)
            if not token.finish_reason:  # by a stop string, of which the engine knows nothing
                self.group.cancel(pending)
            pending.is_open = False
        return text

    def close(self) -> None:
        """What is still open ends, and the places of all answers are free."""
        self.group.close()
        self.service.admission.release(len(self.stopwatches))

    @property
    def usage(self) -> Any:
        return total_usage(self.choices, len(self.prompts))


async def full_json(active: ActiveRequest) -> dict[str, Any]:
    texts = [""] * len(active.choices)
    async for deltas in active.deltas():
        for index, text in deltas.items():
            texts[index] += text
    chunks = [active.builder.full_json(choice, text) for choice, text in zip(active.choices, texts, strict=True)]
    return active.builder.envelope(chunks, active.usage)


async def sse_events(active: ActiveRequest) -> AsyncGenerator[bytes, None]:
    """The whole stream. An error in it is an event too, and so is the end: a stream that just ends looks complete."""
    try:
        async with contextlib.aclosing(_sse_deltas(active)) as chunks:
            async for event in chunks:
                yield event
    except ApiError as error:
        yield _sse_event(error.body)
    except EngineDeadError as error:
        yield _sse_event(ApiError(503, str(error), code=error.code).body)
    except TcdeployError as error:
        yield _sse_event(bad_request(error.message, None).body)
    except Exception as error:  # ours: the client must not take what it has for the whole
        log.exception("a stream broke off")
        yield _sse_event(ApiError(500, f"{type(error).__name__}: {error}").body)
    yield DONE


async def _sse_deltas(active: ActiveRequest) -> AsyncGenerator[bytes, None]:
    """An event for each choice that has news. Where the client or this loop is slow, one tells of several tokens."""
    builder, options = active.builder, active.request.stream_options
    with_usage = options is not None and options.include_usage
    always = options is not None and options.continuous_usage_stats
    for choice in active.choices:
        first_delta = builder.first_delta(choice)
        if first_delta is not None:
            yield _sse_event(builder.envelope([first_delta], active.usage if always else None))
    async with contextlib.aclosing(active.deltas(KEEP_ALIVE_SECONDS)) as batches:
        async for deltas in batches:
            chunks = [
                _sse_event(builder.envelope([builder.delta(choice, text)], active.usage if always else None))
                for choice, text in ((active.choices[index], text) for index, text in deltas.items())
                if text or choice.has_unsent_output
            ]
            if chunks or not deltas:
                yield b"".join(chunks) or KEEP_ALIVE
    if with_usage:
        yield _sse_event(builder.envelope([], active.usage))


class _ClientStalled(Exception):
    """A client that does not read."""


class EventStream(StreamingResponse):
    """Server-sent events to a client that reads: one that takes nothing for `stall_seconds` is let go."""

    def __init__(self, active: ActiveRequest, stall_seconds: float) -> None:
        self._active, self._content, self._stall_seconds = active, sse_events(active), stall_seconds
        super().__init__(self._content, media_type="text/event-stream", headers=STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        try:
            await super().__call__(scope, receive, send)
        except _ClientStalled:
            log.warning("a client took nothing of its stream for %.0f s and was let go", self._stall_seconds)
            abort(scope)
        finally:
            self._active.close()

    async def stream_response(self, send: Send) -> None:
        """The server's `send` returns when its buffer has room again; the engine's tokens wait meanwhile."""

        async def send_in_time(message: Message) -> None:
            if not is_write_paused(self._scope):
                await send(message)
                return
            try:
                async with asyncio.timeout(self._stall_seconds):
                    await send(message)
            except TimeoutError:
                raise _ClientStalled from None

        try:
            await super().stream_response(send_in_time)
        finally:
            await self._content.aclose()


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which is cancelled when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sse_event(content: dict[str, Any]) -> bytes:
    return b"data: " + _to_json(content).encode() + b"\n\n"
