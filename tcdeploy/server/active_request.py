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
from tcdeploy.server.response_builder import Chat, Choice, Completions, Dialect, usage_of
from tcdeploy.server.http import abort, is_full
from tcdeploy.server.validation import sampling_params
from tcdeploy.server.metrics import Stopwatch
from tcdeploy.server.protocol import ApiError, ChatRequest, CompletionRequest, refusal
from tcdeploy.server.service import Prompt, Service
from tcdeploy.server.stop_strings import AnswerText
from tcdeploy.server.worker import Answer, EngineDied, Exchange

KEEP_ALIVE_SECONDS = 10.0
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
log = logging.getLogger("tcdeploy.server")
CANNOT_BE_KEPT = "an answer cannot be kept to its schema: its grammar became too large on the way"
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
KEEP_ALIVE, DONE = b": keep-alive\n\n", b"data: [DONE]\n\n"


class Running:
    """A request that was admitted, from now to `close`: choice i * n + j is the j-th answer to prompt i."""

    dialect: Dialect
    choices: list[Choice]

    def __init__(
        self,
        service: Service,
        asked: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        constraint: Constraint | None = None,
    ) -> None:
        self.service, self.asked, self.prompts = service, asked, prompts
        requests = [
            (prompt.token_ids, sampling_params(asked, len(prompt.token_ids), service.limits, number, constraint))
            for prompt in prompts
            for number in range(asked.choices)
        ]
        self.stopwatches = [Stopwatch(service.metrics, service.recent) for _ in requests]
        self.exchange = Exchange(service.worker, requests)

    async def begin(self) -> None:
        """To the engine with it; what only the answers and the books need is made while it works."""
        await self.exchange.start()
        asked, service = self.asked, self.service
        if isinstance(asked, ChatRequest):
            self.dialect = Chat(asked, service.model, service.vocabulary)
        else:
            self.dialect = Completions(asked, service.model, service.vocabulary)
        self.choices = [
            self._choice(index, self.prompts[index // asked.choices]) for index in range(len(self.stopwatches))
        ]
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        for length in lengths:
            service.missed.note("prefill", length)
        service.missed.note("decode", service.admission.inside)
        service.metrics.prompt_tokens.inc(sum(lengths))

    def _choice(self, index: int, prompt: Prompt) -> Choice:
        asked = self.asked
        echo = prompt.text if isinstance(asked, CompletionRequest) and asked.echo else None
        reader = None
        if isinstance(asked, ChatRequest) and asked.usable_tools:
            reader = self.service.tools.reader(asked, prompt.text or "")
        skips_special = asked.skip_special_tokens is not False and reader is None  # they may be the marks of a call
        return Choice(
            index=index,
            text=AnswerText(self.service.tokenizer, asked.stops, skips_special),
            reader=reader,
            prompt_tokens=len(prompt.token_ids),
            wants_logprobs=asked.wanted_logprobs is not None,
            echo=echo,
            echoed_ids=tuple(prompt.token_ids) if echo is not None else (),
        )

    async def pieces(self, patience: float | None = None) -> AsyncGenerator[dict[int, str], None]:
        """What has come to each choice (by its index) since the last time; nothing, after `patience` seconds.

        First tokens are on their way to the client before they are booked, or anything else is done.
        """
        async with contextlib.aclosing(self.exchange.tokens(patience)) as arrivals:
            async for arrived in arrivals:
                texts: dict[int, str] = {}
                books: list[tuple[Stopwatch, bool, float | None]] = []
                now = time.perf_counter()
                try:
                    for answer, token in arrived:
                        if answer.is_open:
                            texts[answer.index] = texts.get(answer.index, "") + self._read(answer, token)
                            books.append((self.stopwatches[answer.index], not answer.is_open, token.queue_seconds))
                    yield texts
                    if any(queue_seconds is not None for _, _, queue_seconds in books):
                        await asyncio.sleep(0)  # the loop writes what was sent when nothing else is left to do
                finally:
                    for stopwatch, is_last, queue_seconds in books:
                        stopwatch.token(now, is_last, queue_seconds)

    def _read(self, answer: Answer, token: NewToken) -> str:
        """The text that a token adds to its choice, which may end with it."""
        choice, metrics = self.choices[answer.index], self.service.metrics
        if token.finish_reason == "error":
            raise refusal(CANNOT_BE_KEPT, self.asked.held_by)
        text = choice.receive(token, self.service.vocabulary)
        if choice.finish_reason:
            metrics.request_success.labels(choice.finish_reason).inc()
            metrics.broken_tool_calls.inc(choice.reader is not None and choice.reader.is_broken)
            if not token.finish_reason:  # by a stop string, of which the engine knows nothing
                self.exchange.cancel(answer)
            answer.is_open = False
        return text

    def close(self) -> None:
        """What is still open ends, and the places of all answers are free."""
        self.exchange.close()
        self.service.admission.leave(len(self.stopwatches))

    @property
    def usage(self) -> Any:
        return usage_of(self.choices, len(self.prompts))


async def whole(running: Running) -> dict[str, Any]:
    texts = [""] * len(running.choices)
    async for pieces in running.pieces():
        for index, text in pieces.items():
            texts[index] += text
    told = [running.dialect.whole(choice, text) for choice, text in zip(running.choices, texts, strict=True)]
    return running.dialect.chunk(told, running.usage)


async def events(running: Running) -> AsyncGenerator[bytes, None]:
    """The whole stream. An error in it is an event too, and so is the end: a stream that just ends looks complete."""
    try:
        async with contextlib.aclosing(_told(running)) as told:
            async for event in told:
                yield event
    except ApiError as error:
        yield _event(error.body)
    except EngineDied as error:
        yield _event(ApiError(503, str(error), code=error.code).body)
    except TcdeployError as error:
        yield _event(refusal(error.message, None).body)
    except Exception as error:  # ours: the client must not take what it has for the whole
        log.exception("a stream broke off")
        yield _event(ApiError(500, f"{type(error).__name__}: {error}").body)
    yield DONE


async def _told(running: Running) -> AsyncGenerator[bytes, None]:
    """An event for each choice that has news. Where the client or this loop is slow, one tells of several tokens."""
    dialect, options = running.dialect, running.asked.stream_options
    with_usage = options is not None and options.include_usage
    always = options is not None and options.continuous_usage_stats
    for choice in running.choices:
        opening = dialect.opening(choice)
        if opening is not None:
            yield _event(dialect.chunk([opening], running.usage if always else None))
    async with contextlib.aclosing(running.pieces(KEEP_ALIVE_SECONDS)) as arrivals:
        async for pieces in arrivals:
            told = [
                _event(dialect.chunk([dialect.piece(choice, text)], running.usage if always else None))
                for choice, text in ((running.choices[index], text) for index, text in pieces.items())
                if text or choice.has_news
            ]
            if told or not pieces:
                yield b"".join(told) or KEEP_ALIVE
    if with_usage:
        yield _event(dialect.chunk([], running.usage))


class _Stalled(Exception):
    """A client that does not read."""


class EventStream(StreamingResponse):
    """Server-sent events to a client that reads: one that takes nothing for `stall_seconds` is let go."""

    def __init__(self, running: Running, stall_seconds: float) -> None:
        self._running, self._content, self._stall_seconds = running, events(running), stall_seconds
        super().__init__(self._content, media_type="text/event-stream", headers=STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        try:
            await super().__call__(scope, receive, send)
        except _Stalled:
            log.warning("a client took nothing of its stream for %.0f s and was let go", self._stall_seconds)
            abort(scope)
        finally:
            self._running.close()

    async def stream_response(self, send: Send) -> None:
        """The server's `send` returns when its buffer has room again; the engine's tokens wait meanwhile."""

        async def send_in_time(message: Message) -> None:
            if not is_full(self._scope):
                await send(message)
                return
            try:
                async with asyncio.timeout(self._stall_seconds):
                    await send(message)
            except TimeoutError:
                raise _Stalled from None

        try:
            await super().stream_response(send_in_time)
        finally:
            await self._content.aclose()


async def until_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which is cancelled when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _to_json(content).encode() + b"\n\n"
