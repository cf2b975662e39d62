"""Runs the engine in a thread, and passes requests and tokens between the event loop and that thread.

The engine is not thread-safe, so only this thread calls it. Requests and cancellations enter through a queue, which
the thread reads until the next step is due (engine/step/launch_timer.py). The tokens of a step leave in one callback of
the event loop. After a second without a request, the thread captures and times the remaining CUDA graphs
(engine/step/step_graphs.py), one at a time, and abandons a capture when a message arrives. It also runs the canary, and
reads the queue after each of its steps. After an eager start it also replaces eager steps by programs, one bucket at a
time (start/eager.py). An exception in a step is fatal, because the state of the device is unknown afterwards: every
open request fails with EngineDeadError, and no more are accepted.

The server (server/model_server.py) and `AsyncLLM` (llm/async_llm.py) run the engine by this thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from tcdeploy.engine.schedule.scheduler import SchedulerStats
from tcdeploy.engine.schedule.sequence import NewToken, SamplingParams
from tcdeploy.engine.step.launch_timer import LaunchLock
from tcdeploy.engine.thread.canary_schedule import CanarySchedule
from tcdeploy.errors import EngineDeadError, TcdeployError

if TYPE_CHECKING:  # importing torch takes seconds; a server's socket answers before
    from tcdeploy.engine.engine import Engine
    from tcdeploy.start.eager import ProgramSwaps

STOP = None  # inbox message that ends the thread
# An idle capture delays a request until the program that it is launching is launched; a timing delays it by one step.
# Requests that follow each other more closely than this are delayed by neither.
CAPTURE_AFTER_IDLE_S = 1.0
CAPTURE_INTERVAL_S = 5.0  # under load; such rare pauses do not affect the 99th percentile of gaps between tokens
SWAP_POLL_S = 0.25  # between two looks at the process that compiles programs
FIRST_TOKEN_SLEEP_S = 0.0002  # releases the GIL: the event loop sends first tokens at once, not up to 5 ms later
MAX_IDLE_WAIT_S = 3600.0  # queue.get raises OverflowError for very long timeouts
ReceiveCallback: TypeAlias = "Callable[[EngineRequest, NewToken | Exception | None], None]"


class EngineRequest:
    """The event loop's handle for one engine request: number `index` of a RequestGroup. `receive` is called with each
    new token, with an exception, and with None when the engine has made its first step after accepting the request.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        receive: ReceiveCallback,
        group_id: int | None = None,
    ) -> None:
        self.index, self.prompt, self.params, self.group_id = index, prompt, params, group_id
        self.request_id: int | None = None  # the engine's id; used by the engine thread only
        self.is_open = True
        self._receive = receive

    def deliver(self, item: NewToken | Exception | None) -> None:
        self._receive(self, item)

    def close(self) -> None:
        """Ignore all further items. Also breaks the reference cycle with the owner of `receive`."""
        self._receive = lambda request, item: None


class EngineThread:
    """The engine thread. All public methods are called from the event loop. `load` runs in the thread; its result goes
    to `on_loaded`, and its attribute `engine` runs until `stop`. `on_loaded` and `on_death` are called on the event
    loop; `on_death` also if `load` raises.
    """

    def __init__(
        self, load: Callable[[], Any], on_loaded: Callable[[Any], None], on_death: Callable[[BaseException], None]
    ) -> None:
        self.failure: BaseException | None = None
        self._stop_error: Exception | None = None  # for requests after `stop`
        self.stats = SchedulerStats(0, 0, 0, 0, 0)
        self.canary: CanarySchedule | None = None  # assigned by `load`, in the thread
        self.swaps: ProgramSwaps | None = None  # assigned by `load`, in the thread; None unless the start is eager
        self.launch_lock = LaunchLock()  # the engine's, once it is loaded
        self._load, self._on_loaded, self._on_death = load, on_loaded, on_death
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._open_requests: set[EngineRequest] = set()  # event loop: requests that may still receive tokens
        self._by_request_id: dict[int, EngineRequest] = {}  # thread: requests in the engine
        self._new_requests: list[EngineRequest] = []  # thread: submitted since the last step
        self._captures_when_idle = True  # thread: whether graphs are left
        self._busy_at = time.monotonic()  # thread: when the engine last had work
        self._capture_due_at = self._busy_at + CAPTURE_INTERVAL_S  # thread: when a graph may be captured under load
        self._swap_due_at = 0.0  # thread: when `swaps` may advance
        self._when_warm: Callable[[], None] | None = None  # thread: called once, when the engine is idle
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def start_swaps(self, swaps: ProgramSwaps, when_warm: Callable[[], None]) -> None:
        """Called by `load`. `when_warm` is called in the thread, once all buckets run programs and it is idle."""
        self.swaps, self._when_warm = swaps, when_warm

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Its tokens, or an error, arrive at `request`."""
        if self.failure is not None or self._stop_error is not None:
            request.deliver(self._stop_error or EngineDeadError("the engine is not running"))
            return
        self._open_requests.add(request)
        self._inbox.put(lambda engine: self._submit(engine, request))

    def cancel(self, request: EngineRequest) -> None:
        """Abort a request. Its KV blocks are free after the current step."""
        request.is_open = False
        self._open_requests.discard(request)
        self._inbox.put(lambda engine: self._abort(engine, request))

    def stop(self, error: Exception | None = None) -> None:
        """End the thread after its present step. Later requests get `error`."""
        self._stop_error = error or EngineDeadError("the engine has stopped")
        self._inbox.put(STOP)

    def join(self) -> None:
        """Wait until the thread has ended. Blocks."""
        self._thread.join()

    def fail_all(self, error: Exception) -> None:
        """Deliver `error` to every open request. Their owners cancel them."""
        for request in list(self._open_requests):
            request.deliver(error)

    # Engine thread

    def _run(self) -> None:
        try:
            loaded = self._load()
            self.launch_lock = loaded.engine.launch_lock
            self._loop.call_soon_threadsafe(self._on_loaded, loaded)
            self._busy_at = time.monotonic()
            self._serve(loaded.engine)
        except BaseException as error:
            self.failure = error
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._on_engine_failure, error)

    def _serve(self, engine: Any) -> None:
        while self._process_inbox(engine):
            self._swap_if_due(engine)
            canary = self.canary
            if not engine.has_work:
                self._report_warm()
                self._capture_if_idle(engine)
                if canary is not None:
                    canary.run_step_if_due()
                continue
            if canary is not None:
                canary.interrupt()
            self._note_start_of_load()
            tokens = engine.step()
            self._busy_at = time.monotonic()
            self.stats = engine.scheduler.stats
            new_requests, self._new_requests = self._new_requests, []
            if tokens or new_requests:
                outputs = [(self._by_request_id[token.request_id], token) for token in tokens]
                self._loop.call_soon_threadsafe(self._deliver, new_requests, outputs)
                for token in tokens:
                    if token.finish_reason:
                        del self._by_request_id[token.request_id]
                if any(token.queue_seconds is not None for token in tokens):  # the first token of a request
                    time.sleep(FIRST_TOKEN_SLEEP_S)
            self._capture_if_due(engine)

    @property
    def _is_swapping(self) -> bool:
        return self.swaps is not None and not self.swaps.is_finished

    def _swap_if_due(self, engine: Engine) -> None:
        if self.swaps is None or self.swaps.is_finished or time.monotonic() < self._swap_due_at:
            return
        start = time.monotonic()
        has_delayed = self.swaps.advance(engine)
        self.stats = engine.scheduler.stats
        now = time.monotonic()
        self._swap_due_at = now + SWAP_POLL_S if not has_delayed else now + (now - start) * engine.has_work
        self._captures_when_idle = True  # of the buckets that have just been captured

    def _report_warm(self) -> None:
        if self._when_warm is not None and self.swaps is not None and self.swaps.is_warm:
            when_warm, self._when_warm = self._when_warm, None
            when_warm()

    def _note_start_of_load(self) -> None:
        """After an idle time, in which graphs may have been captured, restart the interval of captures under load."""
        now = time.monotonic()
        if now - self._busy_at >= CAPTURE_AFTER_IDLE_S:
            self._capture_due_at = now + CAPTURE_INTERVAL_S

    def _capture_if_due(self, engine: Engine) -> None:
        """Capture a CUDA graph that steps would use, at most one every CAPTURE_INTERVAL_S.

        Between two requests, the capture is abandoned when a message arrives. While requests run, it completes:
        otherwise it would be abandoned each time if requests arrive at shorter intervals than it takes.
        """
        if self._busy_at >= self._capture_due_at and engine.wants_graph:
            if engine.has_work:
                engine.capture_wanted_graph()
            else:
                engine.capture_wanted_graph(self._has_message)
            self._capture_due_at = time.monotonic() + CAPTURE_INTERVAL_S

    def _capture_if_idle(self, engine: Engine) -> None:
        """Capture or time one CUDA graph, unless there was a request just now or a case of the canary is running."""
        is_taken = self._is_swapping or (self.canary and self.canary.is_running)
        if self._captures_when_idle and not is_taken and time.monotonic() >= self._busy_at + CAPTURE_AFTER_IDLE_S:
            self._captures_when_idle = engine.capture_next_graph(self._has_message)

    def _has_message(self) -> bool:
        return not self._inbox.empty()

    def _process_inbox(self, engine: Engine) -> bool:
        """Process messages until the next step, a capture or the canary is due, or a request arrives. False: stop."""
        while True:
            try:
                message = self._inbox.get(timeout=self._seconds_to_wait(engine))
            except queue.Empty:
                return True
            if message is STOP:
                return False
            message(engine)

    def _seconds_to_wait(self, engine: Engine) -> float | None:
        """Seconds to wait for the next message. None: no limit."""
        if engine.has_work:
            return 0.0 if engine.launch_due is None else max(0.0, engine.launch_due - time.perf_counter())
        timeouts = []
        if self.canary:
            timeouts.append(min(self.canary.seconds_until_due(), MAX_IDLE_WAIT_S))
        if self._is_swapping:
            timeouts.append(max(0.0, self._swap_due_at - time.monotonic()))
        elif self._captures_when_idle:
            timeouts.append(max(0.0, self._busy_at + CAPTURE_AFTER_IDLE_S - time.monotonic()))
        return min(timeouts, default=None)

    def _submit(self, engine: Engine, request: EngineRequest) -> None:
        if not request.is_open:  # cancelled meanwhile
            return
        try:
            request.request_id = engine.submit(request.prompt, request.params, request.group_id)
        except TcdeployError as error:
            self._loop.call_soon_threadsafe(request.deliver, error)
            return
        self._by_request_id[request.request_id] = request
        self._new_requests.append(request)

    def _abort(self, engine: Engine, request: EngineRequest) -> None:
        if request.request_id in self._by_request_id:  # else it has finished
            del self._by_request_id[request.request_id]
            self._new_requests = [other for other in self._new_requests if other is not request]
            engine.abort(request.request_id)
            self.stats = engine.scheduler.stats

    # Event loop

    def _deliver(self, new_requests: list[EngineRequest], outputs: list[tuple[EngineRequest, NewToken]]) -> None:
        for request in new_requests:
            request.deliver(None)
        for request, token in outputs:
            if token.finish_reason:
                self._open_requests.discard(request)
            request.deliver(token)

    def _on_engine_failure(self, error: BaseException) -> None:
        self.fail_all(EngineDeadError(str(error) or type(error).__name__))
        self._on_death(error)
