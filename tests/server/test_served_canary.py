"""The canary of a server: when it runs, what it reports, and that it leaves requests alone."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.thread import canary_schedule as canary_module
from tcdeploy.engine.thread.canary_schedule import CanarySchedule
from tcdeploy.engine.thread.engine_thread import EngineThread
from tcdeploy.engine.thread.request_group import RequestGroup
from tests.conftest import TINY, RunCLI
from tests.engine.test_engine_thread import FakeEngine, collect_tokens
from tests.server.conftest import FLAGS, ServerProcess, start_cli, wait_for, without_model

# Flips the highest exponent bit of one weight of a layer, once the file exists.
FLIP_A_BIT = """
import pathlib, threading, time, torch
from tcdeploy.engine.check import canary
init = canary.Canary.__init__
def init_and_watch(self, engine):
    init(self, engine)
    def flip():
        while not pathlib.Path({path!r}).exists():
            time.sleep(0.01)
        weight = engine.runner.model.model.layers[1].mlp.down_proj.weight
        weight.data.view(torch.int32)[37, 11] ^= 1 << 30
    threading.Thread(target=flip, daemon=True).start()
canary.Canary.__init__ = init_and_watch
"""


class FakeCanary:
    """Cases of two steps. `differences` are the results of the next cases."""

    num_steps = 0

    def __init__(self, num_cases: int = 3, num_unrecorded: int = 0) -> None:
        self.cases, self.ran, self.closed = list(range(num_cases)), [], 0  # type: ignore[var-annotated]
        self.unrecorded = list(range(num_cases, num_cases + num_unrecorded))
        self.differences: list[str | None] = []
        self.unrepeatable: list[str] = []

    def record_next(self) -> Generator[None, None, str | None]:
        difference = yield from self.check(self.unrecorded[0])
        number = self.unrecorded.pop(0)
        if difference:
            self.unrepeatable.append(difference)
        else:
            self.cases.append(number)
        return difference

    def check(self, number: int) -> Generator[None, None, str | None]:
        try:
            for _ in range(2):
                self.num_steps += 1
                yield
        except GeneratorExit:
            self.closed += 1
            raise
        self.ran.append(number)
        return self.differences.pop(0) if self.differences else None


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        fake = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(canary_module, "time", fake)


def run_until_not_due(schedule: CanarySchedule) -> None:
    for _ in range(100):
        if schedule.seconds_until_due():
            return
        schedule.run_step_if_due()
    raise AssertionError("the canary is always due")


def make_schedule(canary: FakeCanary, interval: float) -> CanarySchedule:
    """Of cases that are recorded."""
    num_cases, canary.cases = len(canary.cases), []
    canary.unrecorded = list(range(num_cases))
    unchecked: Any = canary
    schedule = CanarySchedule(unchecked, interval)
    if num_cases:
        schedule.record()
    canary.num_steps, canary.ran = 0, []
    return schedule


def test_a_round_runs_every_case_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, canary = Clock(monkeypatch), FakeCanary()
    schedule = make_schedule(canary, 600)
    assert schedule.seconds_until_due() == 600
    schedule.run_step_if_due()
    assert canary.num_steps == 0, "not due"
    for number in (1, 2):
        clock.now += 600
        run_until_not_due(schedule)
        assert canary.ran == [0, 1, 2] * number and schedule.stats.rounds == number
        assert schedule.seconds_until_due() == 600, "counted from the end of the round"
    assert schedule.stats.last_success == clock.now and schedule.stats.steps == 12


def test_an_interrupted_round_continues_with_the_same_case(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, canary = Clock(monkeypatch), FakeCanary()
    schedule = make_schedule(canary, 600)
    clock.now += 600
    for _ in range(4):  # ends case 0 and starts case 1
        schedule.run_step_if_due()
    schedule.interrupt()
    assert canary.closed == 1 and canary.ran == [0]
    assert schedule.seconds_until_due() == pytest.approx(canary_module.IDLE_S), "gaps between requests are not used"
    clock.now += 2 * canary_module.IDLE_S
    run_until_not_due(schedule)
    assert canary.ran == [0, 1, 2] and schedule.stats.rounds == 1


def test_a_difference_is_counted_and_logged_and_the_last_success_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, canary = Clock(monkeypatch), FakeCanary()
    schedule = make_schedule(canary, 600)
    canary.differences = [None, "token 5 instead of 4"]
    clock.now += 600
    with caplog.at_level(logging.ERROR, "tcdeploy.engine"):
        run_until_not_due(schedule)
    assert (schedule.stats.rounds, schedule.stats.failures, schedule.stats.last_success) == (1, 1, 1000)
    assert "canary failed: token 5 instead of 4" in caplog.text
    clock.now += 600
    run_until_not_due(schedule)
    assert (schedule.stats.rounds, schedule.stats.failures, schedule.stats.last_success) == (2, 1, clock.now)


def test_cases_are_recorded_after_a_second_without_requests_in_the_first_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, canary = Clock(monkeypatch), FakeCanary(0, num_unrecorded=3)
    unchecked: Any = canary
    schedule = CanarySchedule(unchecked, 600)
    for _ in range(100):  # requests in the first half minute
        clock.now += 0.3
        assert schedule.seconds_until_due() > 0
        schedule.interrupt()
    assert schedule.seconds_until_due() == pytest.approx(1)
    clock.now += 31
    schedule.interrupt()
    assert schedule.seconds_until_due() == pytest.approx(canary_module.IDLE_S), "a server that is seldom idle for long"
    clock.now += 0.2
    for _ in range(4):  # ends case 0 and starts case 1
        schedule.run_step_if_due()
    schedule.interrupt()
    assert canary.closed == 1 and schedule.stats.cases_used == 1 and schedule.stats.last_success == 0
    canary.differences = ["token 5 instead of 4"]
    clock.now += 0.2
    run_until_not_due(schedule)
    assert (schedule.stats.cases_used, schedule.stats.cases_not_repeatable, schedule.stats.rounds) == (2, 1, 0)
    assert "two runs differ: token 5 instead of 4" in caplog.text
    assert schedule.stats.last_success == clock.now and schedule.seconds_until_due() == 600


def test_nothing_is_due_without_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    schedule = make_schedule(FakeCanary(0), 0.001)
    assert schedule.seconds_until_due() == float("inf")


NOISE = """
import itertools
from tcdeploy.engine.step.runner import ModelRunner
logits, calls, record = ModelRunner._logits, itertools.count(), {canary}.Canary.record_next
def noisy(self, buffers, *arguments):
    noise = 0.01 * next(calls) if buffers.bucket.name in {buckets} else 0
    return logits(self, buffers, *arguments) * (1 + noise)
def record_with_noise(self):
    ModelRunner._logits = noisy
    try:
        return (yield from record(self))
    finally:
        ModelRunner._logits = logits
{canary}.Canary.record_next = record_with_noise
"""


def noise_in(*buckets: str) -> str:
    """Makes the results of these buckets differ from run to run while the canary is recorded."""
    return "from tcdeploy.engine.check import canary" + NOISE.format(canary="canary", buckets=buckets)


def test_cases_that_are_not_repeatable_are_counted(serve: Callable[..., Any]) -> None:
    with serve("--canary-strict", script=noise_in("decode:4")) as server:
        assert server.metric("canary_cases", state="used") == 4
        assert server.metric("canary_cases", state="not_repeatable") == 1
        assert httpx.get(f"{server.address}/health").status_code == 200


ALL_BUCKETS = ("prefill:32", "prefill:128", "decode:1", "decode:4")


def test_a_server_whose_canary_has_no_case_starts(serve: Callable[..., Any]) -> None:
    with serve(script=noise_in(*ALL_BUCKETS)) as server:
        wait_for(lambda: server.metric("canary_cases", state="not_repeatable") == 5)
        assert server.metric("canary_cases", state="used") == 0
        assert server.metric("canary_last_success_timestamp_seconds") == 0


@pytest.mark.long  # compiles a plan of its own
def test_a_strict_server_whose_canary_has_no_case_does_not_start(tmp_path: Path, warm_cache: Path) -> None:
    flags = (*FLAGS, "--cache-dir", str(warm_cache), "--canary-strict")
    process: Any = start_cli(tmp_path, "serve", TINY, *flags, script=noise_in(*ALL_BUCKETS))
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1 and "ready: " not in stdout and "Traceback" not in stderr
    assert "error: --canary-strict has nothing to check: the two runs of each case differ" in stderr
    assert "hint: find the operation that is not deterministic" in stderr


def test_the_thread_runs_no_canary_while_a_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval of 0 s between rounds: the thread of an idle engine does nothing else, and still takes requests."""
    monkeypatch.setattr(canary_module, "IDLE_S", 0.0)
    engine = FakeEngine()

    class StrictCanary(FakeCanary):
        def check(self, number: int) -> Generator[None, None, str | None]:
            for item in super().check(number):
                assert not engine.has_work
                time.sleep(0.001)
                yield item
            return None

    canary: Any = StrictCanary()

    async def run() -> list[list[int]]:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def load() -> Any:
            engine_thread.canary = CanarySchedule(canary, 1e-9)
            return SimpleNamespace(engine=engine)

        engine_thread = EngineThread(load, lambda _: ready.set_result(None), ready.set_exception)
        engine_thread.start()
        await ready
        outputs = []
        for _ in range(20):
            await asyncio.sleep(0.01)
            group = RequestGroup(engine_thread, [([7], SamplingParams(max_tokens=3))])
            await group.start()
            outputs.append(await collect_tokens(group))
        engine_thread.stop()
        engine_thread._thread.join(10)
        assert engine_thread.failure is None and not engine_thread._thread.is_alive(), (
            "a running canary does not delay `stop`"
        )
        return outputs

    assert asyncio.run(run()) == [[1, 2, 3]] * 20
    assert canary.num_steps > 20


def sample(server: ServerProcess, *names: str) -> list[float]:
    """Several samples of one scrape."""
    values = dict(without_model(line).rsplit(" ", 1) for line in server._metric_lines() if not line.startswith("#"))
    return [float(values[f"tcdeploy:{name}{{}}"]) for name in names]


def complete(server: ServerProcess, number: int) -> Any:
    body = {"prompt": [20 + number * 7, 30, 40 + number], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.address}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]


def test_canaries_change_neither_tokens_nor_the_metrics_of_requests(serve: Callable[..., Any]) -> None:
    with serve("--canary-interval", "0") as server:
        alone = [complete(server, number) for number in range(12)]
        steps = server.steps
        assert server.metric("canary_steps_total") == 0
    with serve("--canary-interval", "0.001") as server:
        wait_for(lambda: server.metric("canary_runs_total") >= 2)
        assert server.metric("canary_cases", state="used") == 5
        recorded = server.metric("canary_steps_total")
        assert [complete(server, number) for number in range(12)] == alone
        assert server.steps == steps, "the canary is in no metric of buckets"
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda number: complete(server, number), range(12))) == alone
        runs = server.metric("canary_runs_total")
        wait_for(lambda: server.metric("canary_runs_total") >= runs + 2)
        assert server.metric("canary_steps_total") > recorded
        assert server.metric("generation_tokens_total") == 2 * 12 * 24
        assert server.metric("kv_cache_usage_perc") == server.metric("num_requests_running") == 0
        assert server.metric("canary_failures_total") == server.metric("recompiles_total") == 0
        assert abs(server.metric("canary_last_success_timestamp_seconds") - time.time()) < 60


def test_no_canary_runs_while_a_request_runs(serve: Callable[..., Any]) -> None:
    with serve("--canary-interval", "0.001") as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": [5, 6], "n": 6, "max_tokens": 120, "ignore_eos": True}
        request = pool.submit(httpx.post, f"{server.address}/v1/completions", json=body, timeout=120)
        steps: list[float] = []  # canary steps, at each scrape while the request runs
        while not request.done():
            running, canary_steps = sample(server, "num_requests_running", "canary_steps_total")
            if running:
                steps.append(canary_steps)
            time.sleep(0.02)
        assert request.result().status_code == 200
        assert len(steps) > 2 and len(set(steps)) == 1
        wait_for(lambda: server.metric("canary_steps_total") > steps[0])


@pytest.mark.parametrize("strict", [False, True])
def test_a_flipped_bit_is_counted_logged_and_with_strict_unhealthy(
    serve: Callable[..., Any], tmp_path: Path, strict: bool
) -> None:
    trigger = tmp_path / "flip"
    script, flags = FLIP_A_BIT.format(path=str(trigger)), ("--canary-strict",) if strict else ()
    with serve("--canary-interval", "0.05", *flags, script=script) as server:
        wait_for(lambda: server.metric("canary_runs_total") >= 1)
        assert server.metric("canary_failures_total") == 0
        assert httpx.get(f"{server.address}/health").status_code == 200
        trigger.touch()
        wait_for(lambda: server.metric("canary_failures_total") > 0)
        status = 503 if strict else 200
        assert httpx.get(f"{server.address}/health").status_code == status
        ready = httpx.get(f"{server.address}/ready")
        assert (ready.status_code, ready.json()) == (status, {"status": "canary failed" if strict else "ready"})
        lines = [line for line in server.stderr if "canary failed: prompt" in line]
        assert lines and "bucket" in lines[0] and "expected token" in lines[0]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 0


def test_a_drain_does_not_wait_for_the_canary(serve: Callable[..., Any]) -> None:
    with serve("--canary-interval", "0.001", "--drain-timeout", "60") as server:
        wait_for(lambda: server.metric("canary_runs_total") >= 1)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 0
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--canary-interval", "-1"), "--canary-interval is -1.0; it must be 0 or more seconds"),
        (("--canary-interval", "nan"), "--canary-interval is nan; it must be 0 or more seconds"),
        (("--canary-interval", "0", "--canary-strict"), "--canary-strict has no effect with --canary-interval 0"),
    ],
)
def test_an_invalid_interval_is_a_usage_error(run_cli: RunCLI, flags: tuple[str, ...], message: str) -> None:
    done = run_cli("serve", "builtin:tiny", *flags)
    assert done.returncode == 2 and message in done.stderr
