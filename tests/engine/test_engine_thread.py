"""The engine thread with a fake engine: what it delivers to the event loop, and when each side yields the GIL."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.schedule.sequence import NewToken, SamplingParams
from tcdeploy.engine.step.launch_timer import LaunchLock
from tcdeploy.engine.thread import engine_thread as thread_module
from tcdeploy.engine.thread import request_group as group_module
from tcdeploy.engine.thread.engine_thread import EngineRequest, EngineThread
from tcdeploy.engine.thread.request_group import RequestGroup


class FakeEngine:
    """Generates three tokens per request; the first has `queue_seconds`.

    Like the real engine, a step returns the tokens of the step before, so a request's first step returns none.
    """

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(stats=None)
        self.launch_lock = LaunchLock()
        self.steps = threading.Semaphore(100)  # steps that may run
        self.launch_due: float | None = None
        self.started_at: list[tuple[float, int]] = []  # time.perf_counter and number of open requests at each step
        self.graphs_left = 0
        self.wants_graph = False
        self.captured_at: list[float] = []  # graphs captured under load
        self._num_steps: dict[int, int] = {}  # by request id

    @property
    def has_work(self) -> bool:
        return bool(self._num_steps)

    def capture_next_graph(self, must_stop: Callable[[], bool]) -> bool:
        assert not self.has_work
        self.graphs_left -= 1
        return self.graphs_left > 0

    def capture_wanted_graph(self, must_stop: Callable[[], bool] = lambda: False) -> None:
        assert self.wants_graph
        self.captured_at.append(time.monotonic())

    def submit(self, prompt: list[int], params: SamplingParams, group: int | None) -> int:
        self._num_steps[len(self._num_steps)] = -1
        return len(self._num_steps) - 1

    def step(self) -> list[NewToken]:
        self.started_at.append((time.perf_counter(), len(self._num_steps)))
        assert self.steps.acquire(timeout=60)
        tokens = []
        for request_id in list(self._num_steps):
            self._num_steps[request_id] += 1
            number = self._num_steps[request_id]
            if number == 0:
                continue
            tokens.append(
                NewToken(
                    request_id=request_id, token_id=number, finish_reason="length" if number == 3 else "",
                    queue_seconds=0.0 if number == 1 else None,
                )
            )  # fmt: skip
            if number == 3:
                del self._num_steps[request_id]
        return tokens


@contextlib.asynccontextmanager
async def request_group(engine: FakeEngine) -> AsyncIterator[RequestGroup]:
    """A request to a running engine thread, not yet submitted. The thread must stop without an error."""
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    deployment: Any = SimpleNamespace(engine=engine)
    engine_thread = EngineThread(lambda: deployment, lambda _: ready.set_result(None), ready.set_exception)
    engine_thread.start()
    await ready
    try:
        yield RequestGroup(engine_thread, [([7], SamplingParams(max_tokens=3))])
    finally:
        engine.steps.release(100)
        engine_thread.stop()
        engine_thread._thread.join(10)
    assert engine_thread.failure is None and not engine_thread._thread.is_alive()


async def wait_until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):  # on a busy machine
        while not condition():
            await asyncio.sleep(0.01)


async def collect_tokens(group: RequestGroup) -> list[int]:
    token_ids = []
    async for arrived in group.tokens():
        assert arrived, "an empty batch would send a keep-alive"
        for engine_request, token in arrived:
            token_ids.append(token.token_id)
            engine_request.is_open = not token.finish_reason
    return token_ids


def test_the_thread_sleeps_after_first_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float] = []
    clock = SimpleNamespace(sleep=sleeps.append, perf_counter=time.perf_counter, monotonic=time.monotonic)
    monkeypatch.setattr(thread_module, "time", clock)

    async def run() -> list[int]:
        async with request_group(FakeEngine()) as group:
            await group.start()
            return await collect_tokens(group)

    assert asyncio.run(run()) == [1, 2, 3]
    assert sleeps == [thread_module.FIRST_TOKEN_SLEEP_S]


def test_a_request_that_arrives_before_the_next_launch_is_due_takes_part_in_that_step() -> None:
    engine = FakeEngine()

    async def run() -> None:
        async with request_group(engine) as first:
            due = engine.launch_due = time.perf_counter() + 2.0
            engine_thread = first._engine_thread
            engine_thread.submit(EngineRequest(0, [7], SamplingParams(max_tokens=3), lambda *_: None))
            await asyncio.sleep(0.3)
            engine_thread.submit(EngineRequest(1, [8], SamplingParams(max_tokens=3), lambda *_: None))
            await wait_until(lambda: engine.started_at)
            begun, num_open = engine.started_at[0]
            assert begun >= due and num_open == 2

    asyncio.run(run())


def test_a_stop_does_not_wait_for_the_next_launch() -> None:
    engine = FakeEngine()

    async def run() -> None:
        async with request_group(engine) as group:
            engine.launch_due = time.perf_counter() + 30
            group._engine_thread.submit(EngineRequest(0, [7], SamplingParams(max_tokens=3), lambda *_: None))

    start = time.perf_counter()
    asyncio.run(run())
    assert time.perf_counter() - start < 10 and not engine.started_at


def test_a_closed_group_is_freed_without_a_garbage_collection() -> None:
    """Its requests hold prompts, and a collection that frees many of them at once blocks the event loop."""

    async def run() -> None:
        async with request_group(FakeEngine()) as group:
            other = RequestGroup(group._engine_thread, [([7], SamplingParams(max_tokens=3))])
            await other.start()
            assert await collect_tokens(other)
            other.close()
            is_alive = weakref.ref(other)
            del other
            await wait_until(lambda: is_alive() is None)  # the engine thread handles the cancellation

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_start_waits_until_a_step_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "MAX_LAUNCH_WAIT_S", 60.0)

    async def run() -> list[int]:
        engine = FakeEngine()
        engine.steps = threading.Semaphore(0)
        async with request_group(engine) as group:
            starting = asyncio.create_task(group.start())
            await asyncio.sleep(0.05)
            assert not starting.done()
            engine.steps.release(4)
            await asyncio.wait_for(starting, 30)  # well below 60 s
            return await collect_tokens(group)

    assert asyncio.run(run()) == [1, 2, 3]


def test_start_gives_up_after_the_longest_wait_and_a_late_launch_wakes_no_reader() -> None:
    async def run() -> list[int]:
        engine = FakeEngine()
        engine.steps = threading.Semaphore(0)
        async with request_group(engine) as group:
            await asyncio.wait_for(group.start(), 30)
            reading = asyncio.create_task(collect_tokens(group))
            engine.steps.release()  # the launch, after `start` has returned
            await asyncio.sleep(0.05)
            assert not reading.done()
            engine.steps.release(3)
            return await reading

    assert asyncio.run(run()) == [1, 2, 3]


def test_graphs_are_captured_while_no_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the request is submitted, no idle time has to pass before a capture: only an open request prevents it."""
    monkeypatch.setattr(thread_module, "CAPTURE_AFTER_IDLE_S", 60.0)

    while_open: list[int] = []  # graphs left at each step

    class EngineWithGraphs(FakeEngine):
        def submit(self, prompt: list[int], params: SamplingParams, group: int | None) -> int:
            monkeypatch.setattr(thread_module, "CAPTURE_AFTER_IDLE_S", 0.0)
            return super().submit(prompt, params, group)

        def step(self) -> list[NewToken]:
            while_open.append(self.graphs_left)
            return super().step()

    engine = EngineWithGraphs()
    engine.graphs_left = 3

    async def run() -> None:
        async with request_group(engine) as group:
            async with asyncio.timeout(30):
                await group.start()
                await collect_tokens(group)
            await wait_until(lambda: engine.graphs_left <= 0)
            await asyncio.sleep(0.1)

    asyncio.run(run())
    assert (while_open, engine.graphs_left) == ([3] * 4, 0), "and it stops when none is left"


def run_requests(engine: FakeEngine, gaps: tuple[float, ...], until: Callable[[], Any] = lambda: False) -> list[float]:
    """Run requests one after another, each after a pause of `gaps` seconds, or until `until` is true.

    Returns the time at which each was sent.
    """
    sent_at: list[float] = []
    engine.steps = threading.Semaphore(4 * len(gaps))

    async def run() -> None:
        async with request_group(engine) as first:
            for number, gap in enumerate(gaps):
                await asyncio.sleep(gap)
                group = RequestGroup(first._engine_thread, [([7], SamplingParams(max_tokens=3))]) if number else first
                sent_at.append(time.monotonic())
                async with asyncio.timeout(30):
                    await group.start()
                    await collect_tokens(group)
                if until():
                    break

    asyncio.run(run())
    return sent_at


def test_under_load_a_wanted_graph_is_captured_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "CAPTURE_INTERVAL_S", 0.2)
    monkeypatch.setattr(thread_module, "CAPTURE_AFTER_IDLE_S", 60.0)  # the gaps below are load
    engine = FakeEngine()
    engine.wants_graph = True
    sent_at = run_requests(engine, (0.01,) * 60)
    intervals = [after - before for before, after in itertools.pairwise(engine.captured_at)]
    assert min(intervals) >= 0.2
    assert 2 <= len(engine.captured_at) <= (sent_at[-1] - sent_at[0]) / 0.2 + 1


def test_a_graph_that_is_not_wanted_is_not_captured_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "CAPTURE_INTERVAL_S", 0.0)
    engine = FakeEngine()
    run_requests(engine, (0.01,) * 5)
    assert not engine.captured_at


def test_after_an_idle_time_the_interval_begins_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "CAPTURE_INTERVAL_S", 1.0)
    monkeypatch.setattr(thread_module, "CAPTURE_AFTER_IDLE_S", 0.4)
    engine = FakeEngine()
    engine.wants_graph = True
    run_requests(engine, (0.5, 0.5, 0.5))
    assert not engine.captured_at, "each request follows an idle time, when graphs could be captured"
    # The load lasts until it had no gap of CAPTURE_AFTER_IDLE_S for a whole interval, which a busy machine may delay.
    sent_at = run_requests(engine, (0.5, *(0.02,) * 3000), until=lambda: engine.captured_at)
    assert engine.captured_at[0] >= sent_at[0] + 1.0


def test_the_event_loop_waits_while_a_step_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread launches a step when a request is submitted, and when its tokens have arrived."""
    monkeypatch.setattr(group_module, "MAX_YIELD_S", 60.0)

    async def run() -> list[bool]:
        engine, waited = FakeEngine(), []
        async with request_group(engine) as group:
            with launch_of(engine, 0.05) as is_complete:
                await group.start()
                waited.append(is_complete())
            tokens = group.tokens()
            with launch_of(engine, 0.05) as is_complete:
                await anext(tokens)
                waited.append(is_complete())
            group.close()
            await tokens.aclose()
        return waited

    assert asyncio.run(run()) == [True, True]


@contextlib.contextmanager
def launch_of(engine: FakeEngine, seconds: float) -> Iterator[Callable[[], bool]]:
    """A thread launches a step for `seconds`. Yields whether the launch is complete."""
    has_begun, is_complete = threading.Event(), threading.Event()

    def launch() -> None:
        with engine.launch_lock:
            has_begun.set()
            time.sleep(seconds)
            is_complete.set()

    thread = threading.Thread(target=launch)
    thread.start()
    assert has_begun.wait(60)
    yield is_complete.is_set
    thread.join()


class FakeSwaps:
    """Three buckets, of which each takes 0.05 s to replace. Programs are there after `polls` calls."""

    def __init__(self, polls: int = 0) -> None:
        self.polls, self.left = polls, 3
        self.spans: list[tuple[float, float]] = []  # start and end of each call that replaced a bucket

    @property
    def is_finished(self) -> bool:
        return not self.left

    is_warm = is_finished

    def advance(self, engine: Any) -> bool:
        if self.polls:
            self.polls -= 1
            return False
        start = time.monotonic()
        time.sleep(0.05)
        self.spans.append((start, time.monotonic()))
        self.left -= 1
        return True


class BusyEngine(FakeEngine):
    """Always has a request, until the test ends."""

    is_busy = True

    @property
    def has_work(self) -> bool:
        return self.is_busy

    def step(self) -> list[NewToken]:
        time.sleep(0.005)
        return []


async def run_swaps(engine: FakeEngine, swaps: Any, finish: Callable[[], None] = lambda: None) -> list[float]:
    """Replace all buckets, call `finish`, and return the times at which the thread reported a warm server."""
    reports: list[float] = []

    def report() -> None:
        reports.append(time.monotonic())
        engine.graphs_left = 3  # before each capture, the thread could report again

    async with request_group(engine) as group:
        engine_thread = group._engine_thread
        engine_thread._inbox.put(lambda _: engine_thread.start_swaps(swaps, report))
        await wait_until(lambda: not swaps.left)
        await asyncio.sleep(0.1)
        finish()
        await wait_until(lambda: reports and (not engine.graphs_left or len(reports) > 1))
    return reports


def gaps(swaps: FakeSwaps) -> list[float]:
    return [start - end for (_, end), (start, _) in itertools.pairwise(swaps.spans)]


def test_under_load_requests_have_at_least_half_of_the_time_between_swaps() -> None:
    engine, swaps, ended = BusyEngine(), FakeSwaps(), []

    def finish() -> None:
        ended.append(time.monotonic())
        engine.is_busy = False

    reports = asyncio.run(run_swaps(engine, swaps, finish))
    assert all(gap >= 0.05 for gap in gaps(swaps)), gaps(swaps)
    assert len(reports) == 1 and reports[0] > ended[0], "the report waits until the engine is idle"


def test_an_idle_engine_replaces_one_bucket_after_another() -> None:
    """In the best of three attempts, because other tests use the CPU too."""
    for attempt in range(3):
        swaps = FakeSwaps(polls=2)
        reports = asyncio.run(run_swaps(FakeEngine(), swaps))
        if all(gap < 0.05 for gap in gaps(swaps)):
            break
        assert attempt < 2, gaps(swaps)
    assert len(reports) == 1 and reports[0] > swaps.spans[-1][1]
