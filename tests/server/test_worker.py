"""The engine's thread, with an engine that is none: what it hands to the event loop, and when it lets that go first."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.sequence import NewToken, SamplingParams
from tcdeploy.server import worker
from tcdeploy.server.worker import Exchange, Worker


class Engine:
    """Each request gets three tokens, the first of which tells how long it waited."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(load=None)
        self._asked: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._asked)

    def submit(self, prompt: list[int], params: SamplingParams) -> int:
        self._asked[len(self._asked)] = 0
        return len(self._asked) - 1

    def step(self) -> list[NewToken]:
        told = []
        for request_id in list(self._asked):
            self._asked[request_id] += 1
            number = self._asked[request_id]
            told.append(
                NewToken(
                    request_id=request_id, token_id=number, finish_reason="length" if number == 3 else "",
                    queue_seconds=0.0 if number == 1 else None,
                )
            )  # fmt: skip
            if number == 3:
                del self._asked[request_id]
        return told


def test_it_rests_after_first_tokens_and_after_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=rests.append))

    async def run() -> list[int]:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        deployment: Any = SimpleNamespace(engine=Engine())
        one = Worker(lambda: deployment, lambda _: None, lambda: ready.set_result(None), ready.set_exception)
        one.start()
        await ready
        exchange = Exchange(one, [([7], SamplingParams(max_new_tokens=3))])
        exchange.start()
        said = []
        async for arrived in exchange.tokens():
            for answer, token in arrived:
                said.append(token.token_id)
                answer.is_open = not token.finish_reason
        one.stop()
        one._thread.join(10)
        assert one.failure is None and not one._thread.is_alive()
        return said

    assert asyncio.run(run()) == [1, 2, 3]
    assert rests == [worker.FIRST_TOKEN_REST]
