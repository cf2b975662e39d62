"""The engine's thread, with an engine that is none: what it hands to the event loop, and who lets whom go first."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.sequence import NewToken, SamplingParams
from tcdeploy.server import worker
from tcdeploy.server.worker import RequestGroup, Worker


class Engine:
    """Each request gets three tokens, the first of which tells how long it waited. A step gives what the one before it
    made, so a request's first gives nothing."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(stats=None)
        self.steps = threading.Semaphore(100)  # that it may make
        self._asked: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._asked)

    def submit(self, prompt: list[int], params: SamplingParams) -> int:
        self._asked[len(self._asked)] = -1
        return len(self._asked) - 1

    def step(self) -> list[NewToken]:
        assert self.steps.acquire(timeout=60)
        told = []
        for request_id in list(self._asked):
            self._asked[request_id] += 1
            number = self._asked[request_id]
            if number == 0:
                continue
            told.append(
                NewToken(
                    request_id=request_id, token_id=number, finish_reason="length" if number == 3 else "",
                    queue_seconds=0.0 if number == 1 else None,
                )
            )  # fmt: skip
            if number == 3:
                del self._asked[request_id]
        return told


@contextlib.asynccontextmanager
async def started_group(engine: Engine) -> AsyncIterator[RequestGroup]:
    """A request to a worker of this engine, not yet started; at the end the worker stops as it should."""
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    deployment: Any = SimpleNamespace(engine=engine)
    one = Worker(lambda: deployment, lambda _: None, lambda: ready.set_result(None), ready.set_exception)
    one.start()
    await ready
    try:
        yield RequestGroup(one, [([7], SamplingParams(max_new_tokens=3))])
    finally:
        engine.steps.release(100)
        one.stop()
        one._thread.join(10)
    assert one.failure is None and not one._thread.is_alive()


async def collect_tokens(group: RequestGroup) -> list[int]:
    said = []
    async for arrived in group.tokens():
        assert arrived, "else a stream takes it for time to say that it lives"
        for answer, token in arrived:
            said.append(token.token_id)
            answer.is_open = not token.finish_reason
    return said


def test_it_rests_after_first_tokens_and_after_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=rests.append))

    async def run() -> list[int]:
        async with started_group(Engine()) as group:
            await group.start()
            return await collect_tokens(group)

    assert asyncio.run(run()) == [1, 2, 3]
    assert rests == [worker.FIRST_TOKEN_SLEEP_S]


def test_a_start_keeps_out_of_the_way_until_a_step_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_LAUNCH_WAIT_S", 60.0)

    async def run() -> list[int]:
        engine = Engine()
        engine.steps = threading.Semaphore(0)
        async with started_group(engine) as group:
            starting = asyncio.create_task(group.start())
            await asyncio.sleep(0.05)
            assert not starting.done()
            engine.steps.release(4)
            await asyncio.wait_for(starting, 30)  # far from the 60 s
            return await collect_tokens(group)

    assert asyncio.run(run()) == [1, 2, 3]


def test_a_start_waits_for_no_engine_for_long() -> None:
    async def run() -> list[int]:
        engine = Engine()
        engine.steps = threading.Semaphore(0)
        async with started_group(engine) as group:
            await asyncio.wait_for(group.start(), 30)
            reading = asyncio.create_task(collect_tokens(group))
            engine.steps.release()  # launched, too late for `start`
            await asyncio.sleep(0.05)
            assert not reading.done()
            engine.steps.release(3)
            return await reading

    assert asyncio.run(run()) == [1, 2, 3]
