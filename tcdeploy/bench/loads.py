"""The requests of a load: prompts, output lengths and arrival times, fixed before the clock starts. No torch.

A load is a list of sessions, and a session a list of requests that are sent one after another. Prompts are random token
ids, which need no tokenization. They depend on the seed and on the request rate, so that no rate of a sweep is served
from the prefix cache of an earlier one; lengths and relative arrival times depend on the seed only.

A trace is a JSONL file with one request per line:

    {"timestamp": 0.8, "input_length": 900, "output_length": 120, "session": "a", "kind": "chat"}

`timestamp` is the arrival in seconds; times count from the earliest of the file. Lengths are in tokens. `prompt`, text
or a list of token ids, may replace `input_length`. Requests of one `session` are sent in the order of their timestamps,
each after the response to the previous one, and their random prompts continue each other: a longer one begins with the
shorter. A prefix cache can therefore serve the previous prompt, but not the previous answer. Latencies are also
reported for each `kind`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError

from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.stats import arrival_times
from tcdeploy.errors import UsageError

TOKEN_IDS = range(10, 900)  # in every vocabulary, and mostly text
TRACE_HINT = '{"timestamp": SECONDS, "input_length": TOKENS, "output_length": TOKENS}, one per line'


@dataclass(frozen=True)
class LoadRequest:
    """`earliest`: seconds since the start. A request of a session also waits for the response to the previous one."""

    prompt: str | list[int]
    output_length: int
    earliest: float = 0.0
    kind: str = ""  # latencies are also reported per kind


ClientSession: TypeAlias = list[LoadRequest]


class TokenStream:
    """An endless random sequence of token ids, which depends on its name only."""

    def __init__(self, name: str) -> None:
        self._rng = random.Random(name)
        self._ids: list[int] = []

    def first(self, count: int) -> list[int]:
        """The first `count` ids: a shorter result is a prefix of a longer one."""
        if (missing := count - len(self._ids)) > 0:
            self._ids += self._rng.choices(TOKEN_IDS, k=missing)
        return self._ids[:count]


def make_load(settings: ServeSettings) -> list[ClientSession]:
    """The sessions of the trace, or one request per session with the lengths and arrivals of the settings."""
    if settings.trace is not None:
        return _read_trace(settings.trace, settings.seed)
    rng = random.Random(f"{settings.seed} lengths")
    name = f"{settings.seed} {settings.request_rate:g}"
    prefix = TokenStream(f"{name} prefix").first(settings.shared_prefix)
    sessions = []
    for number, arrival in enumerate(arrival_times(settings.num_requests, settings.request_rate, settings.seed)):
        input_length = _draw_length(settings.input_length, settings.length_spread, rng)
        output_length = _draw_length(settings.output_length, settings.length_spread, rng)
        prompt = prefix + TokenStream(f"{name} session {number}").first(input_length)
        sessions.append([LoadRequest(prompt, output_length, arrival)])
    return sessions


def _draw_length(nominal: int, spread: float, rng: random.Random) -> int:
    """Uniform within +-spread of the nominal length."""
    return max(1, rng.randint(math.ceil(nominal * (1 - spread)), math.floor(nominal * (1 + spread))))


class _TraceLine(BaseModel, strict=True, extra="forbid"):
    timestamp: FiniteFloat
    output_length: PositiveInt
    input_length: PositiveInt | None = None
    prompt: str | list[NonNegativeInt] | None = Field(None, min_length=1)
    session: str | int | None = None
    kind: str = ""


def _read_trace(path: str, seed: int) -> list[ClientSession]:
    """The sessions in the order of their first requests. Raises UsageError with file and line."""
    try:
        with open(path, encoding="utf-8") as file:
            texts = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "--trace FILE") from None
    lines = [
        (number, _parse_line(f"{path}, line {number}", text)) for number, text in enumerate(texts, 1) if text.strip()
    ]
    if not lines:
        raise UsageError(f"{path} contains no requests", TRACE_HINT)
    start = min(line.timestamp for _, line in lines)
    sessions: dict[str, tuple[TokenStream, ClientSession]] = {}
    for number, line in lines:
        name = f"line {number}" if line.session is None else f"session {line.session}"
        stream, session = sessions.setdefault(name, (TokenStream(f"{seed} {name}"), []))
        prompt = line.prompt or stream.first(line.input_length or 0)
        session.append(LoadRequest(prompt, line.output_length, line.timestamp - start, line.kind))
    ordered = [sorted(session, key=lambda request: request.earliest) for _, session in sessions.values()]
    return sorted(ordered, key=lambda session: session[0].earliest)


def _parse_line(place: str, text: str) -> _TraceLine:
    try:
        line = _TraceLine.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(step) for step in first["loc"][:1])
        raise UsageError(f"{place}: {key + ': ' if key else ''}{first['msg']}", TRACE_HINT) from None
    if line.prompt is None and line.input_length is None:
        raise UsageError(f"{place}: input_length: Field required", TRACE_HINT)
    return line
