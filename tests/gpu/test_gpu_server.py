"""What requests ask of a step beside its program: on the GPU a server says what it says on the CPU, in float32."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from tests.conftest import TINY
from tests.server.conftest import ServerProcess, serving
from tests.server.test_structured_output import PERSON, QUESTION, json_schema_format

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler for the CPU's server"),
]
PROMPT = "This module provides"
LONG = [10 + 7 * place % 900 for place in range(300)]  # of several chunks
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "long": {"prompt": LONG},
    "sampled": {"temperature": 0.9, "seed": 7},
    "filters": {"temperature": 1.3, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "biases": {"logit_bias": {"300": 100, "301": 100}, "frequency_penalty": 2},
    "least length": {"min_tokens": 30, "max_tokens": 60},
    "stop": {"stop": [" the", "\n"], "max_tokens": 100},
    "choices": {"n": 3, "temperature": 1, "seed": 3},
    "prompts": {"prompt": [PROMPT, "A list is", "To be "]},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True, "logprobs": 2, "max_tokens": 5},
    "ids to stop at": {"stop_token_ids": list(range(0, 2000, 16)), "max_tokens": 100},
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


def answers(server: ServerProcess, **asked: Any) -> list[dict[str, Any]]:
    is_chat = "messages" in asked
    url = f"{server.address}/v1/{'chat/' if is_chat else ''}completions"
    body = {"model": TINY, "max_tokens": 40, "temperature": 0, **({} if is_chat else {"prompt": PROMPT}), **asked}
    if body.get("stream"):
        return streamed(url, body)
    made = httpx.post(url, json=body, timeout=120)
    assert made.status_code == 200, made.text
    return [
        {**choice, "text": choice["message"]["content"]} if is_chat else choice for choice in made.json()["choices"]
    ]


def streamed(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    with httpx.stream("POST", url, json=body, timeout=120) as made:
        for line in made.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    whole = found.setdefault(choice["index"], {"text": ""})
                    whole["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    whole["finish_reason"] = choice["finish_reason"]
    return [found[index] for index in sorted(found)]


def logprobs_of(choice: dict[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
    """Each token with its log-probability and those of the likeliest; a prompt's first has none."""
    found = choice["logprobs"]
    if found is None:
        return []
    if "content" in found:
        return [
            (one["token"], one["logprob"], {other["token"]: other["logprob"] for other in one["top_logprobs"]})
            for one in found["content"]
        ]
    rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"] or itertools.repeat({}), strict=False)
    return [(token, value, top) for token, value, top in rows if value is not None]


def texts_of(choices: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
def test_the_gpu_says_what_the_cpu_says(servers: CpuAndGpu, asked: dict[str, Any]) -> None:
    here, there = answers(servers.cpu, **asked), answers(servers.gpu, **asked)
    assert texts_of(there) == texts_of(here)
    for known, found in zip(map(logprobs_of, here), map(logprobs_of, there), strict=True):
        assert [token for token, _, _ in found] == [token for token, _, _ in known]
        assert [value for _, value, _ in found] == pytest.approx([value for _, value, _ in known], abs=1e-3)
        assert all(
            top == pytest.approx(other, abs=1e-3) for (_, _, top), (_, _, other) in zip(found, known, strict=True)
        )
        assert (len(found) > 4) == ("logprobs" in asked)
    assert texts_of(answers(servers.gpu, **asked, stream=True)) == texts_of(there)


def test_all_at_once_get_what_each_gets_alone(servers: CpuAndGpu) -> None:
    alone = [texts_of(answers(servers.gpu, **asked)) for asked in REQUESTS.values()]
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        together = list(pool.map(lambda asked: texts_of(answers(servers.gpu, **asked)), REQUESTS.values()))
    assert together == alone
    assert servers.gpu.wait_until_idle(10) < 10
    assert servers.gpu.metric("recompiles_total") == 0
