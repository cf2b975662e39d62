"""OpenAI's Python client against a real server."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import httpx
import jinja2
import openai
import pytest

from tests.conftest import TINY
from tests.server.conftest import ServerProcess

MODEL = "builtin:tiny"
QUESTION = [{"role": "user", "content": "What is a list?"}]


def without_details(usage: Any) -> dict[str, Any]:
    """Usage without the cached tokens, which differ if a prompt is sent again."""
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def test_usage_has_the_tokens_of_the_prompt_that_were_cached(server: ServerProcess) -> None:
    """Blocks have 16 tokens, and the last token of a prompt is always computed."""
    prompts = [[number % 90 + 5 for number in range(70, 70 + 33)], [number % 90 + 5 for number in range(60, 60 + 17)]]
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompts, "max_tokens": 1}

    def cached_tokens(usage: Any) -> int:
        assert (usage.prompt_tokens, usage.completion_tokens) == (50, 4)
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached_tokens(server.client.completions.create(**fields, n=2).usage) == 0, "of the first choice"
    assert cached_tokens(server.client.completions.create(**fields, n=2).usage) == 48
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *_, last = server.client.completions.create(**fields, n=2, stream=True, stream_options=options)
    assert cached_tokens(last.usage) == 48


def test_the_model_is_listed_with_its_context_length(server: ServerProcess) -> None:
    [model] = server.client.models.list().data
    assert (model.id, model.model_extra["max_model_len"]) == (MODEL, 1024)
    assert server.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as rejection:
        server.client.models.retrieve("another")
    assert rejection.value.code == "model_not_found"


def test_a_client_can_use_the_servers_tokenizer(server: ServerProcess) -> None:
    """Like lm-eval's remote backend: ids of special tokens, prompts of ids, and the chat template rendered locally."""

    def tokenize(**fields: Any) -> list[int]:
        content = httpx.post(f"{server.address}/tokenize", json=fields).raise_for_status().json()
        assert content["count"] == len(content["tokens"])
        return list(content["tokens"])

    info = httpx.get(f"{server.address}/tokenizer_info").raise_for_status().json()
    assert all(len(tokenize(prompt=info[name], add_special_tokens=False)) == 1 for name in ("bos_token", "eos_token"))
    rendered = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(info["chat_template"])
    text = rendered.render(messages=QUESTION, add_generation_prompt=True, **info)
    ids = tokenize(prompt=text, add_special_tokens=False)
    assert ids == tokenize(messages=QUESTION)
    assert httpx.post(f"{server.address}/detokenize", json={"tokens": ids}).json()["prompt"] == text


def test_a_streamed_chat_equals_the_whole_response(server: ServerProcess) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    whole = server.client.chat.completions.create(**fields)
    chunks = list(server.client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert without_details(chunks[-1].usage.model_dump()) == without_details(whole.usage.model_dump())
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    assert re.fullmatch("fp_[0-9a-f]{10}", whole.system_fingerprint or "")
    usage = whole.usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {"response_format": {"type": "json_schema", "json_schema": {"name": "text", "schema": {"enum": [text]}}}}
            for text in (
                "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308",  # joined emoji
                "\u6f22\u5b57\u3068\u304b\u306a \ud55c\uad6d\uc5b4",  # CJK
                "e\u0301 n\u0303 c\u0327\u0308 \u0e01\u0e33",  # combining characters
            )
        ),
        *({"temperature": 2.0, "ignore_eos": True, "n": 4, "seed": seed} for seed in (0, 4)),  # partial characters
    ],
    ids=["emoji", "cjk", "combining", "0", "4"],
)
def test_streamed_text_equals_the_whole_text_byte_for_byte(server: ServerProcess, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 60, **fields}
    if "seed" in fields:
        # Favour tokens that are parts of a multi-byte character, so that outputs contain incomplete characters.
        text = {"prompt": "\u00e9\u6f22\ud55c\U0001f469", "add_special_tokens": False}
        partial_tokens = httpx.post(f"{server.address}/tokenize", json=text).json()["tokens"]
        body["logit_bias"] = {str(token): 12 for token in partial_tokens}
    whole = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60).json()
    texts: dict[int, str] = {}
    usage = None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.address}/v1/chat/completions", json={**body, **options}, timeout=60) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    assert [texts[index].encode() for index in sorted(texts)] == [
        choice["message"]["content"].encode() for choice in whole["choices"]
    ]
    assert without_details(usage) == without_details(whole["usage"]) and usage["completion_tokens"] > 5
    if "seed" in fields:
        assert "\ufffd" in "".join(texts.values()), "no partial character was sampled"
    if "response_format" in fields:
        [text] = fields["response_format"]["json_schema"]["schema"]["enum"]
        assert json.loads(texts[0]) == text


def test_choices_of_several_prompts_are_in_order(server: ServerProcess) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0.9, "seed": 5}
    both = server.client.completions.create(prompt=["This module", "A list"], n=2, **fields)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = [server.client.completions.create(prompt=prompt, n=2, **fields) for prompt in ("This module", "A list")]
    texts_alone = [choice.text for completion in alone for choice in completion.choices]
    assert [choice.text for choice in both.choices] == texts_alone
    assert both.choices[0].text != both.choices[1].text
    assert both.usage is not None and both.usage.completion_tokens == sum(
        completion.usage.completion_tokens for completion in alone if completion.usage
    )
    assert both.usage.prompt_tokens == sum(completion.usage.prompt_tokens for completion in alone if completion.usage)


@pytest.mark.parametrize("stream", [False, True])
def test_the_output_ends_before_its_stop_string(server: ServerProcess, stream: bool) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "This module provides", "max_tokens": 60, "temperature": 0}
    plain = server.client.completions.create(**fields).choices[0].text
    stop = plain[10:15]
    if stream:
        chunks = list(server.client.completions.create(**fields, stop=[stop, "never"], stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        [choice] = server.client.completions.create(**fields, stop=[stop, "never"]).choices
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
    logprobs = echoed.logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
    assert echoed.text.startswith("A list is a")
    assert logprobs.token_logprobs[0] is None and all(value < 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens[1:]) == echoed.text, "the first token is the tokenizer's BOS"
    for start, token in list(zip(logprobs.text_offset or (), logprobs.tokens, strict=True))[1:]:
        assert echoed.text[start:].startswith(token)


def chunks_of(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream."""
    text = httpx.post(f"{server.address}{path}", json={**body, "stream": True}, timeout=60).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_completion_of_no_tokens_scores_its_echoed_prompt(server: ServerProcess, logprobs: int | None) -> None:
    body = {"prompt": ["A list is a", "This"], "max_tokens": 0, "echo": True, "logprobs": logprobs, "seed": 1}
    whole = httpx.post(f"{server.address}/v1/completions", json=body).raise_for_status().json()
    with_tokens = httpx.post(f"{server.address}/v1/completions", json={**body, "max_tokens": 1}).json()
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] == with_tokens["usage"]["prompt_tokens"]
    chunks = chunks_of(server, "/v1/completions", body)
    for choice, longer in zip(whole["choices"], with_tokens["choices"], strict=True):
        assert (choice["text"], choice["finish_reason"]) == (body["prompt"][choice["index"]], "length")
        if logprobs:
            for name, values in choice["logprobs"].items():
                assert len(values) > 1 and values == longer["logprobs"][name][:-1], name
        else:
            assert choice["logprobs"] is None
        [chunk] = [event["choices"][0] for event in chunks if event["choices"][0]["index"] == choice["index"]]
        assert chunk == choice
    refused = httpx.post(f"{server.address}/v1/completions", json={**body, "echo": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_are_those_of_the_prompt_and_the_text(server: ServerProcess, path: str) -> None:
    is_chat = "chat" in path
    prompt: dict[str, Any] = {"messages": QUESTION} if is_chat else {"prompt": "This module provides"}
    body = {**prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "n": 2, "stop": ["never"]}
    expected = httpx.post(f"{server.address}/tokenize", json=prompt).json()["tokens"]
    whole = httpx.post(f"{server.address}{path}", json=body).raise_for_status().json()
    chunks = chunks_of(server, path, body)
    for choice in whole["choices"]:
        text = choice["message"]["content"] if is_chat else choice["text"]
        ids = choice["token_ids"]
        assert len(ids) == whole["usage"]["completion_tokens"] // 2
        decoded = httpx.post(f"{server.address}/detokenize", json={"tokens": ids}).json()["prompt"]
        assert decoded.startswith(text) and text
        parts = [part for event in chunks for part in event["choices"] if part["index"] == choice["index"]]
        assert [token_id for part in parts for token_id in part["token_ids"]] == ids
        holder = whole if is_chat else choice
        assert holder["prompt_token_ids"] == expected
        streamed = [part["prompt_token_ids"] for part in (chunks if is_chat else parts) if "prompt_token_ids" in part]
        assert streamed == [expected] and "prompt_token_ids" in (chunks if is_chat else parts)[0]
    plain = httpx.post(f"{server.address}{path}", json={**body, "return_token_ids": False}).text
    assert "token_ids" not in plain


def test_prompt_logprobs_are_those_of_the_echoed_prompt(server: ServerProcess) -> None:
    body = {"prompt": "A list is a", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    url = f"{server.address}/v1/completions"
    [choice] = httpx.post(url, json={**body, "prompt_logprobs": 3}).raise_for_status().json()["choices"]
    [plain] = httpx.post(url, json=body).json()["choices"]
    assert choice["logprobs"] == plain["logprobs"] and "prompt_logprobs" not in plain
    ids = httpx.post(f"{server.address}/tokenize", json={"prompt": body["prompt"]}).json()["tokens"]
    first, *entries = choice["prompt_logprobs"]
    assert first is None and len(entries) == len(ids) - 1
    for token_id, entry, logprob in zip(ids[1:], entries, plain["logprobs"]["token_logprobs"][1:], strict=False):
        own = entry[str(token_id)]
        assert own["logprob"] == pytest.approx(logprob, abs=1e-5)
        ranks = sorted(item["rank"] for item in entry.values() if item["rank"])
        assert ranks == [1, 2, 3] and len(entry) == (3 if own["rank"] else 4)
        by_rank = sorted((item["rank"] or 4, -item["logprob"]) for item in entry.values())
        assert [value for _, value in by_rank] == sorted(value for _, value in by_rank)
        assert own["decoded_token"] in body["prompt"]
    prompt = {"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1}
    [of_ids] = httpx.post(url, json=prompt).raise_for_status().json()["choices"]
    assert [len(entry) for entry in of_ids["prompt_logprobs"][1:]] == [1] * (len(ids) - 1)


def test_prompt_logprobs_of_a_chat_belong_to_the_response(server: ServerProcess) -> None:
    body = {"messages": QUESTION, "max_tokens": 2, "prompt_logprobs": 1, "n": 2}
    url = f"{server.address}/v1/chat/completions"
    whole = httpx.post(url, json=body).raise_for_status().json()
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"] and whole["prompt_logprobs"][0] is None
    assert all("prompt_logprobs" not in choice for choice in whole["choices"])
    for fields in ({"stream": True}, {"prompt_logprobs": -1}, {"prompt_logprobs": 21}):
        refused = httpx.post(url, json={**body, **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_a_prompt_is_scored_in_each_completion_and_looked_up_in_no_cache(server: ServerProcess) -> None:
    url = f"{server.address}/v1/completions"
    queries = server.metric("prefix_cache_queries_total")
    body: dict[str, Any] = {"prompt": list(range(3, 203)), "prompt_logprobs": 2, "max_tokens": 1, "n": 2, "seed": 1}
    choices = httpx.post(url, json=body).raise_for_status().json()["choices"]
    first, second = (
        [
            entry[str(token)]["logprob"]
            for token, entry in zip(body["prompt"], choice["prompt_logprobs"], strict=True)
            if entry
        ]
        for choice in choices
    )
    assert first == pytest.approx(second, abs=1e-3) and len(first) == 199
    assert server.metric("prefix_cache_queries_total") == queries
    refused = httpx.post(url, json={**body, "echo": True, "logprobs": 1, "prompt_logprobs": -5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    refused = httpx.post(url, json={**body, "prompt": [[3] * 1000] * 4, "prompt_logprobs": 20, "n": 32})
    assert refused.status_code == 400 and "2688000 values; the limit is 1000000" in refused.json()["error"]["message"]


def test_a_prompt_that_is_only_scored_counts_no_generated_token(server: ServerProcess) -> None:
    generated, queries = (server.metric(name) for name in ("generation_tokens_total", "prefix_cache_queries_total"))
    body = {"prompt": [3, 4, 5], "echo": True, "max_tokens": 0}
    usage = httpx.post(f"{server.address}/v1/completions", json=body).raise_for_status().json()["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, 3)
    assert server.metric("generation_tokens_total") == generated
    assert server.metric("prefix_cache_queries_total") == queries + 3


def test_closing_a_stream_early_frees_its_kv_blocks(server: ServerProcess) -> None:
    aborted, steps = server.metric("request_success_total", finished_reason="abort"), server.steps
    stream = server.client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, max_tokens=900, temperature=0, extra_body={"ignore_eos": True}
    )
    for number, _ in enumerate(stream):
        if number == 5:
            break
    assert server.metric("num_requests_running") == 1
    stream.close()
    assert server.wait_until_idle(2) < 2
    assert server.metric("request_success_total", finished_reason="abort") == aborted + 1
    assert server.steps - steps < 800, "most of the 900 tokens were not generated"


def test_32_concurrent_requests_get_the_same_output_as_alone(server: ServerProcess) -> None:
    def complete(number: int) -> str:
        prompt = f"The module number {number} " + "provides functions " * (number % 7)
        return (
            server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0).choices[0].text
        )

    alone = [complete(number) for number in range(32)]
    together = [""] * 32

    def complete_and_store(number: int) -> None:
        together[number] = complete(number)

    threads = [threading.Thread(target=complete_and_store, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert server.metric("recompiles_total") == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 1024}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"temperature": -1}, "temperature"),
        ({"top_p": -0.1}, "top_p"), ({"top_k": 2**40}, "top_k"), ({"min_p": 1}, "min_p"), ({"n": 0}, "n"),
        ({"messages": []}, "messages"), ({"top_logprobs": 2}, "top_logprobs"), ({"bad_words": [""]}, "bad_words"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"stop_token_ids": [5] * 600}, "stop_token_ids"), ({"echo": True}, "echo"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"stop": [""]}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias"), ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "yaml"}}, "response_format"), ({"model": "another"}, "model"),
        ({"seed": 2**70}, "seed"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "messages"), ({"min_tokens": 999}, "min_tokens"),
    ],
)  # fmt: skip
def test_an_invalid_field_is_rejected_by_name_without_engine_work(
    server: ServerProcess, fields: dict[str, Any], param: str
) -> None:
    server.wait_until_idle(10)
    before = server.steps
    arguments = {name: fields[name] for name in ("messages", "model") if name in fields}
    extra = {name: value for name, value in fields.items() if name not in arguments}
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as rejection:
        server.client.chat.completions.create(
            **{"model": MODEL, "messages": QUESTION, "max_tokens": 5, **arguments}, extra_body=extra
        )
    assert rejection.value.param == param
    assert server.steps == before, "the engine ran a step"


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        (
            "/v1/completions",
            {"prompt": "Hello there", "repetition_penalty": 1.0, "max_tokens": 5, "logprobs": None, "ignore_eos": True},
            "text",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}],
                "max_completion_tokens": 5,
                "ignore_eos": True,
            },
            "delta",
        ),
    ],
)
def test_the_requests_of_vllm_bench_serve_are_answered(
    server: ServerProcess, path: str, body: dict[str, Any], key: str
) -> None:
    """Its backends `openai` and `openai-chat`: it counts the tokens of the usage, and times each chunk with choices."""
    body = {"model": TINY, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}, **body}
    headers = {"authorization": "Bearer none", "x-request-id": "bench-0"}
    response = httpx.post(server.address + path, json=body, headers=headers, timeout=60)
    assert (response.status_code, response.headers["x-request-id"]) == (200, "bench-0")
    *chunks, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    first, *_, usage = map(json.loads, chunks)
    assert end == "[DONE]" and first["choices"][0][key] is not None
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
