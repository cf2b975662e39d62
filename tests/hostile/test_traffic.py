"""Sends 24 random requests alone and under load; `scripts/attack traffic` sends hundreds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.hostile.traffic import SCARCE_BLOCKS, Choice, attack_servers, greedy_problem, make_requests
from tests.server.conftest import ServerProcess, prepared_fork_server, server, serving, warm_cache  # noqa: F401


@pytest.mark.long  # random traffic without a server is in engine/test_continuous_batching.py
def test_each_request_gets_the_tokens_under_load_that_it_gets_alone(
    server: ServerProcess,  # noqa: F811
    warm_cache: Path,  # noqa: F811
    fork_server: ForkServer,
    tmp_path: Path,
) -> None:
    with serving(tmp_path, warm_cache, "--kv-blocks", str(SCARCE_BLOCKS), fork_server=fork_server) as scarce:
        result = attack_servers(server, scarce, random.Random(7), 24)
    assert result["succeeded"] == [], result
    assert result["tokens"] > 200 and result["compared_with_transformers"] > 0, result


def test_requests_are_reproducible_with_the_seed_and_cover_each_setting() -> None:
    requests = make_requests(random.Random(3), 400)
    assert requests == make_requests(random.Random(3), 400)
    fields = {name for _, body in requests for name in body}
    assert {"n", "seed", "stop", "logprobs", "top_logprobs", "guided_json", "guided_regex", "response_format"} <= fields
    assert {"min_tokens", "repetition_penalty", "logit_bias", "bad_words", "messages", "prompt"} <= fields


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"token_ids": [1, 3]}, "token_ids: [1, 2] instead of [1, 3]"),
        ({"text": "ac"}, "text: 'ab' instead of 'ac'"),
        ({"finish_reason": "length"}, "finish_reason: 'stop' instead of 'length'"),
        ({"logprobs": [-0.5, -1.01]}, "logprobs: "), ({"logprobs": [-0.5]}, "logprobs: "), ({}, ""),
    ],
)  # fmt: skip
def test_every_difference_of_an_answer_is_seen(change: dict[str, object], difference: str) -> None:
    def choice() -> Choice:
        made = Choice()
        made.add({"token_ids": [1], "text": "a", "logprobs": {"token_logprobs": [-0.5]}})
        made.add({"token_ids": [2], "text": "b", "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"})
        return made

    alone = choice()
    vars(alone).update(change)
    found = choice().difference(alone)
    assert found.startswith(difference) and bool(found) == bool(difference)


def test_a_greedy_answer_with_another_token_than_that_of_transformers_is_seen() -> None:
    wrong = Choice()
    wrong.token_ids = [5, 5, 5]
    assert "instead of transformers'" in greedy_problem({"prompt": [40, 41, 42]}, wrong)
