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
FIRST_TOKEN_REST = 0.0002
# Seconds that a request keeps out of the engine's way at most: the next prefill is launched 0.7 ms after it came to an
# idle engine (8B on an H100), and a step that runs takes 5 to 15 ms. Whoever waits longer goes on beside the engine.
MOST_HEAD_START = 0.02
Receive: TypeAlias = "Callable[[Answer, NewToken | Exception | None], None]"


class EngineDied(Exception):
    """Nothing more will come: the engine is gone, or the server ends."""

    def __init__(self, message: str, code: str = "engine_died") -> None:
        super().__init__(message)
        self.code = code


class Answer:
    """One request of the engine, on the side of the event loop. What comes for it goes to `receive`, with its name.

    None comes when the engine has made a step since it had it; of an idle engine that is the launch of its prefill.
    """

    def __init__(self, index: int, prompt: list[int], params: SamplingParams, receive: Receive) -> None:
        self.index, self.prompt, self.params = index, prompt, params
        self.request_id: int | None = None  # the engine's; its thread alone looks at it
        self.is_open = True
        self._receive = receive

    def put(self, item: NewToken | Exception | None) -> None:
        self._receive(self, item)


class Worker:
    """Starts the deployment in its thread, then runs it until `stop`; all methods are the event loop's.

    `take_up` is the thread's too: what is to be made of a deployment before anybody is told of it.
    """

    def __init__(
        self,
        deploy: Callable[[], Deployment],
        take_up: Callable[[Deployment], None],
        on_ready: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self.deployment: Deployment | None = None
        self.failure: BaseException | None = None
        self.stats = SchedulerStats(0, 0, 0, 0, 0)
        self._deploy, self._take_up, self._on_ready, self._on_death = deploy, take_up, on_ready, on_death
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: set[Answer] = set()  # the loop's: all that something may still come for
        self._running: dict[int, Answer] = {}  # the thread's: those that the engine knows
        self._taken: list[Answer] = []  # the thread's: those that it knows since its last step
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, answer: Answer) -> None:
        """Queue a request; its tokens, or an error, arrive at `answer`."""
        if self.failure is not None:
            answer.put(EngineDied("the engine is not running"))
            return
        self._open.add(answer)
        self._inbox.put(lambda: self._submit(answer))

    def cancel(self, answer: Answer) -> None:
        """Nobody wants the rest: its blocks are free again after the step that runs."""
        answer.is_open = False
        self._open.discard(answer)
        self._inbox.put(lambda: self._abort(answer))

    def stop(self) -> None:
        self._inbox.put(STOP)

    def abandon(self, error: EngineDied) -> None:
        """Every open answer ends with `error`; whoever waits for one cancels it."""
        for answer in list(self._open):
            answer.put(error)

    # The thread.

    def _run(self) -> None:
        try:
            deployment = self._deploy()
            self._take_up(deployment)
            self.deployment = deployment
            self._loop.call_soon_threadsafe(self._on_ready)
            self._serve(deployment.engine)
        except BaseException as error:
            self.failure = error
            with contextlib.suppress(RuntimeError):  # the loop may be gone by now
                self._loop.call_soon_threadsafe(self._die, error)

    def _serve(self, engine: Any) -> None:
        while self._take(wait=not engine.has_work):
            if not engine.has_work:
                continue
            tokens = engine.step()
            self.stats = engine.scheduler.stats
            taken, self._taken = self._taken, []
            if tokens or taken:
                told = [(self._running[token.request_id], token) for token in tokens]
                self._loop.call_soon_threadsafe(self._deliver, taken, told)
                for token in tokens:
                    if token.finish_reason:
                        del self._running[token.request_id]
                if any(token.queue_seconds is not None for token in tokens):
                    time.sleep(FIRST_TOKEN_REST)

    def _take(self, wait: bool) -> bool:
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

    def _submit(self, answer: Answer) -> None:
        assert self.deployment is not None
        if not answer.is_open:  # cancelled before it came here
            return
        try:
            answer.request_id = self.deployment.engine.submit(answer.prompt, answer.params)
        except TcdeployError as error:
            self._loop.call_soon_threadsafe(answer.put, error)
            return
        self._running[answer.request_id] = answer
        self._taken.append(answer)

    def _abort(self, answer: Answer) -> None:
        assert self.deployment is not None
        if answer.request_id in self._running:  # else it has finished
            del self._running[answer.request_id]
            self._taken = [other for other in self._taken if other is not answer]
            self.deployment.engine.abort(answer.request_id)
            self.stats = self.deployment.engine.scheduler.stats

    # The event loop.

    def _deliver(self, taken: list[Answer], told: list[tuple[Answer, NewToken]]) -> None:
        for answer in taken:
            answer.put(None)
        for answer, token in told:
            if token.finish_reason:
                self._open.discard(answer)
            answer.put(token)

    def _die(self, error: BaseException) -> None:
        self.abandon(EngineDied(str(error) or type(error).__name__))
        self._on_death(error)


class Exchange:
    """The answers to one request of a client, which may be several choices to several prompts, as one stream.

    A step's tokens reach hundreds of streams at once, in a few milliseconds, so what is done for each counts: a list
    and a future, no queue and no task.
    """

    def __init__(self, worker: Worker, asked: list[tuple[list[int], SamplingParams]]) -> None:
        self._worker = worker
        self._arrived: list[tuple[Answer, NewToken]] = []
        self._failure: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._is_starting = False
        self.answers = [Answer(index, *one, self._receive) for index, one in enumerate(asked)]

    async def start(self) -> None:
        """To the engine with it, and out of its way until that has made a step since; `close` must follow.

        Its thread needs Python's lock to launch a step, and would wait for whatever the loop does next.
        """
        for answer in self.answers:
            self._worker.submit(answer)
        if self._failure is None:
            self._is_starting = True
            await self._something(MOST_HEAD_START)
            self._is_starting = False

    async def tokens(self, patience: float | None = None) -> AsyncGenerator[list[tuple[Answer, NewToken]], None]:
        """All that has come since the last time, until all answers are complete or cancelled.

        An empty list says that nothing came for `patience` seconds. Raises TcdeployError where the engine refused a
        request, EngineDied where it is no more.
        """
        while any(answer.is_open for answer in self.answers):
            if not self._arrived and self._failure is None:
                await self._something(patience)
            arrived, self._arrived = self._arrived, []
            if arrived or self._failure is None:
                yield arrived
            else:
                raise self._failure

    def cancel(self, answer: Answer) -> None:
        """Nobody wants the rest of this one."""
        if answer.is_open:
            self._worker.cancel(answer)

    def close(self) -> None:
        """Nobody wants the rest of any."""
        for answer in self.answers:
            self.cancel(answer)

    def _receive(self, answer: Answer, item: NewToken | Exception | None) -> None:
        if isinstance(item, Exception):
            self._failure = item
        elif item is not None and answer.is_open:
            self._arrived.append((answer, item))
        if item is not None or self._is_starting:  # later it is no news: who waits for tokens would find none
            self._wake()

    async def _something(self, patience: float | None) -> None:
        """Return when something has arrived, or after `patience` seconds."""
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        timer = None if patience is None else loop.call_later(patience, self._wake)
        try:
            await self._waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
