"""The engine requests of one API request (all prompts, all choices), merged into one stream of tokens.

A step may deliver tokens to hundreds of streams within milliseconds, so the cost per token matters: a list and a
future, instead of a queue and a task.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any

from tcdeploy.engine.schedule.sequence import NewToken, SamplingParams
from tcdeploy.server.http.hot_path import wait_for_launch, yield_to_launch
from tcdeploy.server.worker.worker import PendingRequest, Worker

_group_ids = itertools.count()


class RequestGroup:
    def __init__(self, worker: Worker[Any], prompts_and_params: list[tuple[list[int], SamplingParams]]) -> None:
        self._worker = worker
        self._new_tokens: list[tuple[PendingRequest, NewToken]] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_starting = False
        group = next(_group_ids)
        self.pending_requests = [
            PendingRequest(index, prompt, params, self._receive, group)
            for index, (prompt, params) in enumerate(prompts_and_params)
        ]

    async def start(self) -> None:
        """Submit all requests, and wait for their launch if `wait_for_launch` is on. `close` must follow."""
        yield_to_launch(self._worker.launch_lock, self._worker.hot_path)
        for pending in self.pending_requests:
            self._worker.submit(pending)
        if self._failure is None and self._worker.hot_path.wait_for_launch:
            self._is_starting = True
            await wait_for_launch(self._wait)
            self._is_starting = False

    async def tokens(
        self, timeout_s: float | None = None
    ) -> AsyncGenerator[list[tuple[PendingRequest, NewToken]], None]:
        """Yield the tokens that have arrived since the last batch, until every request is complete or cancelled.

        An empty list means that nothing arrived for `timeout_s` seconds. Raises TcdeployError if the engine rejected a
        request, and EngineDeadError if it has died.
        """
        while any(pending.is_open for pending in self.pending_requests):
            if not self._new_tokens and self._failure is None:
                await self._wait(timeout_s)
            yield_to_launch(self._worker.launch_lock, self._worker.hot_path)
            arrived, self._new_tokens = self._new_tokens, []
            if arrived or self._failure is None:
                yield arrived
            else:
                raise self._failure

    def cancel(self, pending: PendingRequest) -> None:
        """Abort one request if it is open."""
        if pending.is_open:
            self._worker.cancel(pending)

    def close(self) -> None:
        """Abort all open requests. No more tokens are received."""
        for pending in self.pending_requests:
            self.cancel(pending)
            pending.close()

    def _receive(self, pending: PendingRequest, item: NewToken | Exception | None) -> None:
        if isinstance(item, Exception):
            self._failure = item
        elif item is not None and pending.is_open:
            self._new_tokens.append((pending, item))
        if item is not None or self._is_starting:  # a late launch report must not wake a reader of tokens
            self._wake()

    async def _wait(self, timeout_s: float | None) -> None:
        """Return when something has arrived, or after `timeout_s` seconds."""
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
