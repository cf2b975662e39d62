"""Load on any OpenAI-compatible server, as its clients see it: first tokens, gaps, tokens a second. No torch.

Open loop: requests arrive when they arrive (`request_rate`), whatever the server does; one that has to wait for a slow
server waits in our figures too. Closed loop: so many clients, each of which asks again when it has its answer
(`concurrency`). Prompts are random token ids, so the server's tokenizer has nothing to do; answers run to their length
(`ignore_eos`). An event of the stream counts as a token in the gaps; how many there were, the server says itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from tcdeploy.bench.report import Report, Row
from tcdeploy.bench.settings import ServeSettings
from tcdeploy.bench.traffic import Latencies, Served, arrivals, latencies
from tcdeploy.errors import NetworkError

LOWEST_ID, HIGHEST_ID = 10, 900  # ids that every vocabulary has, most of them text


@dataclass
class Asked(Served):
    """A request of ours: when its tokens came, what the server says of it, and how it failed if it did."""

    output_tokens: int = 0
    failure: str = ""


@dataclass(frozen=True)
class ServeRow(Row):
    """Rates are over `seconds`: from the beginning to the end of the last answer."""

    requests: int
    failures: dict[str, int]
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    latencies: Latencies | None  # None where nothing succeeded


def run(settings: ServeSettings) -> Report:
    row = asyncio.run(load(settings))
    asked = {name: value for name, value in dataclasses.asdict(settings).items() if name != "api_key"}
    return Report("serve", {}, {}, asked, [row])


async def load(settings: ServeSettings) -> ServeRow:
    """Raises NetworkError where nobody answers at the address."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=settings.headers) as session:
        model = settings.served_model or await _only_model(session, settings)
        clock = _Clock()
        if settings.concurrency:
            asked = await _closed(session, settings, model, clock)
        else:
            asked = await _open(session, settings, model, clock)
        seconds = clock.now()
    good = [one for one in asked if not one.failure]
    failures: dict[str, int] = {}
    for one in asked:
        if one.failure:
            failures[one.failure] = failures.get(one.failure, 0) + 1
    tokens = sum(one.output_tokens for one in good)
    return ServeRow(
        subject=model,
        requests=len(asked),
        failures=failures,
        seconds=seconds,
        output_tokens=tokens,
        output_tokens_per_second=tokens / seconds,
        requests_per_second=len(good) / seconds,
        latencies=latencies(good) if good else None,
    )


class _Clock:
    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start


async def _open(session: aiohttp.ClientSession, settings: ServeSettings, model: str, clock: _Clock) -> list[Asked]:
    async def later(number: int, arrival: float) -> Asked:
        await asyncio.sleep(max(0.0, arrival - clock.now()))
        return await _ask(session, settings, model, number, Asked(arrival), clock)

    times = arrivals(settings.requests, settings.request_rate, settings.seed)
    return list(await asyncio.gather(*(later(number, arrival) for number, arrival in enumerate(times))))


async def _closed(session: aiohttp.ClientSession, settings: ServeSettings, model: str, clock: _Clock) -> list[Asked]:
    numbers = iter(range(settings.requests))
    asked: list[Asked] = []

    async def client() -> None:
        for number in numbers:
            asked.append(await _ask(session, settings, model, number, Asked(clock.now()), clock))

    await asyncio.gather(*(client() for _ in range(settings.concurrency)))
    return asked


async def _ask(
    session: aiohttp.ClientSession, settings: ServeSettings, model: str, number: int, asked: Asked, clock: _Clock
) -> Asked:
    source = random.Random(settings.seed * 1_000_003 + number)
    body: dict[str, Any] = {
        "model": model,
        "prompt": [source.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(settings.input_length)],
        "max_tokens": settings.output_length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with session.post(f"{settings.url}/v1/completions", json=body) as response:
            if response.status != 200:
                asked.failure = f"HTTP {response.status}"
                return asked
            async for event in _events(response):
                if "error" in event:
                    asked.failure = str(event["error"].get("code") or "error")
                    return asked
                if event.get("usage"):
                    asked.output_tokens = event["usage"]["completion_tokens"]
                if event["choices"]:
                    asked.token_times.append(clock.now())
    except (aiohttp.ClientError, ConnectionError) as error:
        asked.failure = type(error).__name__
        return asked
    if not asked.token_times:
        asked.failure = "no token"
    asked.output_tokens = asked.output_tokens or len(asked.token_times)
    return asked


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


async def _only_model(session: aiohttp.ClientSession, settings: ServeSettings) -> str:
    try:
        async with session.get(f"{settings.url}/v1/models") as response:
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, KeyError, IndexError, ValueError) as error:
        raise NetworkError(
            f"{settings.url}/v1/models gives no model: {type(error).__name__} {error}", "is it ready? --api-key?"
        ) from None
