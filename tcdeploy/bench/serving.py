"""`bench serve`: load on any OpenAI-compatible server, measured by its clients. Does not import torch.

Open loop (`request_rate`, `trace`): arrival times do not depend on the server, and waiting for a slow server is part of
the latency. Closed loop (`concurrency`): each client sends its next request when the previous one is complete; a single
client busy-waits, because its wake-up time would count as server time. In both, a later request of a session arrives
when the previous one is complete. loads.py defines what is sent; responses run to their full length (`ignore_eos`). For
latencies, each event of the stream counts as one token; numbers of tokens come from the server's `usage`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

try:
    import uvloop
except ImportError:  # not available on every platform
    uvloop = None  # type: ignore[assignment]

from tcdeploy.bench.client import Client
from tcdeploy.bench.loads import LoadRequest, make_load
from tcdeploy.bench.report import Row
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.stats import Goodput, Latencies, RequestTiming, latencies, measure_goodput
from tcdeploy.errors import NetworkError

LOOP_FACTORY = uvloop.new_event_loop if uvloop else None


@dataclass
class RequestResult(RequestTiming):
    """A request's token times, the numbers of tokens that the server reports, and its failure, if any."""

    kind: str = ""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    failure: str = ""


@dataclass(frozen=True)
class ServeRow(Row):
    """All requests of a run, or those of one `kind`. Rates are over `seconds`: from the start to the end of the last
    response of the run."""

    requests: int
    failures: dict[str, int]
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    latencies: Latencies | None  # None if no request succeeded
    request_rate: float | None = None  # offered load, None if it was not a finite rate
    kind: str = ""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # served by the prefix cache; 0 if the server does not report it
    goodput: Goodput | None = None  # None without limits


async def run_load(settings: ServeSettings) -> list[ServeRow]:
    """A row of all requests, and one of each kind, if the trace has kinds. Raises NetworkError if the server cannot be
    reached."""
    sessions = make_load(settings)
    client = Client(settings.url, {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {})
    model = settings.served_model or await _first_model(client, settings.url)
    encoded = [[(_encode_request(client, model, request), request) for request in session] for session in sessions]
    load = _Load(client)
    await (load.run_closed(encoded, settings.concurrency) if settings.concurrency else load.run_open(encoded))
    seconds = load.now()
    client.close()
    kinds = sorted({result.kind for result in load.results} - {""})
    return [
        _make_row(settings, model, kind, [result for result in load.results if kind in ("", result.kind)], seconds)
        for kind in ("", *kinds)
    ]


def _make_row(settings: ServeSettings, model: str, kind: str, results: list[RequestResult], seconds: float) -> ServeRow:
    succeeded = [result for result in results if not result.failure]
    output_tokens = sum(result.output_tokens for result in succeeded)
    return ServeRow(
        subject=settings.label or model,
        requests=len(results),
        failures=dict(Counter(result.failure for result in results if result.failure)),
        seconds=seconds,
        output_tokens=output_tokens,
        output_tokens_per_second=output_tokens / seconds,
        requests_per_second=len(succeeded) / seconds,
        latencies=latencies(succeeded) if succeeded else None,
        request_rate=None if math.isinf(settings.request_rate) else settings.request_rate,
        kind=kind,
        prompt_tokens=sum(result.prompt_tokens for result in succeeded),
        cached_prompt_tokens=sum(result.cached_prompt_tokens for result in succeeded),
        goodput=measure_goodput(succeeded, settings.slo, len(results), seconds) if settings.slo else None,
    )


# Requests are encoded before the clock starts, so that encoding is not part of the latency.
EncodedSession: TypeAlias = list[tuple[bytes, LoadRequest]]


def _encode_request(client: Client, model: str, request: LoadRequest) -> bytes:
    body = {  # without the penalty, the server would use the default of the model
        "model": model, "prompt": request.prompt, "max_tokens": request.output_length, "temperature": 0,
        "repetition_penalty": 1, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return client.encode_request("POST", "/v1/completions", json.dumps(body).encode())


class _Load:
    """One run of a load, with its results. The clock starts on construction."""

    def __init__(self, client: Client) -> None:
        self._client, self._start = client, time.perf_counter()
        self.results: list[RequestResult] = []

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def run_open(self, sessions: list[EncodedSession]) -> None:
        await asyncio.gather(*(self._run_session(session, 0.0) for session in sessions))

    async def run_closed(self, sessions: list[EncodedSession], concurrency: int) -> None:
        queue: Iterator[EncodedSession] = iter(sessions)  # shared: each client takes the next session

        async def run_client() -> None:
            for session in queue:
                await self._run_session(session, self.now())

        clients = asyncio.gather(*(run_client() for _ in range(concurrency)))
        while concurrency == 1 and not clients.done():
            await asyncio.sleep(0)  # busy-wait, see the module docstring
        await clients

    async def _run_session(self, session: EncodedSession, start: float) -> None:
        """`start`: seconds on the clock. A failed request does not end its session."""
        for data, request in session:
            arrival = max(start, request.earliest)
            if (wait := arrival - self.now()) > 0:
                await asyncio.sleep(wait)
            result = RequestResult(arrival, kind=request.kind)
            await self._send(data, result)
            self.results.append(result)
            start = self.now()

    async def _send(self, request: bytes, result: RequestResult) -> None:
        try:
            status = await self._client.send(request, _EventStream(result, self.now).feed)
        except (OSError, ValueError, KeyError, TypeError) as error:
            result.failure = result.failure or type(error).__name__
            return
        if status != 200:
            result.failure = f"HTTP {status}"
        elif not result.failure and not result.token_times:
            result.failure = "no token"
        result.output_tokens = result.output_tokens or len(result.token_times)


class _EventStream:
    """Parses server-sent events incrementally, and records their times in the result."""

    def __init__(self, result: RequestResult, now: Callable[[], float]) -> None:
        self._result, self._now, self._buffer = result, now, b""

    def feed(self, piece: bytes) -> None:
        now = self._now()
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                self._handle_event(json.loads(line[6:]), now)

    def _handle_event(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            self._result.failure = str(event["error"].get("code") or "error")
            return
        if usage := event.get("usage"):
            self._result.prompt_tokens = usage.get("prompt_tokens", 0)
            self._result.cached_prompt_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self._result.output_tokens = usage["completion_tokens"]
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
