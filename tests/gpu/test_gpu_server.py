"""Sampling features of requests: in float32, a server on the GPU gives the responses of one on the CPU."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.conftest import TINY
from tests.server.conftest import ServerProcess, serving
from tests.server.test_structured_output import PERSON, QUESTION, json_schema_format

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the server on the CPU needs a C++ compiler"),
]
PROMPT = "This module provides"
LONG = [10 + 7 * position % 900 for position in range(300)]  # several chunks
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "long": {"prompt": LONG},
    "sampled": {"temperature": 0.9, "seed": 7},
    "filters": {"temperature": 1.3, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "biases": {"logit_bias": {"300": 100, "301": 100}, "frequency_penalty": 2},
    "minimum length": {"min_tokens": 30, "max_tokens": 60},
    "stop": {"stop": [" the", "\n"], "max_tokens": 100},
    "choices": {"n": 3, "temperature": 1, "seed": 3},
    "prompts": {"prompt": [PROMPT, "A list is", "To be "]},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True, "logprobs": 2, "max_tokens": 5},
    "stop token ids": {"stop_token_ids": list(range(0, 2000, 16)), "max_tokens": 100},
    "chat": {"messages": QUESTION, "logprobs": True, "top_logprobs": 3},
    "chat, any object": {"messages": QUESTION, "response_format": {"type": "json_object"}, "max_tokens": 200},
    "echo of a long prompt": {"prompt": LONG, "echo": True, "logprobs": 0, "max_tokens": 1},
    "schema": {"response_format": json_schema_format(PERSON), "max_tokens": 200},
    "schema, sampled": {
        "response_format": json_schema_format(PERSON),
        "max_tokens": 200,
        "temperature": 1,
        "seed": 9,
        "n": 2,
    },
}


class CpuAndGpu(NamedTuple):
    cpu: ServerProcess
    gpu: ServerProcess


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuAndGpu]:
    home, cache = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("cache")
    flags = ("--dtype", "float32", "--device")
    with serving(home, cache, *flags, "cpu") as cpu, serving(home, cache, *flags, "cuda", "--kv-blocks", "256") as gpu:
        yield CpuAndGpu(cpu, gpu)


def test_an_eager_start_gives_the_same_answers_before_and_after_it_is_warm(servers: CpuAndGpu, tmp_path: Path) -> None:
    """With CUDA graphs: eager steps use none, and each bucket is captured while the server runs."""
    flags = ("--dtype", "float32", "--device", "cuda", "--kv-blocks", "256", "--start", "eager")
    with serving(tmp_path, tmp_path / "cache", *flags) as server:
        expected = [complete(servers.cpu, **REQUESTS[name]) for name in ("greedy", "long", "penalties")]
        assert [complete(server, **REQUESTS[name]) for name in ("greedy", "long", "penalties")] == expected
        assert server.metric("start_tier", tier="eager") == 1
        deadline = time.monotonic() + 300
        while httpx.get(f"{server.address}/ready", params={"level": "warm"}).status_code != 200:
            assert time.monotonic() < deadline, server.stderr
            assert complete(server, **REQUESTS["greedy"]) == expected[0]
        assert [complete(server, **REQUESTS[name]) for name in ("greedy", "long", "penalties")] == expected
        assert server.metric("recompiles_total") == server.metric("uncaptured_runs_total") == 0
        assert all(item["outcome"] == "miss" for item in httpx.get(f"{server.address}/status").json()["buckets"])
        assert not [line for line in server.stderr if "were not in the cache" in line], "the copy had all programs"


def complete(server: ServerProcess, **fields: Any) -> list[dict[str, Any]]:
    """The choices of one completion or chat request."""
    is_chat = "messages" in fields
    url = f"{server.address}/v1/{'chat/' if is_chat else ''}completions"
    body = {"model": TINY, "max_tokens": 40, "temperature": 0, **({} if is_chat else {"prompt": PROMPT}), **fields}
    if body.get("stream"):
        return stream_choices(url, body)
    response = httpx.post(url, json=body, timeout=120)
    assert response.status_code == 200, response.text
    return [
        {**choice, "text": choice["message"]["content"]} if is_chat else choice for choice in response.json()["choices"]
    ]


def stream_choices(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    with httpx.stream("POST", url, json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    joined = choices.setdefault(choice["index"], {"text": ""})
                    joined["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    joined["finish_reason"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def logprobs_of(choice: dict[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
    """Each token with its log-probability and those of the most likely tokens. A prompt's first token has none."""
    logprobs = choice["logprobs"]
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [
            (entry["token"], entry["logprob"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]})
            for entry in logprobs["content"]
        ]
    tops = logprobs["top_logprobs"] or itertools.repeat({})
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=False)
    return [(token, value, top) for token, value, top in rows if value is not None]


def texts_of(choices: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
def test_the_gpu_gives_the_responses_of_the_cpu(servers: CpuAndGpu, fields: dict[str, Any]) -> None:
    cpu_choices, gpu_choices = complete(servers.cpu, **fields), complete(servers.gpu, **fields)
    assert texts_of(gpu_choices) == texts_of(cpu_choices)
    for expected, entries in zip(map(logprobs_of, cpu_choices), map(logprobs_of, gpu_choices), strict=True):
        assert [token for token, _, _ in entries] == [token for token, _, _ in expected]
        assert [value for _, value, _ in entries] == pytest.approx([value for _, value, _ in expected], abs=1e-3)
        assert all(
            top == pytest.approx(other, abs=1e-3) for (_, _, top), (_, _, other) in zip(entries, expected, strict=True)
        )
        assert (len(entries) > 4) == ("logprobs" in fields)
    assert texts_of(complete(servers.gpu, **fields, stream=True)) == texts_of(gpu_choices)


def test_concurrent_requests_get_the_responses_they_get_alone(servers: CpuAndGpu) -> None:
    alone = [texts_of(complete(servers.gpu, **fields)) for fields in REQUESTS.values()]
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        together = list(pool.map(lambda fields: texts_of(complete(servers.gpu, **fields)), REQUESTS.values()))
    assert together == alone
    assert servers.gpu.wait_until_idle(10) < 10
    assert servers.gpu.metric("recompiles_total") == 0
