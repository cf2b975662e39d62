"""The first tokens of a server that has just become ready, beside those of the same server later.

Requests are sent at fixed intervals by an HTTP client, whatever the server does: a slow answer delays no other request.
Every prompt is new, so none is in the prefix cache.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import statistics
import sys
import threading
import time
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

INTERVAL_S = 0.3
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 16
PROMPT_IDS = range(3, 259)  # in the vocabulary of every model
TIMEOUT_S = 120.0


class Periods(NamedTuple):
    """Seconds of requests after /ready, without requests, and of requests again."""

    minute: float
    idle: float
    later: float


class FirstTokens(NamedTuple):
    """Milliseconds to the first token; `failed` requests had none."""

    median: float
    p99: float  # by the nearest-rank method
    requests: int
    failed: int


def random_prompt(source: random.Random) -> list[int]:
    return source.choices(PROMPT_IDS, k=PROMPT_TOKENS)


def measure(url: str, periods: Periods) -> dict[str, FirstTokens]:
    """First tokens of a server that has just become ready: in the minute after /ready, and later."""
    source, model = random.Random(0), served_model(url)
    minute = send_requests(url, model, periods.minute, source)
    time.sleep(periods.idle)
    return {"minute": minute, "later": send_requests(url, model, periods.later, source)}


def send_requests(url: str, model: str, seconds: float, source: random.Random) -> FirstTokens:
    """Send a request every INTERVAL_S for `seconds`, and wait for all. Exits if none is answered."""
    count = max(1, round(seconds / INTERVAL_S))
    bodies = [json.dumps(request(model, random_prompt(source))) for _ in range(count)]
    first_tokens: list[float | None] = [None] * count

    def send(number: int) -> None:
        try:
            first_tokens[number] = first_token_seconds(url, bodies[number])
        except (OSError, http.client.HTTPException) as error:
            print(f"request {number} failed: {error}", file=sys.stderr)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(count)]
    start = time.perf_counter()
    for number, thread in enumerate(threads):
        time.sleep(max(0.0, start + number * INTERVAL_S - time.perf_counter()))
        thread.start()
    for thread in threads:
        thread.join()
    answered = [value * 1e3 for value in first_tokens if value is not None]
    if not answered:
        raise SystemExit("error: no request was answered; the reasons are above")
    p99 = sorted(answered)[math.ceil(0.99 * len(answered)) - 1]
    return FirstTokens(round(statistics.median(answered), 2), round(p99, 2), count, count - len(answered))


def request(model: str, prompt: list[int]) -> dict[str, object]:
    sampling = {"temperature": 1.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    return {"model": model, "prompt": prompt, "stream": True, **sampling}


def first_token_seconds(url: str, body: str) -> float:
    """Seconds from before the connection to the first token. Reads the whole answer.

    Raises OSError and HTTPException.
    """
    address = urlsplit(url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=TIMEOUT_S)
    start, first = time.perf_counter(), None
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"HTTP {response.status}: {response.read(300).decode(errors='replace')}")
        while line := response.readline():
            if first is None and line.startswith(b"data: {"):
                first = time.perf_counter() - start
    finally:
        connection.close()
    if first is None:
        raise OSError("the answer had no token")
    return first


def served_model(url: str) -> str:
    with build_opener(ProxyHandler({})).open(f"{url}/v1/models", timeout=TIMEOUT_S) as response:
        name: str = json.load(response)["data"][0]["id"]
    return name
