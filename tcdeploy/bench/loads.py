"""The requests of a load: prompts, output lengths and arrival times, fixed before the clock starts. No torch.

A load is a list of sessions, and a session a list of requests that are sent one after another; most sessions are one
request. Prompts are random token ids, which need no tokenization. They depend on the seed and on the request rate, so
that no rate of a sweep is served from the prefix cache of an earlier one; lengths and relative arrival times depend on
the seed only.

Chats (`turns` > 1): a prompt consists of the session's previous prompt, as many random ids as the answer had tokens,
and `input_length` new ones. The answer's own ids are not used, because servers return text. A prefix cache can
therefore serve the previous prompt but not the previous answer, and saves less than it does for real chats.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tcdeploy.bench.lengths import Lengths, draw_lengths
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.traffic import arrival_times

TOKEN_IDS = range(10, 900)  # in every vocabulary, and mostly text


@dataclass(frozen=True)
class LoadRequest:
    """`earliest`: seconds since the start. A request of a session also waits for the response to the previous one."""

    prompt: str | list[int]
    output_length: int
    earliest: float = 0.0
    kind: str = ""  # latencies are also reported per kind


ClientSession = list[LoadRequest]


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
    """The sessions of all settings but `trace`, which trace.py reads."""
    arrivals = arrival_times(settings.num_sessions, settings.request_rate, settings.seed, settings.burstiness)
    rng = random.Random(f"{settings.seed} lengths")
    name = f"{settings.seed} {settings.request_rate:g}"
    prefixes = [
        TokenStream(f"{name} prefix {group}").first(settings.shared_prefix) for group in range(settings.prefix_groups)
    ]
    return [
        _make_session(
            prefixes[number % len(prefixes)],
            TokenStream(f"{name} session {number}"),
            [_draw_turn(settings, rng) for _ in range(settings.turns)],
            arrival,
        )
        for number, arrival in enumerate(arrivals)
    ]


def _draw_turn(settings: ServeSettings, rng: random.Random) -> Lengths:
    return draw_lengths(settings.lengths, settings.input_length, settings.output_length, settings.length_spread, rng)


def _make_session(prefix: list[int], stream: TokenStream, turns: list[Lengths], arrival: float) -> ClientSession:
    requests, length = [], 0
    for turn in turns:
        length += turn.input
        requests.append(LoadRequest(prefix + stream.first(length), turn.output, arrival))
        length += turn.output
    return requests
