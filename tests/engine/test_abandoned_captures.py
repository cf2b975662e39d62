"""Captures while idle give way to requests: between two programs, without a trace in the engine.

Runs on a CPU: a capture calls the step, as on a GPU, and its graph calls it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.schedule.step_costs import StepCosts
from tcdeploy.engine.step import step_graphs
from tcdeploy.engine.step.batch import GraphKey, StepOutput
from tcdeploy.engine.step.step_graphs import StepAbandoned, capture_graph
from tcdeploy.engine.thread import engine_thread as thread_module
from tcdeploy.engine.thread.engine_thread import EngineRequest, EngineThread
from tcdeploy.planning.plan import Plan
from tests.conftest import prepare_tiny
from tests.engine_loop import generate_tokens

SEEDED = SamplingParams(max_tokens=6, temperature=1.0, seed=7)
PROMPTS = [list(range(3, 3 + length)) for length in (20, 90, 150, 260)]


@pytest.fixture
def engine(cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Has the graphs of a start. Sizes are timed already, so that each call captures."""

    def capture_graph(step: functools.partial[StepOutput], pool: Any, is_abandonable: bool = False) -> Any:
        step()
        return SimpleNamespace(replay=lambda: step.func(step.args[0]))  # without `before_program`

    monkeypatch.setattr(step_graphs, "capture_graph", capture_graph)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "pool")
    monkeypatch.setattr(Plan, "uses_cuda_graph", lambda plan, bucket, *_: bucket.is_prefill)
    monkeypatch.setattr(StepCosts, "slow_sizes", frozenset())  # times of this machine vary
    deployed = prepare_tiny(cache_dir, shapes="dynamic", buckets=(320,), kv_blocks=100).engine
    runner, [bucket] = deployed.runner, deployed.plan.prefill_buckets
    runner.set_variant(bucket, runner.variants[bucket])
    runner.graphs.capture(bucket)
    runner.graphs.late_captures = runner.graphs.abandoned_captures = 0
    assert deployed.clock is not None
    engine = Engine(runner, deployed.clock.predictor.costs)
    engine._timed_sizes.update(range(1000))
    yield engine
    runner.set_variant(bucket, runner.variants[bucket])
    runner._prefill_buffers.clear()
    runner.graphs._needs_first_run, runner.graphs._captures_late = False, True


class StopAfter:
    """A `must_stop` that returns True from call `calls` + 1 on."""

    def __init__(self, calls: float) -> None:
        self.left, self.calls = calls, 0

    def __call__(self) -> bool:
        self.calls, self.left = self.calls + 1, self.left - 1
        return self.left < 0


def next_key(engine: Engine) -> GraphKey:
    key = engine.runner.graphs._next_key()
    assert key is not None
    return key


def calls_of_a_capture(engine: Engine) -> int:
    """How often a capture asks whether to stop: once before it, and before each program."""
    asked = StopAfter(1000)
    assert engine.capture_next_graph(asked)
    return asked.calls


def test_a_capture_stops_before_the_next_program_and_is_repeated_later(engine: Engine) -> None:
    graphs, calls = engine.runner.graphs, calls_of_a_capture(engine)
    assert calls > 2, "it asks between the programs of a step, not only before it"
    key, before = next_key(engine), len(graphs)
    for number in range(calls):
        must_stop = StopAfter(number)
        assert engine.capture_next_graph(must_stop), "it is to be called again"
        assert must_stop.calls == number + 1 and next_key(engine) == key
    assert (len(graphs), graphs.abandoned_captures, graphs.late_captures) == (before, calls, 1)
    assert engine.capture_next_graph() and key in graphs


def test_a_wanted_graph_stays_wanted_after_its_capture_was_abandoned(engine: Engine) -> None:
    graphs = engine.runner.graphs
    generate_tokens(engine, PROMPTS[:1], SamplingParams(max_tokens=1))
    [key] = graphs.wanted
    engine.capture_wanted_graph(StopAfter(2))
    assert engine.wants_graph and key not in graphs
    engine.capture_wanted_graph()
    assert not engine.wants_graph and key in graphs


def test_abandoned_captures_and_first_runs_change_no_token(engine: Engine) -> None:
    """KV cache, prefix cache, seeds and static buffers: the answers are those of an engine that captures nothing."""
    expected = generate_tokens(engine, PROMPTS, SEEDED)
    calls, graphs = calls_of_a_capture(engine), engine.runner.graphs
    for needs_first_run in (False, True):
        graphs._needs_first_run = needs_first_run
        for number in range(2 * calls if needs_first_run else calls):
            engine.capture_next_graph(StopAfter(number))
            if number % 3 == 0:
                engine.allocator.reset_prefix_cache()
            assert generate_tokens(engine, PROMPTS, SEEDED) == expected
    assert graphs._captures_late and graphs.abandoned_captures >= 2 * calls
    while engine.capture_next_graph():
        pass
    engine.allocator.reset_prefix_cache()
    assert generate_tokens(engine, PROMPTS, SEEDED) == expected


def test_the_timing_of_a_size_stops_between_two_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.clock is not None
    engine._timed_sizes.clear()
    costs, free = engine.clock.predictor.costs, engine.allocator.num_allocatable
    for steps in range(3):
        assert engine.capture_next_graph(StopAfter(steps))
        assert engine.clock.predictor.costs == costs and not engine._timed_sizes
        assert engine.allocator.num_allocatable == free
    assert engine.capture_next_graph(StopAfter(3)) and engine._timed_sizes


def test_costs_are_saved_once_when_all_sizes_are_captured_and_timed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last timings are those with which no size was left."""
    assert engine.clock is not None
    saved: list[StepCosts] = []
    engine.save_costs = saved.append
    engine._timed_sizes.clear()
    while engine.capture_next_graph():
        assert not saved
    assert not engine.capture_next_graph()
    [costs] = saved
    assert costs == engine.clock.predictor.costs
    assert costs.idle_sizes == engine.plan.step_sizes(engine.plan.prefill_buckets[0])
    engine.use_costs(costs)
    assert engine._timed_sizes == {*costs.idle_sizes} and not engine.capture_next_graph(), "nothing is timed again"
    assert len(saved) == 1


class Clock:
    """`time`, of which the test moves `monotonic`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@contextlib.contextmanager
def running(engine: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineThread]:
    """An engine thread that takes the place of a running one: the caller advances it by `advance`."""
    import time

    fake = SimpleNamespace(monotonic=clock.monotonic, perf_counter=time.perf_counter, sleep=lambda seconds: None)
    monkeypatch.setattr(thread_module, "time", fake)
    loop = asyncio.new_event_loop()

    async def make() -> EngineThread:
        return EngineThread(lambda: None, lambda _: None, lambda _: None)

    thread = loop.run_until_complete(make())
    yield thread
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def submit(thread: EngineThread, prompt: list[int], tokens: list[int]) -> EngineRequest:
    def receive(request: EngineRequest, item: Any) -> None:
        if item is not None:
            tokens.append(item.token_id)

    request = EngineRequest(0, prompt, SEEDED, receive)
    thread.submit(request)
    return request


def test_captures_begin_after_an_idle_second(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, captures = Clock(), []
    monkeypatch.setattr(engine, "capture_next_graph", lambda must_stop: captures.append(clock.now) or True)
    with running(engine, clock, monkeypatch) as thread:
        start = clock.now
        for clock.now in (start, start + 0.5, start + 0.99):
            thread._capture_if_idle(engine)
            seconds = thread._seconds_to_wait(engine)
            assert not captures and seconds == pytest.approx(start + 1.0 - clock.now)
        clock.now = start + 1.0
        assert thread._seconds_to_wait(engine) == 0.0
        thread._capture_if_idle(engine)
        assert captures == [start + 1.0]


def test_a_request_during_a_capture_ends_it_and_is_served_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request arrives before the third program of a capture; the size is captured after the next idle second."""
    expected = generate_tokens(engine, PROMPTS[1:2], SEEDED)[0]
    engine.allocator.reset_prefix_cache()
    graphs, clock, tokens, events = engine.runner.graphs, Clock(), list[int](), list[str]()
    key = next_key(engine)
    with running(engine, clock, monkeypatch) as thread:
        asked = itertools.count(1)
        has_message = thread._has_message

        def must_stop() -> bool:
            if next(asked) == 3:
                submit(thread, PROMPTS[1], tokens)
            return has_message()

        step, capture = engine.step, engine.capture_next_graph

        def noted_step() -> Any:
            events.append("step")
            return step()

        def noted_capture(must_stop: Callable[[], bool]) -> bool:
            is_left = capture(must_stop)
            events.append("captured" if key in graphs else "abandoned")
            if key in graphs:
                thread.stop()
            return is_left

        def idle_wait(engine: Any) -> float:
            if not engine.has_work:
                clock.now += 1.0  # an idle second
            return 0.0

        monkeypatch.setattr(thread, "_has_message", must_stop)
        monkeypatch.setattr(engine, "step", noted_step)
        monkeypatch.setattr(engine, "capture_next_graph", noted_capture)
        monkeypatch.setattr(thread, "_seconds_to_wait", idle_wait)
        serving = threading.Thread(target=thread._serve, args=(engine,))
        serving.start()
        serving.join(60)
        assert not serving.is_alive()
    assert events[0] == "abandoned" and events[-1] == "captured" and set(events[1:-1]) == {"step"}
    assert graphs.abandoned_captures == 1 and tokens == expected


class FakeCudaGraph:
    """Records the calls of a capture. `is_valid`: whether `capture_end` succeeds."""

    events: list[str] = []
    is_valid = True

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph

    def capture_begin(self, **_: Any) -> None:
        self.events.append("begin")

    def capture_end(self) -> None:
        self.events.append("end" if self.keep_graph else "end and instantiate")
        if not self.is_valid:
            raise RuntimeError("invalid capture")

    def instantiate(self) -> None:
        self.events.append("instantiate")


@pytest.fixture
def cuda_events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls that `capture_graph` makes."""
    stream = SimpleNamespace(wait_stream=lambda other: None, device_index=0)
    monkeypatch.setattr(FakeCudaGraph, "events", events := list[str]())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeCudaGraph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(step_graphs, "_capture_stream", lambda: stream)
    monkeypatch.setattr(step_graphs, "end_allocation", lambda pool, device: events.append("end allocation"))
    yield events


def abandon() -> Any:
    raise StepAbandoned


def test_an_abandoned_capture_is_ended_and_not_instantiated(cuda_events: list[str]) -> None:
    with pytest.raises(StepAbandoned):
        capture_graph(abandon, SimpleNamespace(id=(0, 1)), is_abandonable=True)
    assert cuda_events == ["begin", "end"]


def test_a_completed_capture_is_instantiated_before_its_first_replay(cuda_events: list[str]) -> None:
    output: Any = object()
    assert capture_graph(lambda: output, SimpleNamespace(id=(0, 1)), is_abandonable=True).output is output
    assert cuda_events == ["begin", "end", "instantiate"]


def test_an_abandoned_capture_that_cannot_be_ended_is_a_failure(
    cuda_events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pool is not used any more (test_a_failed_capture_leaves_its_pool)."""
    monkeypatch.setattr(FakeCudaGraph, "is_valid", False)
    with pytest.raises(RuntimeError, match="invalid capture"):
        capture_graph(abandon, SimpleNamespace(id=(0, 1)), is_abandonable=True)
    assert cuda_events == ["begin", "end", "end allocation"]
