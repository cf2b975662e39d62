"""ActiveRequest sends each token before it is counted in the metrics, and counts every token once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.schedule.sequence import NewToken
from tcdeploy.server.generate.active_request import ActiveRequest
from tcdeploy.server.generate.choice import Delta
from tcdeploy.server.output.parser import OutputText, split_by_kind


class FakeStopwatch:
    def __init__(self) -> None:
        self.entries: list[tuple[bool, float | None]] = []
        self.times: list[float] = []
        self.prefix_cache: list[tuple[int, int]] = []  # tokens of the prompt, and those that were cached

    def observe_token(self, now: float, is_last: bool, queue_seconds: float | None = None) -> None:
        self.times.append(now)
        self.entries.append((is_last, queue_seconds))


def active_request(monkeypatch: pytest.MonkeyPatch, *batches: list[NewToken]) -> tuple[ActiveRequest, FakeStopwatch]:
    """A request whose engine delivers `batches`. It ends at a token with a finish reason."""
    stopwatch = FakeStopwatch()
    pending = SimpleNamespace(
        index=0, is_open=True, prompt=[7] * NUM_PROMPT_TOKENS, params=SimpleNamespace(prompt_logprobs=None)
    )

    async def tokens(timeout_s: float | None) -> AsyncIterator[list[tuple[Any, NewToken]]]:
        for batch in batches:
            yield [(pending, token) for token in batch]

    def add_token(self: ActiveRequest, pending: Any, token: NewToken, delta: Delta) -> None:
        pending.is_open = not token.finish_reason
        delta.parts.append(OutputText(str(token.token_id)))

    monkeypatch.setattr(ActiveRequest, "_add_token", add_token)
    active = object.__new__(ActiveRequest)
    active.group = SimpleNamespace(tokens=tokens)  # type: ignore[assignment]
    active.stopwatches = [stopwatch]  # type: ignore[list-item]
    active.service = SimpleNamespace(  # type: ignore[assignment]
        metrics=SimpleNamespace(observe_prefix_cache=lambda *counts: stopwatch.prefix_cache.append(counts))
    )
    return active, stopwatch


def texts_of(deltas: dict[int, Delta]) -> dict[int, str]:
    return {index: split_by_kind(delta.parts).content for index, delta in deltas.items()}


NUM_PROMPT_TOKENS, NUM_CACHED_TOKENS = 20, 16
FIRST = NewToken(0, 1, "", queue_seconds=0.5, cached_tokens=NUM_CACHED_TOKENS)
MIDDLE, LAST = NewToken(0, 2, ""), NewToken(0, 3, "length")


def test_text_is_sent_before_its_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    active, stopwatch = active_request(monkeypatch, [FIRST], [MIDDLE], [LAST])
    events: list[tuple[dict[int, str], int]] = []  # text, and the number of counted tokens at that time

    async def run() -> None:
        async for deltas in active.deltas():
            texts = texts_of(deltas)
            if not events:  # the loop's pending callbacks, such as a socket write, also run before the count
                asyncio.get_running_loop().call_soon(lambda: events.append(({}, len(stopwatch.entries))))
                assert not stopwatch.prefix_cache
            events.append((texts, len(stopwatch.entries)))

    asyncio.run(run())
    assert events == [({0: "1"}, 0), ({}, 0), ({0: "2"}, 1), ({0: "3"}, 2)]
    assert stopwatch.entries == [(False, 0.5), (False, None), (True, None)]
    assert stopwatch.prefix_cache == [(NUM_PROMPT_TOKENS, NUM_CACHED_TOKENS)]


def test_token_times_are_arrival_times_even_if_the_client_reads_late(monkeypatch: pytest.MonkeyPatch) -> None:
    active, stopwatch = active_request(monkeypatch, [FIRST, LAST])
    read_times: list[float] = []

    async def run() -> None:
        async for _ in active.deltas():
            read_times.append(time.perf_counter())

    asyncio.run(run())
    assert len(stopwatch.times) == 2 and max(stopwatch.times) < read_times[0]


def test_tokens_after_the_last_one_in_a_batch_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    active, stopwatch = active_request(monkeypatch, [FIRST, MIDDLE, LAST, MIDDLE])

    async def run() -> list[dict[int, str]]:
        return [texts_of(deltas) async for deltas in active.deltas()]

    assert asyncio.run(run()) == [{0: "123"}]
    assert stopwatch.entries == [(False, 0.5), (False, None), (True, None)]


def test_tokens_are_counted_if_the_client_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    active, stopwatch = active_request(monkeypatch, [FIRST], [LAST])

    async def run() -> None:
        deltas = active.deltas()
        assert texts_of(await anext(deltas)) == {0: "1"}
        await deltas.aclose()

    asyncio.run(run())
    assert stopwatch.entries == [(False, 0.5)]
