"""The order of things around a token: it is sent before it is booked, and every token is booked once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.sequence import NewToken
from tcdeploy.server.active_request import Running


class Books:
    def __init__(self) -> None:
        self.entries: list[tuple[bool, float | None]] = []
        self.times: list[float] = []

    def token(self, now: float, is_last: bool, queue_seconds: float | None = None) -> None:
        self.times.append(now)
        self.entries.append((is_last, queue_seconds))


def running(monkeypatch: pytest.MonkeyPatch, *batches: list[NewToken]) -> tuple[Running, Books]:
    """A request whose engine gives these, and whose answer ends at what says so."""
    answer, books = SimpleNamespace(index=0, is_open=True), Books()

    async def tokens(patience: float | None) -> AsyncIterator[list[tuple[Any, NewToken]]]:
        for batch in batches:
            yield [(answer, token) for token in batch]

    def read(self: Running, answer: Any, token: NewToken) -> str:
        answer.is_open = not token.finish_reason
        return str(token.token_id)

    monkeypatch.setattr(Running, "_read", read)
    made = object.__new__(Running)
    made.exchange = SimpleNamespace(tokens=tokens)  # type: ignore[assignment]
    made.stopwatches = [books]  # type: ignore[list-item]
    return made, books


FIRST, MIDDLE, LAST = NewToken(0, 1, "", queue_seconds=0.5), NewToken(0, 2, ""), NewToken(0, 3, "length")


def test_what_is_told_is_sent_before_it_is_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    made, books = running(monkeypatch, [FIRST], [MIDDLE], [LAST])
    seen: list[tuple[dict[int, str], int]] = []

    async def run() -> None:
        async for texts in made.pieces():
            if not seen:  # what a loop does when nothing else is left to do comes before the books, too
                asyncio.get_running_loop().call_soon(lambda: seen.append(({}, len(books.entries))))
            seen.append((texts, len(books.entries)))

    asyncio.run(run())
    assert seen == [({0: "1"}, 0), ({}, 0), ({0: "2"}, 1), ({0: "3"}, 2)]
    assert books.entries == [(False, 0.5), (False, None), (True, None)]


def test_a_slow_client_makes_no_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    made, books = running(monkeypatch, [FIRST, LAST])
    told: list[float] = []

    async def run() -> None:
        async for _ in made.pieces():
            told.append(time.perf_counter())

    asyncio.run(run())
    assert len(books.times) == 2 and max(books.times) < told[0]


def test_of_tokens_that_come_together_one_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    made, books = running(monkeypatch, [FIRST, MIDDLE, LAST, MIDDLE])

    async def run() -> list[dict[int, str]]:
        return [texts async for texts in made.pieces()]

    assert asyncio.run(run()) == [{0: "123"}]
    assert books.entries == [(False, 0.5), (False, None), (True, None)]


def test_a_client_that_goes_leaves_books_that_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    made, books = running(monkeypatch, [FIRST], [LAST])

    async def run() -> None:
        pieces = made.pieces()
        assert await anext(pieces) == {0: "1"}
        await pieces.aclose()

    asyncio.run(run())
    assert books.entries == [(False, 0.5)]
