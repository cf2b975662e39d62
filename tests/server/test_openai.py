"""OpenAI's own client against the real server: what it asks for is what it gets."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import jinja2
import openai
import pytest

from tests.server.conftest import ServerProcess

MODEL = "builtin:tiny"
QUESTION = [{"role": "user", "content": "What is a list?"}]


def test_the_model_is_listed_with_its_context(server: ServerProcess) -> None:
    [model] = server.client.models.list().data
    assert (model.id, model.model_extra["max_model_len"]) == (MODEL, 1024)
    assert server.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as refused:
        server.client.models.retrieve("another")
    assert refused.value.code == "model_not_found"


def test_a_client_can_do_without_a_tokenizer_of_its_own(server: ServerProcess) -> None:
    """As lm-eval's remote backend does: ids of special tokens, prompts of ids, the template rendered over there."""

    def tokenize(**asked: Any) -> list[int]:
        answer = httpx.post(f"{server.address}/tokenize", json=asked).raise_for_status().json()
        assert answer["count"] == len(answer["tokens"])
        return list(answer["tokens"])

    info = httpx.get(f"{server.address}/tokenizer_info").raise_for_status().json()
    assert all(len(tokenize(prompt=info[name], add_special_tokens=False)) == 1 for name in ("bos_token", "eos_token"))
    rendered = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(info["chat_template"])
    text = rendered.render(messages=QUESTION, add_generation_prompt=True, **info)
    ids = tokenize(prompt=text, add_special_tokens=False)
    assert ids == tokenize(messages=QUESTION)
    found = httpx.post(f"{server.address}/detokenize", json={"tokens": ids}).json()
    assert found["prompt"] == text


def test_a_chat_streamed_is_the_chat_not_streamed(server: ServerProcess) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    whole = server.client.chat.completions.create(**asked)
    chunks = list(server.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    usage = whole.usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(
    "asked",
    [
        *(
            {"response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": {"enum": [text]}}}}
            for text in (
                "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308",  # joined emoji
                "\u6f22\u5b57\u3068\u304b\u306a \ud55c\uad6d\uc5b4",  # CJK
                "e\u0301 n\u0303 c\u0327\u0308 \u0e01\u0e33",  # combining characters
            )
        ),
        *({"temperature": 2.0, "ignore_eos": True, "n": 3, "seed": seed} for seed in range(8)),  # halves of characters
    ],
    ids=["emoji", "cjk", "combining", *map(str, range(8))],
)
def test_text_streamed_is_the_text_not_streamed_byte_for_byte(server: ServerProcess, asked: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 120, **asked}
    whole = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60).json()
    told: dict[int, str] = {}
    usage = None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.address}/v1/chat/completions", json={**body, **options}, timeout=60) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                told[choice["index"]] = told.get(choice["index"], "") + choice["delta"].get("content", "")
    assert [told[index].encode() for index in sorted(told)] == [
        choice["message"]["content"].encode() for choice in whole["choices"]
    ]
    assert usage == whole["usage"] and usage["completion_tokens"] > 5
    if "response_format" in asked:
        [text] = asked["response_format"]["json_schema"]["schema"]["enum"]
        assert json.loads(told[0]) == text


def test_several_prompts_and_choices_come_in_order(server: ServerProcess) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0.9, "seed": 5}
    both = server.client.completions.create(prompt=["This module", "A list"], n=2, **asked)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = [server.client.completions.create(prompt=prompt, n=2, **asked) for prompt in ("This module", "A list")]
    assert [choice.text for choice in both.choices] == [choice.text for one in alone for choice in one.choices]
    assert both.choices[0].text != both.choices[1].text
    assert both.usage is not None and both.usage.completion_tokens == sum(
        one.usage.completion_tokens for one in alone if one.usage
    )
    assert both.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_its_stop_string(server: ServerProcess, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "This module provides", "max_tokens": 60, "temperature": 0}
    plain = server.client.completions.create(**asked).choices[0].text
    stop = plain[10:15]
    if stream:
        chunks = list(server.client.completions.create(**asked, stop=[stop, "never"], stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        [choice] = server.client.completions.create(**asked, stop=[stop, "never"]).choices
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == (plain[: plain.index(stop)], "stop")


def test_logprobs_of_a_chat_and_of_an_echoed_prompt(server: ServerProcess) -> None:
    chat = server.client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content is not None and len(content) == 5
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token and entry.logprob == entry.top_logprobs[0].logprob < 0
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == chat.choices[0].message.content
    echoed = server.client.completions.create(
        model=MODEL, prompt="A list is a", max_tokens=2, temperature=0, logprobs=1, echo=True
    ).choices[0]
    found = echoed.logprobs
    assert found is not None and found.token_logprobs is not None and found.tokens is not None
    assert echoed.text.startswith("A list is a")
    assert found.token_logprobs[0] is None and all(value < 0 for value in found.token_logprobs[1:])
    assert "".join(found.tokens[1:]) == echoed.text, "the first is the tokenizer's own"
    for start, token in list(zip(found.text_offset or (), found.tokens, strict=True))[1:]:
        assert echoed.text[start:].startswith(token)


def test_a_stream_that_is_left_early_frees_its_blocks(server: ServerProcess) -> None:
    stream = server.client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, max_tokens=900, temperature=0, extra_body={"ignore_eos": True}
    )
    for number, _ in enumerate(stream):
        if number == 5:
            break
    assert server.metric("num_requests_running") == 1
    stream.close()
    deadline = time.monotonic() + 2
    while server.metric("num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.metric("num_requests_running") == 0
    assert server.metric("kv_cache_usage_perc") == 0


def test_32_at_once_get_what_each_gets_alone(server: ServerProcess) -> None:
    def ask(number: int) -> str:
        prompt = f"The module number {number} " + "provides functions " * (number % 7)
        return (
            server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0).choices[0].text
        )

    alone = [ask(number) for number in range(32)]
    together = [""] * 32

    def keep(number: int) -> None:
        together[number] = ask(number)

    threads = [threading.Thread(target=keep, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert server.metric("recompiles_total") == 0


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 1024}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"top_k": 2**40}, "top_k"), ({"min_p": 1}, "min_p"), ({"n": 0}, "n"),
        ({"messages": []}, "messages"), ({"top_logprobs": 2}, "top_logprobs"), ({"bad_words": ["a"]}, "bad_words"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"stop_token_ids": [5] * 600}, "stop_token_ids"), ({"echo": True}, "echo"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"stop": [""]}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias"), ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "yaml"}}, "response_format"), ({"model": "another"}, "model"),
        ({"seed": 2**70}, "seed"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "messages"), ({"min_tokens": 999}, "min_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_the_name_of_the_field(
    server: ServerProcess, asked: dict[str, Any], param: str
) -> None:
    server.wait_until_idle(10)
    before = server.steps
    known = {name: asked[name] for name in ("messages", "model") if name in asked}
    extra = {name: value for name, value in asked.items() if name not in known}
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
        server.client.chat.completions.create(
            **{"model": MODEL, "messages": QUESTION, "max_tokens": 5, **known}, extra_body=extra
        )
    assert refused.value.param == param
    assert server.steps == before, "the engine was asked"
