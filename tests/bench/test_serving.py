"""Loads over HTTP against a fake server: what arrives there, when, and what is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bench.serve_settings import SAMPLING, ServeSettings
from tcdeploy.bench.stats import arrival_times
from tcdeploy.engine.generation_defaults import GenerationDefaults
from tcdeploy.errors import UsageError
from tests.bench.fake_server import FakeServer, run_load

SMALL = {"input_length": 6, "output_length": 4}


def test_every_request_has_its_lengths_and_the_row_its_token_counts() -> None:
    fake = FakeServer()
    [row] = run_load(fake, requests=5, length_spread=0.5, label="ours", **SMALL)
    sent = [(len(body["prompt"]), body["max_tokens"]) for body in fake.bodies]
    assert all(3 <= length <= 9 and 2 <= tokens <= 6 for length, tokens in sent)
    assert (row.subject, row.requests, row.failures, row.request_rate) == ("ours", 5, {}, None)
    assert row.output_tokens == sum(tokens for _, tokens in sent)
    assert row.prompt_tokens == sum(length for length, _ in sent)
    assert row.cached_prompt_tokens == sum(length // 2 for length, _ in sent)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}),
        ({"sampling": "greedy"}, {"temperature": 0, "repetition_penalty": 1}),
        ({"sampling": "model"}, {}),
    ],
)
def test_requests_sample_at_temperature_1_unless_another_sampling_is_given(
    flags: dict[str, Any], expected: dict[str, float]
) -> None:
    fake = FakeServer()
    run_load(fake, requests=1, **flags, **SMALL)
    [body] = fake.bodies
    defaults = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.05)
    sent = {name: body[name] for name in defaults.sampling_params() if name in body}
    assert sent == SAMPLING[flags.get("sampling", "random")] == expected


def test_an_unknown_sampling_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown --sampling 'beam'"):
        ServeSettings(sampling="beam")


def test_no_request_reaches_the_server_before_its_arrival_time() -> None:
    fake = FakeServer()
    [row] = run_load(fake, requests=20, request_rate=10.0, seed=4, **SMALL)
    scheduled = arrival_times(20, 10.0, seed=4)
    arrived = sorted(arrival for arrival, _ in fake.spans)
    assert row.request_rate == 10.0 and row.seconds >= scheduled[-1]
    assert arrived[-1] - arrived[0] >= 0.5 * (scheduled[-1] - scheduled[0])


def test_a_trace_is_sent_at_its_times_and_reported_by_kind(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5.0, "input_length": 4, "output_length": 30, "kind": "chat", "session": 1},
        {"timestamp": 5.0, "input_length": 9, "output_length": 3, "kind": "chat", "session": 1},
        {"timestamp": 5.01, "input_length": 50, "output_length": 2, "kind": "long"},
        {"timestamp": 5.1, "prompt": "hello", "output_length": 2},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fake = FakeServer()
    rows = run_load(fake, trace=str(trace))
    assert [(row.kind, row.requests) for row in rows] == [("", 4), ("chat", 2), ("long", 1)]
    assert [len(body["prompt"]) for body in fake.bodies][:2] == [4, 50]
    assert sorted(len(body["prompt"]) for body in fake.bodies) == [4, 5, 9, 50]
    assert rows[0].seconds == rows[1].seconds >= 0.1
    assert rows[1].latencies and rows[1].latencies.token_gap_ms and rows[1].latencies.token_gap_ms.count == 31


def test_goodput_counts_the_requests_within_their_limits() -> None:
    """Four requests, of which the server runs one at a time: at least 600 ms each."""
    fake = FakeServer(token_seconds=0.15, max_running=1)
    [row] = run_load(fake, requests=4, slo={"e2e": 1650.0, "itl": 2000.0}, **SMALL)
    assert row.goodput is not None
    assert row.goodput.requests in (1, 2) and row.goodput.share == row.goodput.requests / 4
    assert row.goodput.requests_per_second == pytest.approx(row.goodput.requests / row.seconds)
