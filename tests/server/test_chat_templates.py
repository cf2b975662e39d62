"""Chat requests to a model whose template fails or never ends: 400, and the event loop is not blocked."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.server.apis.anthropic.protocol import MESSAGES_FIELD_NAMES
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest, CompletionRequest, TokenizeRequest
from tcdeploy.server.apis.openai.unsupported_fields import rename_error
from tcdeploy.server.apis.openai.validation import ModelLimits, check_combinations
from tcdeploy.server.apis.responses.protocol import RESPONSES_FIELD_NAMES
from tcdeploy.server.generate.text_encoder import TextEncoder
from tcdeploy.server.generate.tokenization import PromptTokenizer
from tcdeploy.server.http.request_parsing import parse
from tcdeploy.server.output.tools import ToolSupport
from tcdeploy.text import chat_template
from tests.server.test_messages import chat_request as messages_request
from tests.server.test_responses import chat_request as responses_request
from tests.server.test_tools import LLAMA, load, make_model

MESSAGES = [{"role": "user", "content": "Hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def prompts(tmp_path: Path) -> PromptTokenizer:
    tokenizer = load(make_model(tmp_path / "model"))
    limits = ModelLimits(context=2048, vocab_size=2048)
    return PromptTokenizer(tokenizer, TextEncoder(tokenizer), limits, "tiny", ToolSupport(tokenizer, LLAMA))


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps(fields).encode())


def test_a_failing_template_is_a_400_with_its_message(prompts: PromptTokenizer) -> None:
    prompts.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    for request in (
        prompts.prompts(chat()),
        prompts.tokenize(parse(TokenizeRequest, json.dumps({"messages": MESSAGES}).encode())),
    ):
        with pytest.raises(ApiError) as rejection:
            asyncio.run(request)
        assert (rejection.value.status, rejection.value.param) == (400, "messages")
        assert rejection.value.message == "the chat template failed in line 1: roles must alternate"


def test_an_endless_template_is_a_400_and_does_not_block_the_event_loop(
    prompts: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts.tokenizer.chat_template = ENDLESS

    async def longest_block_s() -> float:
        request, longest = asyncio.ensure_future(prompts.prompts(chat())), 0.0
        while not request.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
        with pytest.raises(ApiError, match="it did not finish within 3 s") as rejection:
            await request
        assert rejection.value.status == 400
        return longest

    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 3.0)
    assert asyncio.run(longest_block_s()) < 2.7, "a render on the event loop blocks it until the time limit"


@pytest.mark.parametrize(
    ("num_words", "counts"),
    [
        (2100, r"you requested 2105 tokens \(2100 in the messages, 5 in the completion\)"),
        (200_000, r"you requested \d+ tokens or more \(\d+ or more in the messages, 5 in the completion\)"),
    ],
)  # fmt: skip
def test_messages_beyond_the_context_are_counted_as_far_as_they_were_tokenized(
    prompts: PromptTokenizer, num_words: int, counts: str
) -> None:
    prompts.tokenizer.chat_template = "{{ messages[0].content }}"
    messages = [{"role": "user", "content": " a" * num_words}]
    with pytest.raises(ApiError) as rejection:
        asyncio.run(prompts.prompts(chat(messages=messages, max_tokens=5)))
    error = rejection.value
    assert (error.status, error.param, error.code) == (400, "messages", "context_length_exceeded")
    assert re.match(f"This model's maximum context length is 2048 tokens. However, {counts}", error.message)


def test_a_variable_cannot_replace_an_argument_of_the_template(prompts: PromptTokenizer) -> None:
    """With `conversations`, a client would replace the messages after they were validated."""
    replaced = [[{"role": "user", "content": "replaced"}]]
    for name in (
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations",
        "documents", "messages", "return_assistant_tokens_mask", "self", "tokenize", "tools",
    ):  # fmt: skip
        with pytest.raises(ApiError) as rejection:
            asyncio.run(prompts.prompts(chat(chat_template_kwargs={"mode": 1, name: replaced})))
        assert (rejection.value.status, rejection.value.param) == (400, "chat_template_kwargs"), name
        assert rejection.value.message == f"chat_template_kwargs cannot set {name}"


def test_other_variables_reach_the_template_and_unused_ones_are_ignored(prompts: PromptTokenizer) -> None:
    prompts.tokenizer.chat_template = "{{ messages[0].content }} {{ tokenizer }} {{ request }}"
    variables = {"tokenizer": "a", "request": "b", "unused": "c"}  # two of them are names of our own parameters
    [prompt] = asyncio.run(prompts.prompts(chat(chat_template_kwargs=variables)))
    assert prompt.text == "Hi a b"


def test_tokenize_counts_the_tokens_of_a_chat_request_with_the_same_variables(prompts: PromptTokenizer) -> None:
    prompts.tokenizer.chat_template = "{{ messages[0].content }} {{ mode }}"
    fields = {"messages": MESSAGES, "chat_template_kwargs": {"mode": "think"}}
    [prompt] = asyncio.run(prompts.prompts(chat(**fields)))
    request = parse(TokenizeRequest, json.dumps(fields).encode())
    assert asyncio.run(prompts.tokenize(request)) == prompt.token_ids and "think" in (prompt.text or "")
    request.chat_template_kwargs = {"messages": []}
    with pytest.raises(ApiError, match="cannot set messages"):
        asyncio.run(prompts.tokenize(request))


TURNS = "{{ '!' if add_generation_prompt }}{% for m in messages %}<{{ m.content }}>{% endfor %}{{ reasoning_effort }}"
DIALOGUE = [*MESSAGES, {"role": "assistant", "content": "Well"}]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "!<Hi><Well>"), ({"add_generation_prompt": False}, "<Hi><Well>"),
        ({"continue_final_message": False, "add_generation_prompt": True}, "!<Hi><Well>"),
        ({"continue_final_message": True}, "<Hi><Well"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<Hi><Well"),
        ({"reasoning_effort": "low"}, "!<Hi><Well>low"),
        ({"chat_template_kwargs": {"reasoning_effort": "tiny"}}, "!<Hi><Well>tiny"),
        ({"chat_template_kwargs": {"reasoning_effort": "tiny"}, "reasoning_effort": "high"}, "!<Hi><Well>high"),
    ],
)  # fmt: skip
def test_the_end_of_the_prompt_and_the_effort_follow_the_request(
    prompts: PromptTokenizer, fields: dict[str, Any], text: str
) -> None:
    prompts.tokenizer.chat_template = TURNS
    [prompt] = asyncio.run(prompts.prompts(chat(messages=DIALOGUE, **fields)))
    assert prompt.text == text
    tokenize = parse(TokenizeRequest, json.dumps({"messages": DIALOGUE, **fields}).encode())
    assert asyncio.run(prompts.tokenize(tokenize)) == prompt.token_ids


def test_a_message_is_not_continued_behind_a_generation_prompt(prompts: PromptTokenizer) -> None:
    with pytest.raises(ApiError, match="cannot both be true") as rejection:
        asyncio.run(prompts.prompts(chat(continue_final_message=True, add_generation_prompt=True)))
    assert (rejection.value.status, rejection.value.param) == (400, "continue_final_message")
    for name, value in {"continue_final_message": True, "reasoning_effort": "low"}.items():
        request = parse(TokenizeRequest, json.dumps({"prompt": "Hi", name: value}).encode())
        with pytest.raises(ApiError, match=f"{name} requires messages"):
            asyncio.run(prompts.tokenize(request))


NUMBERS = " ".join(map(str, range(2000)))


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({"truncate_prompt_tokens": 7}, 7), ({"truncate_prompt_tokens": 2048}, 2048),
        ({"truncate_prompt_tokens": -1, "max_tokens": 48}, 2000), ({"truncate_prompt_tokens": -1}, 2047),
    ],
)  # fmt: skip
def test_the_last_tokens_of_a_truncated_prompt_are_kept(
    prompts: PromptTokenizer, fields: dict[str, Any], num_tokens: int
) -> None:
    prompts.tokenizer.chat_template = "{{ messages[0].content }}"
    whole = prompts.tokenizer(NUMBERS, add_special_tokens=False, verbose=False).input_ids
    [chat_prompt] = asyncio.run(prompts.prompts(chat(messages=[{"role": "user", "content": NUMBERS}], **fields)))
    assert len(whole) > 2048 and chat_prompt.token_ids == whole[-num_tokens:]
    if "max_tokens" not in fields and fields["truncate_prompt_tokens"] == -1:
        num_tokens = 2032  # the default for completions is 16
    ids = completion(prompt=whole, **fields)
    assert [prompt.token_ids for prompt in asyncio.run(prompts.prompts(ids))] == [whole[-num_tokens:]]
    text = completion(prompt=NUMBERS, echo=True, **fields)
    [prompt] = asyncio.run(prompts.prompts(text))
    assert prompt.token_ids == [prompts.tokenizer.bos_token_id, *whole[1 - num_tokens :]]
    assert prompt.text == prompts.tokenizer.decode(whole[1 - num_tokens :])


def test_the_context_limits_what_is_kept_and_the_tokenizer_what_is_truncated(prompts: PromptTokenizer) -> None:
    for num_kept, message in ((2049, "more than the model's context"), (0, "must be 1 or more"), (-2, "must be 1 or")):
        with pytest.raises(ApiError, match=message) as rejection:
            request = completion(prompt=[5, 6], truncate_prompt_tokens=num_kept)
            check_combinations(request)
            asyncio.run(prompts.prompts(request))
        assert (rejection.value.status, rejection.value.param) == (400, "truncate_prompt_tokens")
    with pytest.raises(ApiError, match="the limit is 32768") as rejection:
        asyncio.run(prompts.prompts(completion(prompt=NUMBERS * 100, truncate_prompt_tokens=5)))
    assert (rejection.value.status, rejection.value.param) == (400, "prompt")


def test_special_tokens_are_added_to_completions_and_not_to_chats_unless_the_request_says_so(
    prompts: PromptTokenizer,
) -> None:
    prompts.tokenizer.chat_template, bos = "{{ messages[0].content }}", prompts.tokenizer.bos_token_id
    for request, is_added in (
        (completion(prompt="Hi"), True), (completion(prompt="Hi", add_special_tokens=False), False),
        (chat(), False), (chat(add_special_tokens=True), True),
    ):  # fmt: skip
        [prompt] = asyncio.run(prompts.prompts(request))
        assert (prompt.token_ids[0] == bos) == is_added
        fields = {**request.model_dump(include={"prompt", "messages", "add_special_tokens"}, exclude_unset=True)}
        tokenize = parse(TokenizeRequest, json.dumps(fields).encode())
        assert asyncio.run(prompts.tokenize(tokenize)) == prompt.token_ids


def test_variables_nested_too_deep_for_json_are_a_400(prompts: PromptTokenizer) -> None:
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    request = chat()
    request.chat_template_kwargs = {"nested": nested}
    with pytest.raises(ApiError) as rejection:
        asyncio.run(prompts.prompts(request))
    assert rejection.value.status == 400


# The form of messages

ITERATES_PARTS = """{% for m in messages %}[{{ m.role }}]{% for p in m['content'] %}{% if p['type'] == 'text' %}\
{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"""
KNOWN_ROLES = """{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}[{{ m.role }}]\
{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function | tojson }}>{% endfor %}{% endif %}{% endfor %}"""
CALLS_IF_NONE = """{% for m in messages %}[{{ m.role }}]{% if m.content is none %}{% for c in m.tool_calls %}\
<{{ c.function.name + '|' + c.function.arguments }}>{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
PRINTS_ARGUMENTS = """{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}\
<{{ c.function.name }} {{ c.function.arguments }}>{% endfor %}{% endfor %}"""
NO_CALLS = "{% for m in messages if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + NO_CALLS
FUNCTION = {"name": "clock", "arguments": '{"utc":true}'}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "noon"}
LEGACY = {"role": "assistant", "content": None, "function_call": FUNCTION}


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (ITERATES_PARTS, MESSAGES, "[user]Hi"),
        (KNOWN_ROLES, [{"role": "developer", "content": "Be brief"}, *MESSAGES], "[system]Be brief[user]Hi"),
        (
            KNOWN_ROLES, [*MESSAGES, LEGACY, {"role": "function", "name": "clock", "content": "noon"}],
            '[user]Hi[assistant]<{"name": "clock", "arguments": {"utc": true}}>[tool]noon',
        ),
        (CALLS_IF_NONE, [*MESSAGES, CALL, RESULT], '[user]Hi[assistant]<clock|{"utc":true}>[tool]noon'),
        (
            CALLS_IF_NONE, [*MESSAGES, {**CALL, "content": "Look"}, RESULT],
            '[user]Hi[assistant]Look[assistant]<clock|{"utc":true}>[tool]noon',
        ),
        (
            PRINTS_ARGUMENTS, [*MESSAGES, {**CALL, **LEGACY, "content": "A", "refusal": "b"}],
            '[user]Hi[assistant]A\nb<clock {"utc":true}><clock {"utc":true}>',
        ),
        (PRINTS_ARGUMENTS, [*MESSAGES, CALL, RESULT], '[user]Hi[assistant]<clock {"utc":true}>[tool]noon'),
        *(
            (template, [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}], "[user]a\nb")
            for template in (ITERATES_PARTS, KNOWN_ROLES)
        ),
        *(
            (KNOWN_ROLES, [*MESSAGES, {"role": "assistant", **fields}, *MESSAGES], "[user]Hi[assistant]No.[user]Hi")
            for fields in (
                {"content": [{"type": "refusal", "refusal": "No."}]}, {"content": [], "refusal": "No."},
                {"content": [{"type": "output_text", "text": "No."}]},
                {"content": [{"type": "input_text", "text": "No."}]},
            )
        ),
    ],
)  # fmt: skip
def test_each_message_reaches_the_prompt_whatever_form_the_template_expects(
    prompts: PromptTokenizer, template: str, messages: list[dict[str, Any]], text: str
) -> None:
    prompts.tokenizer.chat_template = template
    [prompt] = asyncio.run(prompts.prompts(chat(messages=messages)))
    assert prompt.text == text
    tokenize = parse(TokenizeRequest, json.dumps({"messages": messages}).encode())
    assert asyncio.run(prompts.tokenize(tokenize)) == prompt.token_ids


@pytest.mark.parametrize(
    ("template", "messages", "param", "message"),
    [
        (NO_CALLS, [*MESSAGES, CALL, RESULT], "messages[1].tool_calls", "leaves out the tool calls"),
        (NO_CALLS, [*MESSAGES, LEGACY], "messages[1].function_call", "leaves out the tool calls"),
        (NO_CALLS, [*MESSAGES, RESULT], "messages[1].role", "does not render the role 'tool'"),
        (NO_SYSTEM, [{"role": "developer", "content": "a"}, *MESSAGES], "messages[0].role", "in line 1: no system"),
        (KNOWN_ROLES, [*MESSAGES, {"role": "critic", "content": "a"}], "messages[1].role", "this message of the role"),
        ("{{ messages[0].content }}", DIALOGUE, "messages[1].role", "does not render the role 'assistant'"),
    ],
)
def test_a_message_that_cannot_reach_the_prompt_is_refused_by_name(
    prompts: PromptTokenizer, template: str, messages: list[dict[str, Any]], param: str, message: str
) -> None:
    prompts.tokenizer.chat_template = template
    tokenize = parse(TokenizeRequest, json.dumps({"messages": messages}).encode())
    for request in (prompts.prompts(chat(messages=messages)), prompts.tokenize(tokenize)):
        with pytest.raises(ApiError) as rejection:
            asyncio.run(request)
        assert (rejection.value.status, rejection.value.param) == (400, param)
        assert message in rejection.value.message


def test_all_apis_send_the_template_the_same_messages(prompts: PromptTokenizer) -> None:
    prompts.tokenizer.chat_template = CALLS_IF_NONE
    output = [{"type": "input_text", "text": text} for text in "ab"]
    result = {"type": "function_call_output", "call_id": "c", "output": output}
    use = {"type": "tool_use", "id": "c", "name": "clock", "input": {"utc": True}}
    requests = (
        chat(messages=[
            {"role": "developer", "content": "Be brief"}, *MESSAGES, CALL,
            {**RESULT, "content": [{"type": "text", "text": text} for text in "ab"]},
        ]),
        responses_request(
            input=[*MESSAGES, {"type": "function_call", "call_id": "c", **FUNCTION}, result], instructions="Be brief"
        ),
        messages_request(system="Be brief", messages=[
            *MESSAGES,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "a\nb"}]},
        ]),
    )  # fmt: skip
    texts = [asyncio.run(prompts.prompts(request))[0].text for request in requests]
    assert texts[0] == texts[1] == '[system]Be brief[user]Hi[assistant]<clock|{"utc":true}>[tool]a\nb'
    assert texts[2] == texts[0].replace('"utc":true', '"utc": true'), "the Messages API has objects instead of texts"


def test_other_apis_name_their_field_without_the_index_of_a_chat_message(prompts: PromptTokenizer) -> None:
    prompts.tokenizer.chat_template = NO_SYSTEM
    for request, field_names, param in (
        (responses_request(input=MESSAGES, instructions="a"), RESPONSES_FIELD_NAMES, "input"),
        (messages_request(messages=MESSAGES, system="a"), MESSAGES_FIELD_NAMES, "messages"),
    ):
        with pytest.raises(ApiError) as rejection:
            asyncio.run(prompts.prompts(request))
        assert rename_error(rejection.value, field_names).param == param


@pytest.mark.parametrize("template", [ITERATES_PARTS, KNOWN_ROLES])
def test_a_message_is_continued_in_each_form_of_content(prompts: PromptTokenizer, template: str) -> None:
    prompts.tokenizer.chat_template = template + "</end>"
    [prompt] = asyncio.run(prompts.prompts(chat(messages=DIALOGUE, continue_final_message=True)))
    assert prompt.text == "[user]Hi[assistant]Well"
