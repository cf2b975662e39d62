"""`bench serve`: load on any OpenAI-compatible server, measured by its clients. Does not import torch.

Open loop (`request_rate`, `trace`): arrival times do not depend on the server, and waiting for a slow server is part of
the latency. Closed loop (`concurrency`): each client sends its next request when the previous one is complete; a single
client busy-waits, because its wake-up time would count as server time. In both, a later request of a session arrives
when the previous one is complete. loads.py defines what is sent; responses run to their full length (`ignore_eos`). For
latencies, each event of the stream counts as one token; numbers of tokens come from the server's `usage`.

The loads of a sweep run one after another. Its limits are on the 99th percentile of the first token and on the mean
time per token, which grow with the length of the run once requests arrive faster than they complete.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

try:
    import uvloop
except ImportError:  # not available on every platform
    uvloop = None  # type: ignore[assignment]

from tcdeploy.bench.client import Client
from tcdeploy.bench.loads import LoadRequest, make_load
from tcdeploy.bench.report import Report, Row
from tcdeploy.bench.serve_settings import SAMPLING, ServeSettings
from tcdeploy.bench.stats import Goodput, Latencies, RequestTiming, latencies, measure_goodput
from tcdeploy.errors import NetworkError, UsageError

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
    encoded = [
        [(_encode_request(client, model, request, settings.sampling), request) for request in session]
        for session in sessions
    ]
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


def _encode_request(client: Client, model: str, request: LoadRequest, sampling: str) -> bytes:
    body = {
        "model": model, "prompt": request.prompt, "max_tokens": request.output_length, **SAMPLING[sampling],
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
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


def run(settings: ServeSettings, on_rate: Callable[[float], None]) -> Report:
    """`on_rate` is called before each rate of a sweep. The report has a row per rate."""
    rows: list[ServeRow] = []
    for rate in settings.sweep or (None,):
        if rate is not None:
            on_rate(rate)
        with asyncio.Runner(loop_factory=LOOP_FACTORY) as runner:
            rows += runner.run(run_load(settings if rate is None else settings.at_rate(rate)))
    public_settings = {name: value for name, value in dataclasses.asdict(settings).items() if name != "api_key"}
    extra = describe_limits(rows, settings.ttft_limit, settings.tpot_limit) if settings.sweep else {}
    extra["sampling_parameters"] = SAMPLING[settings.sampling]  # of every request
    return Report("serve", {}, {}, public_settings, rows, extra)


def describe_limits(rows: Sequence[ServeRow], ttft_limit: float, tpot_limit: float) -> dict[str, Any]:
    """Keys of the document: the lowest rate that exceeds each limit (ms), or None, and the same as notes.

    A rate at which no request succeeds exceeds both limits.
    """
    ttft_rate = _lowest_rate(rows, lambda row: not row.latencies or row.latencies.first_token_ms.p99 > ttft_limit)
    tpot_rate = _lowest_rate(rows, lambda row: not row.latencies or _tpot_mean_ms(row) > tpot_limit)
    failing_rate = _lowest_rate(rows, lambda row: bool(row.failures))
    limits = {
        "ttft_limit_ms": ttft_limit, "tpot_limit_ms": tpot_limit, "ttft_limit_rate": ttft_rate,
        "tpot_limit_rate": tpot_rate, "failing_rate": failing_rate,
        "limit_rate": min((rate for rate in (ttft_rate, tpot_rate) if rate is not None), default=None),
    }  # fmt: skip
    notes = [
        f"first token, p99, above {ttft_limit:g} ms: {_describe_rate(ttft_rate)}",
        f"time per token, mean, above {tpot_limit:g} ms: {_describe_rate(tpot_rate)}",
    ]
    if failing_rate is not None:
        notes.append(f"requests failed: {_describe_rate(failing_rate)}")
    return {"sweep": limits, "notes": notes}


def read_rows(path: str) -> list[dict[str, Any]]:
    """The rows of the JSON document of an earlier sweep that can be plotted. Raises UsageError if there are none."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = plotted_rows(json.load(file)["rows"])
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "--compare FILE") from None
    except (ValueError, KeyError, TypeError):
        rows = []
    if not rows:
        hint = f"tcdeploy bench serve --sweep 4,8 --output {path}"
        raise UsageError(f"{path} is not the JSON document of a sweep", hint)
    return rows


def plotted_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those of a rate at which no request succeeded. Raises KeyError and TypeError for other documents."""
    return [row for row in rows if row["request_rate"] and row["latencies"] and row["latencies"]["first_token_ms"]]


def merge_rows(measured: list[dict[str, Any]], compared: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All rows. A server of a compared file (path: rows) whose name is taken gets the path added to its name."""
    merged = list(measured)
    for path, rows in compared.items():
        taken = {row["subject"] for row in merged}
        merged += [{**row, "subject": f"{row['subject']} ({path})"} if row["subject"] in taken else row for row in rows]
    return merged


def _lowest_rate(rows: Sequence[ServeRow], is_above: Callable[[ServeRow], bool]) -> float | None:
    return min((row.request_rate for row in rows if row.request_rate and is_above(row)), default=None)


def _tpot_mean_ms(row: ServeRow) -> float:
    summary = row.latencies and row.latencies.request_gap_ms
    return summary.mean if summary else 0.0


def _describe_rate(rate: float | None) -> str:
    return "at no rate" if rate is None else f"first at {rate:g} requests/s"
