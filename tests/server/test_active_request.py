"""The order of things around a token: it is sent before it is booked, and every token is booked once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.sequence import NewToken
from tcdeploy.server.active_request import ActiveRequest


class FakeStopwatch:
    def __init__(self) -> None:
        self.entries: list[tuple[bool, float | None]] = []
        self.times: list[float] = []

    def token(self, now: float, is_last: bool, queue_seconds: float | None = None) -> None:
        self.times.append(now)
        self.entries.append((is_last, queue_seconds))


def running(monkeypatch: pytest.MonkeyPatch, *batches: list[NewToken]) -> tuple[ActiveRequest, FakeStopwatch]:
    """A request whose engine gives these, and whose answer ends at what says so."""
    answer, stopwatch = SimpleNamespace(index=0, is_open=True), FakeStopwatch()

    async def tokens(timeout_s: float | None) -> AsyncIterator[list[tuple[Any, NewToken]]]:
        for batch in batches:
            yield [(answer, token) for token in batch]

    def read(self: ActiveRequest, answer: Any, token: NewToken) -> str:
        answer.is_open = not token.finish_reason
        return str(token.token_id)

    monkeypatch.setattr(ActiveRequest, "_append_token", read)
    made = object.__new__(ActiveRequest)
    made.group = SimpleNamespace(tokens=tokens)  # type: ignore[assignment]
    made.stopwatches = [stopwatch]  # type: ignore[list-item]
    return made, stopwatch


FIRST, MIDDLE, LAST = NewToken(0, 1, "", queue_seconds=0.5), NewToken(0, 2, ""), NewToken(0, 3, "length")


def test_what_is_told_is_sent_before_it_is_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    made, stopwatch = running(monkeypatch, [FIRST], [MIDDLE], [LAST])
    seen: list[tuple[dict[int, str], int]] = []

    async def run() -> None:
        async for texts in made.deltas():
            if not seen:  # what a loop does when nothing else is left to do comes before the books, too
                asyncio.get_running_loop().call_soon(lambda: seen.append(({}, len(stopwatch.entries))))
            seen.append((texts, len(stopwatch.entries)))

    asyncio.run(run())
    assert seen == [({0: "1"}, 0), ({}, 0), ({0: "2"}, 1), ({0: "3"}, 2)]
    assert stopwatch.entries == [(False, 0.5), (False, None), (True, None)]


def test_a_slow_client_makes_no_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    made, stopwatch = running(monkeypatch, [FIRST, LAST])
    told: list[float] = []

    async def run() -> None:
        async for _ in made.deltas():
            told.append(time.perf_counter())

    asyncio.run(run())
    assert len(stopwatch.times) == 2 and max(stopwatch.times) < told[0]


def test_of_tokens_that_come_together_one_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    made, stopwatch = running(monkeypatch, [FIRST, MIDDLE, LAST, MIDDLE])

    async def run() -> list[dict[int, str]]:
        return [texts async for texts in made.deltas()]

    assert asyncio.run(run()) == [{0: "123"}]
    assert stopwatch.entries == [(False, 0.5), (False, None), (True, None)]


def test_a_client_that_goes_leaves_books_that_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    made, stopwatch = running(monkeypatch, [FIRST], [LAST])

    async def run() -> None:
        deltas = made.deltas()
        assert await anext(deltas) == {0: "1"}
        await deltas.aclose()

    asyncio.run(run())
    assert stopwatch.entries == [(False, 0.5)]
