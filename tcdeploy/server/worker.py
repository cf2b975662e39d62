"""The engine in a thread of its own, and the way from an event loop to it and back.

The engine is not thread-safe, so nothing but this thread touches it: requests and cancellations go in through a queue,
and the tokens of a step come out in one call of the event loop, which hands them to whoever waits. A step that raises
ends the worker: what the device then holds is not known, so every open answer gets the error, and the server exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from tcdeploy.engine.scheduler import SchedulerStats
from tcdeploy.engine.sequence import NewToken, SamplingParams
from tcdeploy.errors import TcdeployError

if TYPE_CHECKING:  # torch takes seconds, in which the socket already answers
    from tcdeploy.pipeline import Deployment

STOP = None  # the message that ends the thread
# Seconds without Python's lock after an answer's first token, so that the event loop sends it at once: it took 0.48 ms
# from step to loop without, and 0.21 with (medians, a tiny model on two cores).
FIRST_TOKEN_SLEEP_S = 0.0002
# Seconds that a request keeps out of the engine's way at most: the next prefill is launched 0.7 ms after it came to an
# idle engine (8B on an H100), and a step that runs takes 5 to 15 ms. Whoever waits longer goes on beside the engine.
MAX_LAUNCH_WAIT_S = 0.02
ReceiveCallback: TypeAlias = "Callable[[PendingRequest, NewToken | Exception | None], None]"


class EngineDeadError(Exception):
    """Nothing more will come: the engine is gone, or the server ends."""

    def __init__(self, message: str, code: str = "engine_died") -> None:
        super().__init__(message)
        self.code = code


class PendingRequest:
    """One request of the engine, on the side of the event loop. What comes for it goes to `receive`, with its name.

    None comes when the engine has made a step since it had it; of an idle engine that is the launch of its prefill.
    """

    def __init__(self, index: int, prompt: list[int], params: SamplingParams, receive: ReceiveCallback) -> None:
        self.index, self.prompt, self.params = index, prompt, params
        self.request_id: int | None = None  # the engine's; its thread alone looks at it
        self.is_open = True
        self._receive = receive

    def put(self, item: NewToken | Exception | None) -> None:
        self._receive(self, item)


class Worker:
    """Starts the deployment in its thread, then runs it until `stop`; all methods are the event loop's.

    `attach` is the thread's too: what is to be made of a deployment before anybody is told of it.
    """

    def __init__(
        self,
        deploy: Callable[[], Deployment],
        attach: Callable[[Deployment], None],
        on_ready: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self.deployment: Deployment | None = None
        self.failure: BaseException | None = None
        self.stats = SchedulerStats(0, 0, 0, 0, 0)
        self._deploy, self._attach, self._on_ready, self._on_death = deploy, attach, on_ready, on_death
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open_requests: set[PendingRequest] = set()  # the loop's: all that something may still come for
        self._by_request_id: dict[int, PendingRequest] = {}  # the thread's: those that the engine knows
        self._new_requests: list[PendingRequest] = []  # the thread's: those that it knows since its last step
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, pending: PendingRequest) -> None:
        """Queue a request; its tokens, or an error, arrive at `pending`."""
        if self.failure is not None:
            pending.put(EngineDeadError("the engine is not running"))
            return
        self._open_requests.add(pending)
        self._inbox.put(lambda: self._submit(pending))

    def cancel(self, pending: PendingRequest) -> None:
        """Nobody wants the rest: its blocks are free again after the step that runs."""
        pending.is_open = False
        self._open_requests.discard(pending)
        self._inbox.put(lambda: self._abort(pending))

    def stop(self) -> None:
        self._inbox.put(STOP)

    def fail_all(self, error: EngineDeadError) -> None:
        """Every open answer ends with `error`; whoever waits for one cancels it."""
        for pending in list(self._open_requests):
            pending.put(error)

    # The thread.

    def _run(self) -> None:
        try:
            deployment = self._deploy()
            self._attach(deployment)
            self.deployment = deployment
            self._loop.call_soon_threadsafe(self._on_ready)
            self._serve(deployment.engine)
        except BaseException as error:
            self.failure = error
            with contextlib.suppress(RuntimeError):  # the loop may be gone by now
                self._loop.call_soon_threadsafe(self._on_engine_failure, error)

    def _serve(self, engine: Any) -> None:
        while self._process_inbox(wait=not engine.has_work):
            if not engine.has_work:
                continue
            tokens = engine.step()
            self.stats = engine.scheduler.stats
            new_requests, self._new_requests = self._new_requests, []
            if tokens or new_requests:
                outputs = [(self._by_request_id[token.request_id], token) for token in tokens]
                self._loop.call_soon_threadsafe(self._deliver, new_requests, outputs)
                for token in tokens:
                    if token.finish_reason:
                        del self._by_request_id[token.request_id]
                if any(token.queue_seconds is not None for token in tokens):
                    time.sleep(FIRST_TOKEN_SLEEP_S)

    def _process_inbox(self, wait: bool) -> bool:
        """Do what was asked since the last step; False where that is to stop."""
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if message is STOP:
                return False
            message()
            wait = False

    def _submit(self, pending: PendingRequest) -> None:
        assert self.deployment is not None
        if not pending.is_open:  # cancelled before it came here
            return
        try:
            pending.request_id = self.deployment.engine.submit(pending.prompt, pending.params)
        except TcdeployError as error:
            self._loop.call_soon_threadsafe(pending.put, error)
            return
        self._by_request_id[pending.request_id] = pending
        self._new_requests.append(pending)

    def _abort(self, pending: PendingRequest) -> None:
        assert self.deployment is not None
        if pending.request_id in self._by_request_id:  # else it has finished
            del self._by_request_id[pending.request_id]
            self._new_requests = [other for other in self._new_requests if other is not pending]
            self.deployment.engine.abort(pending.request_id)
            self.stats = self.deployment.engine.scheduler.stats

    # The event loop.

    def _deliver(self, new_requests: list[PendingRequest], outputs: list[tuple[PendingRequest, NewToken]]) -> None:
        for pending in new_requests:
            pending.put(None)
        for pending, token in outputs:
            if token.finish_reason:
                self._open_requests.discard(pending)
            pending.put(token)

    def _on_engine_failure(self, error: BaseException) -> None:
        self.fail_all(EngineDeadError(str(error) or type(error).__name__))
        self._on_death(error)


class RequestGroup:
    """The answers to one request of a client, which may be several choices to several prompts, as one stream.

    A step's tokens reach hundreds of streams at once, in a few milliseconds, so what is done for each counts: a list
    and a future, no queue and no task.
    """

    def __init__(self, worker: Worker, prompts_and_params: list[tuple[list[int], SamplingParams]]) -> None:
        self._worker = worker
        self._new_tokens: list[tuple[PendingRequest, NewToken]] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_starting = False
        self.pending_requests = [
            PendingRequest(index, *one, self._receive) for index, one in enumerate(prompts_and_params)
        ]

    async def start(self) -> None:
        """To the engine with it, and out of its way until that has made a step since; `close` must follow.

        Its thread needs Python's lock to launch a step, and would wait for whatever the loop does next.
        """
        for pending in self.pending_requests:
            self._worker.submit(pending)
        if self._failure is None:
            self._is_starting = True
            await self._wait(MAX_LAUNCH_WAIT_S)
            self._is_starting = False

    async def tokens(
        self, timeout_s: float | None = None
    ) -> AsyncGenerator[list[tuple[PendingRequest, NewToken]], None]:
        """All that has come since the last time, until all answers are complete or cancelled.

        An empty list says that nothing came for `timeout_s` seconds. Raises TcdeployError where the engine refused a
        request, EngineDeadError where it is no more.
        """
        while any(pending.is_open for pending in self.pending_requests):
            if not self._new_tokens and self._failure is None:
                await self._wait(timeout_s)
            arrived, self._new_tokens = self._new_tokens, []
            if arrived or self._failure is None:
                yield arrived
            else:
                raise self._failure

    def cancel(self, pending: PendingRequest) -> None:
        """Nobody wants the rest of this one."""
        if pending.is_open:
            self._worker.cancel(pending)

    def close(self) -> None:
        """Nobody wants the rest of any."""
        for pending in self.pending_requests:
            self.cancel(pending)

    def _receive(self, pending: PendingRequest, item: NewToken | Exception | None) -> None:
        if isinstance(item, Exception):
            self._failure = item
        elif item is not None and pending.is_open:
            self._new_tokens.append((pending, item))
        if item is not None or self._is_starting:  # later it is no news: who waits for tokens would find none
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
