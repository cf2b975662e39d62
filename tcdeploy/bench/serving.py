"""`bench serve`: load on any OpenAI-compatible server, measured by its clients. Does not import torch.

Open loop (`request_rate`): arrival times do not depend on the server, and waiting for a slow server is part of the
latency. Closed loop (`concurrency`): each client sends its next request when the previous response is complete; a
single client busy-waits, because its wake-up time would count as server time. Prompts are random token ids, which
need no tokenization, and responses run to their full length (`ignore_eos`). For latencies, each event of the stream
counts as one token; the number of output tokens comes from the server's `usage`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

try:
    import uvloop
except ImportError:  # not available on every platform
    uvloop = None  # type: ignore[assignment]

from tcdeploy.bench.client import Client
from tcdeploy.bench.report import Report, Row
from tcdeploy.bench.settings import ServeSettings
from tcdeploy.bench.traffic import Latencies, RequestTiming, arrival_times, latencies
from tcdeploy.errors import NetworkError

LOOP_FACTORY = uvloop.new_event_loop if uvloop else None
MIN_TOKEN_ID, MAX_TOKEN_ID = 10, 900  # in every vocabulary, and mostly text


@dataclass
class RequestResult(RequestTiming):
    """A request's token times, the number of output tokens that the server reports, and its failure, if any."""

    output_tokens: int = 0
    failure: str = ""


@dataclass(frozen=True)
class ServeRow(Row):
    """Rates are over `seconds`: from the start to the end of the last response."""

    requests: int
    failures: dict[str, int]
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    latencies: Latencies | None  # None if no request succeeded


def run(settings: ServeSettings) -> Report:
    with asyncio.Runner(loop_factory=LOOP_FACTORY) as runner:
        row = runner.run(run_load(settings))
    public_settings = {name: value for name, value in dataclasses.asdict(settings).items() if name != "api_key"}
    return Report("serve", {}, {}, public_settings, [row])


async def run_load(settings: ServeSettings) -> ServeRow:
    """Raises NetworkError if the server cannot be reached."""
    client = Client(settings.url, settings.headers)
    model = settings.served_model or await _first_model(client, settings.url)
    requests = [_encode_request(client, settings, model, index) for index in range(settings.requests)]
    clock = _Clock()
    results = await (_closed_loop if settings.concurrency else _open_loop)(client, settings, requests, clock)
    seconds = clock.now()
    client.close()
    succeeded = [result for result in results if not result.failure]
    output_tokens = sum(result.output_tokens for result in succeeded)
    return ServeRow(
        subject=model,
        requests=len(results),
        failures=dict(Counter(result.failure for result in results if result.failure)),
        seconds=seconds,
        output_tokens=output_tokens,
        output_tokens_per_second=output_tokens / seconds,
        requests_per_second=len(succeeded) / seconds,
        latencies=latencies(succeeded) if succeeded else None,
    )


class _Clock:
    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start


async def _open_loop(
    client: Client, settings: ServeSettings, requests: list[bytes], clock: _Clock
) -> list[RequestResult]:
    async def send_at(request: bytes, arrival: float) -> RequestResult:
        await asyncio.sleep(max(0.0, arrival - clock.now()))
        return await _send_request(client, request, RequestResult(arrival), clock)

    arrivals = arrival_times(settings.requests, settings.request_rate, settings.seed)
    return list(await asyncio.gather(*map(send_at, requests, arrivals)))


async def _closed_loop(
    client: Client, settings: ServeSettings, requests: list[bytes], clock: _Clock
) -> list[RequestResult]:
    queue: Iterator[bytes] = iter(requests)  # shared: each client takes the next request
    results: list[RequestResult] = []

    async def run_client() -> None:
        for request in queue:
            results.append(await _send_request(client, request, RequestResult(clock.now()), clock))

    clients = asyncio.gather(*(run_client() for _ in range(settings.concurrency)))
    while settings.concurrency == 1 and not clients.done():
        await asyncio.sleep(0)  # busy-wait, see the module docstring
    await clients
    return results


def _encode_request(client: Client, settings: ServeSettings, model: str, index: int) -> bytes:
    """The bytes of request `index`. All requests are encoded before the clock starts."""
    rng = random.Random(settings.seed * 1_000_003 + index)
    body = {
        "model": model,
        "prompt": [rng.randrange(MIN_TOKEN_ID, MAX_TOKEN_ID) for _ in range(settings.input_length)],
        "max_tokens": settings.output_length,
        "temperature": 0,
        "repetition_penalty": 1,  # otherwise the default of the model
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
    """Parses server-sent events incrementally, and records their times in the result."""

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
            f"{url}/v1/models returned no model: {type(error).__name__} {error}",
            "wait until the server is ready, and pass --api-key if it needs one",
        ) from None
