"""The library and the server give the same text for the same request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tcdeploy import LLM, SamplingParams
from tests.conftest import TINY
from tests.server.conftest import ServerProcess

PROMPTS: list[Any] = ["This module provides", [40, 41, 42, 43], "Naïve 日本語 🙂 text"]
QUESTION = [{"role": "user", "content": "What is a list?"}]
SAMPLED: dict[str, Any] = {"max_tokens": 20, "temperature": 1.5, "seed": 5}
REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": 20, "temperature": 0},
    {**SAMPLED, "top_p": 0.95, "top_k": 200, "min_p": 0.001},
    {**SAMPLED, "frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    {**SAMPLED, "stop": ["e", " the", "\n"]},
    {**SAMPLED, "stop_token_ids": list(range(300, 400)), "min_tokens": 3},
    {**SAMPLED, "ignore_eos": True},
]


@pytest.mark.parametrize("fields", REQUESTS)
def test_texts_and_finish_reasons_equal_those_of_the_server(
    llm: LLM, server: ServerProcess, fields: dict[str, Any]
) -> None:
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, SamplingParams(**fields)), strict=True):
        body = {"model": TINY, "prompt": prompt, "return_token_ids": True, **fields}
        [choice] = httpx.post(f"{server.address}/v1/completions", json=body).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (answer.text, answer.finish_reason)
        assert choice["token_ids"] == answer.token_ids
    body = {"model": TINY, "messages": QUESTION, **fields}
    [choice] = httpx.post(f"{server.address}/v1/chat/completions", json=body).json()["choices"]
    answer = llm.chat(QUESTION, SamplingParams(**fields))
    assert (choice["message"]["content"], choice["finish_reason"]) == (answer.text, answer.finish_reason)
