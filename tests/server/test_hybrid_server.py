"""A server of a model with state in slots: clients with common prefixes, preemption, and retries of aborted prompts.

Each answer must have the tokens of transformers' `generate` for its prompt alone. Programs are traced by Dynamo and not
compiled. The server has few KV blocks, and takes snapshots from 32 tokens on.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import hybrid_models
from tests.conftest import TINY
from tests.fork_server import ForkServer
from tests.server.conftest import ServerProcess, raw_post, serving, wait_for

CLIENTS, MAX_ROUNDS = 6, 5
TOKENS = (1, 8, 60)
MIN_SNAPSHOT_TOKENS = 32
LONG_PROMPT = 400  # tokens; the largest bucket has 128
FLAGS = (
    "--buckets", "128", "--batch-sizes", "4", "--kv-blocks", "30", "--mixed-steps", "on", "--programs", "jit",
    "--served-model-name", TINY,
)  # fmt: skip


def prepare_server() -> None:
    """In the server's process: trace programs instead of compiling them, and keep snapshots of short prefixes."""
    from tcdeploy.engine.schedule.scheduler import Scheduler
    from tcdeploy.planning import memory, sizes
    from tests.coverage.campaign import traced_only

    memory.MIN_SNAPSHOT_TOKENS = sizes.MIN_SNAPSHOT_TOKENS = MIN_SNAPSHOT_TOKENS  # type: ignore[attr-defined]
    memory.SNAPSHOT_FRACTION, memory.MAX_SNAPSHOTS_PER_SEQUENCE = 0.9, 1
    traced_only().__enter__()
    init = Scheduler.__init__

    def with_short_prefixes(self: Scheduler, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.prefixes.min_snapshot_tokens = self.prefixes.min_lone_snapshot_tokens = MIN_SNAPSHOT_TOKENS

    Scheduler.__init__ = with_short_prefixes  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tcdeploy.models.load import resolve_model_path

    folder = tmp_path_factory.mktemp("model") / "model"
    hybrid_models.save_model("qwen3_5_text", folder, vocab_size=2048, max_position_embeddings=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve_model_path(TINY)) / name, folder)
    return str(folder)


@pytest.fixture(scope="module")
def hybrid_server(
    model: str, tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer
) -> Iterator[ServerProcess]:
    script = "from tests.server.test_hybrid_server import prepare_server; prepare_server()"
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, folder / "cache", *FLAGS, model=model, fork_server=fork_server, script=script) as started:
        yield started


def random_tokens(source: random.Random, length: int) -> list[int]:
    return [source.randrange(3, 2048) for _ in range(length)]


def body(prompt: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": TINY, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields}  # fmt: skip


def complete(server: ServerProcess, prompt: list[int], tokens: int) -> list[int]:
    response = httpx.post(f"{server.address}/v1/completions", json=body(prompt, tokens), timeout=120, verify=False)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def abort(server: ServerProcess, prompt: list[int], delay_s: float) -> None:
    """Send a request and close the connection before it is answered."""
    with server.connect() as connection:
        connection.sendall(
            raw_post("/v1/completions", httpx.Request("POST", "http://x", json=body(prompt, 40)).content)
        )
        time.sleep(delay_s)


def shared_requests(number: int) -> list[tuple[list[int], int]]:
    """(prompt, number of new tokens) of one client. Prompts start with a part of the instructions that all clients
    share, or with none; each is followed by a longer prompt, as the next turn of a chat.
    """
    instructions = random_tokens(random.Random(1), 150)
    source, requests = random.Random(100 + number), []
    for _ in range(3):
        prefix = instructions[: source.choice((0, 70, 150))]
        prompt = prefix + random_tokens(source, source.choice((1, 20, 90)))
        requests += [(prompt, source.choice(TOKENS)), ([*prompt, *random_tokens(source, 3)], source.choice(TOKENS))]
    return requests


def expected(model: str, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    answers = hybrid_models.answers(model, [prompt for prompt, _ in requests], max(TOKENS))
    return [answer[:tokens] for answer, (_, tokens) in zip(answers, requests, strict=True)]


def test_clients_with_common_prefixes_get_the_tokens_that_they_would_get_alone(
    model: str, hybrid_server: ServerProcess
) -> None:
    names = ("num_preemptions_total", "prefix_cache_hits_total")
    before = [hybrid_server.metric(name) for name in names]
    for number in range(MAX_ROUNDS):  # on a slow machine, the requests of the first one may not overlap
        requests = [shared_requests(number * CLIENTS + client) for client in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda each: [complete(hybrid_server, *request) for request in each], requests))
        for each, received in zip(requests, answers, strict=True):
            assert received == expected(model, each)
        preemptions, hits = (hybrid_server.metric(name) - old for name, old in zip(names, before, strict=True))
        if preemptions > 0 and hits > 100:
            return
    pytest.fail("the test needs preemptions and hits")
    assert hybrid_server.wait_until_idle(10) < 10


def test_retries_of_aborted_prompts_get_right_tokens(model: str, hybrid_server: ServerProcess) -> None:
    """Some requests are aborted between two chunks, when the first border of the prompt already has a snapshot."""
    source = random.Random(7)
    instructions = random_tokens(source, 200)
    prompts = [[*instructions, *random_tokens(source, LONG_PROMPT - 200)] for _ in range(3)]
    aborted = hybrid_server.metric("request_success_total", finished_reason="abort")
    with ThreadPoolExecutor(3) as pool:
        for delay_s in (0.0, 0.01, 0.03, 0.06):
            list(pool.map(lambda prompt, delay_s=delay_s: abort(hybrid_server, prompt, delay_s), prompts))
            [answer] = pool.map(lambda prompt: complete(hybrid_server, prompt, 8), prompts[:1])
            assert [answer] == expected(model, [(prompts[0], 8)])
        answers = list(pool.map(lambda prompt: complete(hybrid_server, prompt, 40), prompts))
    assert answers == expected(model, [(prompt, 40) for prompt in prompts])
    wait_for(lambda: hybrid_server.metric("request_success_total", finished_reason="abort") >= aborted + 1)
    assert hybrid_server.wait_until_idle(10) < 10
