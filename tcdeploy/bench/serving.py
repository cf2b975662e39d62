"""Load on any OpenAI-compatible server, as its clients see it: first tokens, gaps, tokens a second. No torch.

Open loop: requests arrive when they arrive (`request_rate`), whatever the server does; one that has to wait for a slow
server waits in our figures too. Closed loop: so many clients, each of which asks again when it has its answer
(`concurrency`); one alone stays awake while it waits, since its waking up would count as the server's time. Prompts are
random token ids, so the server's tokenizer has nothing to do; answers run to their length (`ignore_eos`). An event of
the stream counts as a token in the gaps; how many there were, the server says itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from dataclasses import dataclass
from typing import Any

try:
    import uvloop
except ImportError:  # it is not made for every system
    uvloop = None  # type: ignore[assignment]

from tcdeploy.bench.client import Client
from tcdeploy.bench.report import Report, Row
from tcdeploy.bench.settings import ServeSettings
from tcdeploy.bench.traffic import Latencies, RequestTiming, arrival_times, latencies
from tcdeploy.errors import NetworkError

LOOP_FACTORY = uvloop.new_event_loop if uvloop else None
MIN_TOKEN_ID, MAX_TOKEN_ID = 10, 900  # ids that every vocabulary has, most of them text


@dataclass
class RequestResult(RequestTiming):
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
    with asyncio.Runner(loop_factory=LOOP_FACTORY) as runner:
        row = runner.run(run_load(settings))
    result = {name: value for name, value in dataclasses.asdict(settings).items() if name != "api_key"}
    return Report("serve", {}, {}, result, [row])


async def run_load(settings: ServeSettings) -> ServeRow:
    """Raises NetworkError where nobody answers at the address."""
    client = Client(settings.url, settings.headers)
    model = settings.served_model or await _first_model(client, settings.url)
    requests = [_encode_request(client, settings, model, number) for number in range(settings.requests)]
    clock = _Clock()
    result = await (_closed_loop if settings.concurrency else _open_loop)(client, settings, requests, clock)
    seconds = clock.now()
    client.close()
    good = [one for one in result if not one.failure]
    failures: dict[str, int] = {}
    for one in result:
        if one.failure:
            failures[one.failure] = failures.get(one.failure, 0) + 1
    tokens = sum(one.output_tokens for one in good)
    return ServeRow(
        subject=model,
        requests=len(result),
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


async def _open_loop(
    client: Client, settings: ServeSettings, requests: list[bytes], clock: _Clock
) -> list[RequestResult]:
    async def later(request: bytes, arrival: float) -> RequestResult:
        await asyncio.sleep(max(0.0, arrival - clock.now()))
        return await _send_request(client, request, RequestResult(arrival), clock)

    times = arrival_times(settings.requests, settings.request_rate, settings.seed)
    return list(await asyncio.gather(*map(later, requests, times)))


async def _closed_loop(
    client: Client, settings: ServeSettings, requests: list[bytes], clock: _Clock
) -> list[RequestResult]:
    waiting, result = iter(requests), []

    async def one() -> None:
        for request in waiting:
            result.append(await _send_request(client, request, RequestResult(clock.now()), clock))

    clients = asyncio.gather(*(one() for _ in range(settings.concurrency)))
    while settings.concurrency == 1 and not clients.done():
        await asyncio.sleep(0)
    await clients
    return result


def _encode_request(client: Client, settings: ServeSettings, model: str, number: int) -> bytes:
    """Number `number`, as it is sent: nothing of it is made while time counts."""
    source = random.Random(settings.seed * 1_000_003 + number)
    body = {
        "model": model,
        "prompt": [source.randrange(MIN_TOKEN_ID, MAX_TOKEN_ID) for _ in range(settings.input_length)],
        "max_tokens": settings.output_length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return client.encode_request("POST", "/v1/completions", json.dumps(body).encode())


async def _send_request(client: Client, request: bytes, result: RequestResult, clock: _Clock) -> RequestResult:
    events = _EventStream(result, clock)
    try:
        status = await client.send(request, events.feed)
    except (OSError, ValueError, KeyError, TypeError) as error:
        result.failure = result.failure or type(error).__name__
        return result
    if status != 200:
        result.failure = f"HTTP {status}"
    elif not result.failure and not result.token_times:
        result.failure = "no token"
    result.output_tokens = result.output_tokens or len(result.token_times)
    return result


class _EventStream:
    """Server-sent events, read as they come."""

    def __init__(self, result: RequestResult, clock: _Clock) -> None:
        self._result, self._clock, self._buffer = result, clock, b""

    def feed(self, piece: bytes) -> None:
        now = self._clock.now()
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                self._handle_event(json.loads(line[6:]), now)

    def _handle_event(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            self._result.failure = str(event["error"].get("code") or "error")
            return
        if event.get("usage"):
            self._result.output_tokens = event["usage"]["completion_tokens"]
        if event["choices"]:
            self._result.token_times.append(now)


async def _first_model(client: Client, url: str) -> str:
    pieces: list[bytes] = []
    try:
        await client.request("GET", "/v1/models", b"", pieces.append)
        return str(json.loads(b"".join(pieces))["data"][0]["id"])
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise NetworkError(
            f"{url}/v1/models gives no model: {type(error).__name__} {error}", "is it ready? --api-key?"
        ) from None
