"""The chat template of the embedded model: what it was trained on, and tools and reasoning in a format of Qwen's."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from tcdeploy.errors import ModelError
from tcdeploy.models.load import resolve_model_path
from tcdeploy.server.output.parser import split_by_kind
from tcdeploy.server.output.tag_parser import TagParser
from tcdeploy.server.output.tools import ToolSupport
from tcdeploy.text.conversation import render_conversation
from tcdeploy.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from tests.conftest import TINY

USER = {"role": "user", "content": " What is a list?\n"}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
ANSWERED = [
    USER,
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model_path(TINY))


def prompt(tokenizer: Any, *messages: dict[str, Any], **variables: Any) -> str:
    return render_conversation(tokenizer, messages, {"add_generation_prompt": True, **variables})


def test_without_tools_the_prompt_is_the_one_of_the_training(tokenizer: Any) -> None:
    asked = "<|begin|><|user|>What is a list?<|end|>"
    assert prompt(tokenizer, USER) == prompt(tokenizer, USER, tools=None) == asked + "<|assistant|>"
    assert prompt(tokenizer, USER, add_generation_prompt=False, enable_thinking=True) == asked
    conversation = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "A"}, USER]
    expected = "<|begin|><|system|>Be brief.<|end|><|user|>What is a list?<|end|><|assistant|>A<|end|>"
    assert prompt(tokenizer, *conversation) == expected + "<|user|>What is a list?<|end|><|assistant|>"
    with pytest.raises(ModelError, match="the roles system, user, assistant and tool"):
        prompt(tokenizer, USER, {"role": "critic", "content": "no"})


def test_tools_calls_and_results_are_rendered_in_a_format_that_the_server_parses(tokenizer: Any) -> None:
    text = prompt(tokenizer, *ANSWERED, tools=[WEATHER])
    assert tool_format("auto", tokenizer.chat_template) is TOOL_FORMATS["hermes"]
    assert ToolSupport(tokenizer, "llama").unsupported_reason == ""
    assert text.startswith('<|begin|><|system|>Call a tool with <tool_call>{"name"')
    assert '\n{"name": "get_weather", "parameters": {"type": "object"}}<|end|><|user|>' in text
    assert text.endswith("<|end|><|user|><tool_response>sunny</tool_response><|end|><|assistant|>")
    answer = text.split("<|assistant|>")[1].split("<|end|>")[0]
    parser = TagParser(TOOL_FORMATS["hermes"], None, [WEATHER])
    output = split_by_kind([*parser.push(answer), *parser.finish()])
    assert output.content == "Let me see."
    assert [(call.name, call.arguments) for call in output.calls] == [("get_weather", '{"city": "Oslo"}')]


def test_enable_thinking_opens_the_reasoning(tokenizer: Any) -> None:
    assert reasoning_format("auto", tokenizer.chat_template) is REASONING_FORMATS["deepseek_r1"]
    assert prompt(tokenizer, USER, enable_thinking=True).endswith("<|assistant|><think>\n")
    assert prompt(tokenizer, USER, enable_thinking=False).endswith("<|assistant|>")
