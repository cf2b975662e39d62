"""Random traffic: under load, each request gets exactly the tokens that it gets alone.

A server of the embedded model has so few KV blocks that running requests are preempted. Random requests (prompts of all
lengths that share beginnings, sampling settings with seeds, several choices, penalties, biases, stop strings, minimum
lengths, constraints, log-probabilities) are first sent one by one to an idle server with ample blocks, without
streaming. Then they are sent in random order by concurrent clients, many as streams, while other clients disconnect in
the middle of theirs. Each choice must have the same token ids, text and reason to finish, and the same
log-probabilities except for rounding. Tokens of plain greedy requests must be those of transformers, computed without a
KV cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.conftest import TINY, TINY_FLAGS, cli_command, cli_environment
from tests.server.conftest import ServerProcess, serving

DEFAULT_COUNT = 300
CLIENTS = 10  # beyond the four decode rows, so that requests also wait
DISCONNECT_SHARE = 0.15  # of additional requests, which are dropped
SCARCE_BLOCKS = 30  # of 16 tokens: the longest request alone takes 29
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCABULARY = (3, 900)  # ids of ordinary tokens
LONGEST_PROMPT, MAX_NEW_TOKENS = 300, 160
LOGPROB_TOLERANCE = 2e-3  # a preemption changes how a prompt is cut into chunks
WORDS = "list def return value for in range print class self if not none import the a module data".split()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "abc", "b"]}, "size": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"guided_choice": ["yes", "no", "yesterday"]}, {"guided_regex": "[a-f]{2,9}(-[0-9]{1,3})?"},
    {"guided_json": SCHEMA},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
]  # fmt: skip
SETTINGS: dict[str, list[Any]] = {  # an additional field, and its values
    "top_k": [1, 5, 40], "top_p": [0.3, 0.9], "min_p": [0.05, 0.3], "repetition_penalty": [0.8, 1.3],
    "presence_penalty": [-1.0, 1.5], "frequency_penalty": [-0.5, 0.7], "min_tokens": [1, 8], "ignore_eos": [True],
    "stop": ["e", [" ", "re"], ["\n"]], "stop_token_ids": [[40, 41, 42, 43, 44, 45]],
    "logit_bias": [{"7": 5.0, "9": -100}], "bad_words": [["the", "re"]],
}  # fmt: skip


def make_requests(source: random.Random, count: int) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of each request, without `stream`."""
    beginnings = [[source.randrange(*VOCABULARY) for _ in range(LONGEST_PROMPT // 2)] for _ in range(4)]
    return [_make_request(source, beginnings) for _ in range(count)]


def _make_request(source: random.Random, beginnings: list[list[int]]) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"max_tokens": source.choice((1, 8, 24, 60, MAX_NEW_TOKENS)), "return_token_ids": True}
    is_chat = source.random() < 0.3
    if is_chat:
        text = " ".join(source.choice(WORDS) for _ in range(source.choice((1, 8, 40))))
        body["messages"] = [{"role": "user", "content": text}]
    elif source.random() < 0.3:
        body["prompt"] = " ".join(source.choice(WORDS) for _ in range(source.choice((1, 8, 60))))
    else:
        shared = source.choice(beginnings)[: source.choice((0, 16, 40, LONGEST_PROMPT // 2))]
        length = source.choice((1, 2, 16, 33, 100, LONGEST_PROMPT // 2))
        body["prompt"] = shared + [source.randrange(*VOCABULARY) for _ in range(length)]
    if source.random() < 0.6:
        body |= {"temperature": source.choice((0.3, 0.8, 1.0, 1.7)), "seed": source.randrange(1 << 32)}
        body |= {"n": source.choice((2, 3))} if source.random() < 0.25 else {}
    else:
        body["temperature"] = 0
    if source.random() < 0.5:  # long answers, for which the KV blocks do not suffice
        body["ignore_eos"] = True
    if source.random() < 0.5:  # the others have no further settings
        for name in source.sample(sorted(SETTINGS), source.choice((1, 2, 4))):
            body[name] = source.choice(SETTINGS[name])
        body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    if source.random() < 0.2:
        body |= source.choice(CONSTRAINTS)
        for name in ("min_tokens", "ignore_eos", "bad_words", "logit_bias", "stop"):  # may exclude every allowed token
            body.pop(name, None)
    if source.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": source.choice((0, 2))} if is_chat else {"logprobs": 2}
    return (CHAT if is_chat else COMPLETIONS), body


class Choice:
    """A choice of a response, whether or not it was streamed."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.logprobs: list[float] = []

    def add(self, document: dict[str, Any]) -> None:
        """Append a choice, or the part of one that an event of a stream holds."""
        message = document.get("message") or document.get("delta") or {}
        self.token_ids += document.get("token_ids") or []
        self.text += document.get("text") or message.get("content") or ""
        self.finish_reason = document.get("finish_reason") or self.finish_reason
        logprobs = document.get("logprobs") or {}
        self.logprobs += logprobs.get("token_logprobs") or [item["logprob"] for item in logprobs.get("content") or ()]

    def difference(self, other: Choice) -> str:
        """What differs from the choice of the same request alone; "" if nothing does."""
        for name in ("token_ids", "text", "finish_reason"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)!r} instead of {getattr(other, name)!r}"
        pairs = list(zip(self.logprobs, other.logprobs, strict=False))
        if len(self.logprobs) != len(other.logprobs) or any(abs(a - b) > LOGPROB_TOLERANCE for a, b in pairs):
            return f"logprobs: {self.logprobs} instead of {other.logprobs}"
        return ""


Answer = dict[int, Choice] | str  # by index; or the status and the error


def read_answer(documents: list[dict[str, Any]]) -> dict[int, Choice]:
    choices: dict[int, Choice] = {}
    for document in documents:
        for choice in document["choices"]:
            choices.setdefault(choice["index"], Choice()).add(choice)
    return choices


async def send(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    if not body.get("stream"):
        response = await client.post(path, json=body)
        return read_answer([response.json()]) if response.status_code == 200 else _error(response)
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return _error(response)
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        return f"the stream ended with {lines[-1:]}"
    return read_answer([json.loads(line) for line in lines[:-1]])


def _error(response: httpx.Response) -> str:
    return f"{response.status_code}: {response.json()['error']['message']}"


async def disconnect(client: httpx.AsyncClient, path: str, body: dict[str, Any], num_lines: int) -> None:
    """Read some lines of a stream, and close the connection."""
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("POST", path, json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                num_lines -= 1
                if num_lines < 0:
                    return


async def answer_alone(address: str, requests: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
    async with httpx.AsyncClient(base_url=address, timeout=300, verify=False) as client:
        return [await send(client, path, body) for path, body in requests]


async def answer_under_load(
    address: str, requests: list[tuple[str, dict[str, Any]]], source: random.Random
) -> list[Answer]:
    """The answers in the order of `requests`, which are sent in random order by CLIENTS clients."""
    answers: list[Answer] = [""] * len(requests)
    order = iter(source.sample(range(len(requests)), len(requests)))

    async def run_client(source: random.Random) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=300, verify=False) as client:
            for number in order:
                path, body = requests[number]
                if source.random() < DISCONNECT_SHARE:
                    await disconnect(client, *source.choice(requests), num_lines=source.randrange(12))
                answers[number] = await send(client, path, {**body, "stream": source.random() < 0.5})
                if source.random() < 0.2:
                    await asyncio.sleep(source.random() * 0.05)

    await asyncio.gather(*(run_client(random.Random(source.random())) for _ in range(CLIENTS)))
    return answers


@functools.cache
def _reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    from tcdeploy.models.load import resolve_model_path

    return AutoModelForCausalLM.from_pretrained(resolve_model_path(TINY), dtype=torch.float32).eval()


@torch.no_grad()
def greedy_problem(body: dict[str, Any], choice: Choice) -> str:
    """How a greedy answer differs from the most likely tokens of plain transformers; "" if it does not.

    Checks all tokens of the answer in one forward pass over prompt and answer.
    """
    prompt = body["prompt"]
    logits = _reference_model()(torch.tensor([[*prompt, *choice.token_ids]]), use_cache=False).logits[0]
    expected = logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    return "" if expected == choice.token_ids else f"{choice.token_ids} instead of transformers' {expected}"


def is_plain_greedy(body: dict[str, Any]) -> bool:
    changing = {*SETTINGS, "n", *(name for constraint in CONSTRAINTS for name in constraint)} - {"ignore_eos"}
    return isinstance(body.get("prompt"), list) and not body["temperature"] and not changing & {
        name for name, value in body.items() if value
    }  # fmt: skip


def compare(requests: list[tuple[str, dict[str, Any]]], alone: list[Answer], loaded: list[Answer]) -> list[str]:
    """One line for each request whose answer under load is not the answer alone, or not that of transformers."""
    failures = []
    for number, ((path, body), expected, answer) in enumerate(zip(requests, alone, loaded, strict=True)):
        problems = []
        if isinstance(expected, str) or isinstance(answer, str):
            problems = [f"{answer} (alone: {expected})"] if expected != answer or isinstance(answer, str) else []
        elif expected.keys() != answer.keys():
            problems = [f"choices {sorted(answer)} instead of {sorted(expected)}"]
        else:
            problems = [f"choice {i}: {text}" for i in answer if (text := answer[i].difference(expected[i]))]
            if is_plain_greedy(body):
                problems += filter(None, (greedy_problem(body, choice) for choice in answer.values()))
        failures += [f"{number}: {path} {json.dumps(body)}: {problem}" for problem in problems]
    return failures


def attack_servers(ample: ServerProcess, scarce: ServerProcess, source: random.Random, count: int) -> dict[str, Any]:
    """`ample`: an idle server that answers one request at a time. `scarce`: one with SCARCE_BLOCKS KV blocks."""
    requests, begin = make_requests(source, count), time.monotonic()
    alone = asyncio.run(answer_alone(ample.address, requests))
    preemptions = scarce.metric("num_preemptions_total")
    loaded = asyncio.run(answer_under_load(scarce.address, requests, source))
    failures = compare(requests, alone, loaded)
    idle_s = scarce.wait_until_idle(60)
    preemptions = scarce.metric("num_preemptions_total") - preemptions
    if scarce.metric("recompiles_total"):
        failures.append("a step was compiled under load")
    if idle_s >= 60:
        failures.append("KV blocks are in use after all requests have ended")
    fields = Counter(name for _, body in requests for name, value in body.items() if value)
    return {
        "attacks": count,
        "seconds": round(time.monotonic() - begin),
        "preemptions": preemptions,
        "compared_with_transformers": sum(is_plain_greedy(body) for _, body in requests),
        "tokens": sum(
            len(item.token_ids) for answer in loaded if not isinstance(answer, str) for item in answer.values()
        ),
        "fields": dict(sorted(fields.items())),
        "succeeded": failures,
    }


def run(source: random.Random, count: int) -> dict[str, Any]:
    """Start both servers from one cache folder, and compare their answers."""
    with tempfile.TemporaryDirectory() as folder:
        home, cache = Path(folder), Path(folder) / "cache"
        command = cli_command("warm", TINY, *TINY_FLAGS, "--programs", "jit", "--cache-dir", str(cache))
        subprocess.run(
            command, env=cli_environment(home), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with serving(home, cache) as ample, serving(home, cache, "--kv-blocks", str(SCARCE_BLOCKS)) as scarce:
            return attack_servers(ample, scarce, source, count)
