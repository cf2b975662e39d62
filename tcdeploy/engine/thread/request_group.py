"""The requests of one caller to the engine thread, as one stream of tokens on the event loop.

The event loop competes with the engine thread for the GIL. It yields while a step is launched: otherwise a launch with
256 requests at once took 10.7 ms instead of 3.1, and the throughput was 4% lower. After a submit it waits for the
launch: otherwise the first token of one client came 0.4 ms later (8B shape, H100).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator

from tcdeploy.engine.schedule.sequence import NewToken, SamplingParams
from tcdeploy.engine.thread.engine_thread import EngineRequest, EngineThread

MAX_LAUNCH_WAIT_S = 0.02  # after a submit, for the first step
MAX_YIELD_S = 0.01  # per launch; one with 256 rows took up to 7 ms (8B shape, H100)
_group_ids = itertools.count()


class RequestGroup:
    """The engine requests of one client request, merged into one stream of tokens.

    A step may deliver tokens to hundreds of streams within milliseconds, so the cost per token matters: a list and a
    future, instead of a queue and a task.
    """

    def __init__(self, engine_thread: EngineThread, prompts_and_params: list[tuple[list[int], SamplingParams]]) -> None:
        self._engine_thread = engine_thread
        self._new_tokens: list[tuple[EngineRequest, NewToken]] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_starting = False
        group_id = next(_group_ids)
        self.engine_requests = [
            EngineRequest(index, prompt, params, self._receive, group_id)
            for index, (prompt, params) in enumerate(prompts_and_params)
        ]

    async def start(self) -> None:
        """Submit all requests, and wait for their launch. `close` must follow."""
        self._engine_thread.launch_lock.wait(MAX_YIELD_S)
        for request in self.engine_requests:
            self._engine_thread.submit(request)
        if self._failure is None:
            self._is_starting = True
            await self._wait(MAX_LAUNCH_WAIT_S)
            self._is_starting = False

    async def tokens(
        self, timeout_s: float | None = None
    ) -> AsyncGenerator[list[tuple[EngineRequest, NewToken]], None]:
        """Yield the tokens that have arrived since the last batch, until every request is complete or cancelled; an
        empty list after `timeout_s` without any. Raises TcdeployError if the engine rejected a request or has died.
        """
        while any(request.is_open for request in self.engine_requests):
            if not self._new_tokens and self._failure is None:
                await self._wait(timeout_s)
            self._engine_thread.launch_lock.wait(MAX_YIELD_S)
            arrived, self._new_tokens = self._new_tokens, []
            if arrived or self._failure is None:
                yield arrived
            else:
                raise self._failure

    def cancel(self, request: EngineRequest) -> None:
        """Abort one request if it is open."""
        if request.is_open:
            self._engine_thread.cancel(request)

    def close(self) -> None:
        """Abort all open requests. No more tokens are received."""
        for request in self.engine_requests:
            self.cancel(request)
            request.close()

    def _receive(self, request: EngineRequest, item: NewToken | Exception | None) -> None:
        if isinstance(item, Exception):
            self._failure = item
        elif item is not None and request.is_open:
            self._new_tokens.append((request, item))
        if item is not None or self._is_starting:  # a late launch report must not wake a reader of tokens
            self._wake()

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
