"""Detection of the format of tool calls and reasoning from a chat template."""

from __future__ import annotations

import re

import pytest

from tcdeploy.text.tool_formats import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    REASONING_MARKS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    TOOL_MARKS,
    reasoning_format,
    template_text,
    tool_format,
)

# The lines of chat templates that write calls or explain their format, in the words of the families' templates.
TEMPLATES = {
    "hermes": """For each function call, return a json object within <tool_call></tool_call> XML tags:
        {{ '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) }}""",
    "llama3_json": """Given the following functions, respond with a JSON for a function call.
        Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
        {{- '<|python_tag|>' + tool_call.name + ".call(" }}""",
    "mistral": """{{- '[TOOL_CALLS]' + tool_call.function.name + '[ARGS]' + tool_call.function.arguments | tojson }}""",
    "deepseek_v3": """{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>' + tool.name }}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}""",
    "qwen3_coder": """{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
        {{- '<parameter=' + args_name + '>' }}The arguments are between the tags.""",
    "pythonic": """Respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...)]""",
    "openai": """{{- "<|start|>assistant<|channel|>commentary to=functions." + tool_call.name }}
        {{- " json<|message|>" }}""",
}
REASONING = {
    "deepseek_r1": "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}",
    "mistral": "{{- '[THINK]' + block.thinking + '[/THINK]' }}",
    "openai_gptoss": """{{- "<|start|>assistant<|channel|>analysis<|message|>" ~ message.thinking ~ "<|end|>" }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_calls_is_detected_from_the_chat_template(name: str) -> None:
    assert tool_format("auto", TEMPLATES[name]) is TOOL_FORMATS[name]
    assert tool_format("auto", template_text({"default": "{{ messages }}", "tool_use": TEMPLATES[name]})) is not None


@pytest.mark.parametrize("name", REASONING)
def test_the_format_of_reasoning_is_detected_from_the_chat_template(name: str) -> None:
    assert reasoning_format("auto", REASONING[name]) is REASONING_FORMATS[name]
    assert reasoning_format("none", REASONING[name]) is None


def test_no_format_is_detected_from_other_templates() -> None:
    glm = "<tool_call>{{ tc.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value> arguments"
    for template in ("", "{{ messages[0].content }}<|im_end|>", glm, "<|tool_call>call:{{ name }}<tool_call|>"):
        assert tool_format("auto", template) is None
    assert reasoning_format("auto", "{{ '<|assistant|><think>' }}") is REASONING_FORMATS["deepseek_r1"]
    assert template_text(None) == "" and reasoning_format("auto", "{{ messages }}") is None


def test_a_name_selects_its_format_whatever_the_template_contains() -> None:
    for parser, name in {**TOOL_ALIASES, **{name: name for name in TOOL_FORMATS}}.items():
        assert tool_format(parser, TEMPLATES["mistral"]) is TOOL_FORMATS[name]
    for parser, name in {**REASONING_ALIASES, **{name: name for name in REASONING_FORMATS}}.items():
        assert reasoning_format(parser, "") is REASONING_FORMATS[name]
    assert {name for _, name in TOOL_MARKS} == TOOL_FORMATS.keys()
    assert {name for _, name in REASONING_MARKS} == REASONING_FORMATS.keys()


def test_headers_are_valid_and_contain_their_delimiters() -> None:
    for item in TOOL_FORMATS.values():
        re.compile(item.header)
        assert all(mark in item.header or re.escape(mark) in item.header for mark in item.header_delimiters)
