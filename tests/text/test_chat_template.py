"""Chat templates give the text that transformers gives, and cannot exceed their limits on time, memory and output."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from tcdeploy.errors import ModelError, UsageError
from tcdeploy.models.load import resolve_model_path
from tcdeploy.text import chat_template, chat_template_process
from tcdeploy.text.chat_template import (
    ChatTemplate,
    read_chat_template,
    render_messages,
    reserved_names,
    start_renderer,
)
from tcdeploy.text.chat_template_process import render
from tcdeploy.text.conversation import replace_chat_template
from tests.conftest import TINY

MESSAGES = [{"role": "user", "content": "Hello \N{SNOWMAN}\ud800"}, {"role": "assistant", "content": None}]
TOOL = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}


def render_chat(
    tokenizer: Any, conversation: list[dict[str, Any]], *, continue_final_message: bool = False, **variables: Any
) -> str:
    """The prompt of a conversation. Fields of messages that are None are dropped, as in transformers."""
    messages = [{name: value for name, value in message.items() if value is not None} for message in conversation]
    return render_messages(tokenizer, messages, variables, continues=continue_final_message)


@pytest.fixture(scope="module")
def tiny_tokenizer() -> Iterator[Any]:
    start_renderer()
    yield AutoTokenizer.from_pretrained(resolve_model_path(TINY))
    chat_template._process.stop()


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Iterator[Any]:
    original = tiny_tokenizer.chat_template
    yield tiny_tokenizer
    tiny_tokenizer.chat_template = original


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (None, {"add_generation_prompt": True}),
        ("{{ messages | tojson }}{{ bos_token }}{{ tools | tojson(indent=1) }}", {"tools": [TOOL]}),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}{{ mode }}", {"mode": {"thinking": [True]}}),
        ({"default": "plain", "tool_use": "with {{ tools[0].function.name }}"}, {"tools": [TOOL]}),
    ],
)
def test_the_text_is_that_of_transformers(tokenizer: Any, template: Any, variables: dict[str, Any]) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    assert render_chat(tokenizer, MESSAGES, **variables) == tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, **variables
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{{ add_generation_prompt }}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>\n{% endfor %}",
    ],
    ids=["kept", "stripped"],
)
@pytest.mark.parametrize("final", ["Once upon", "Once upon \n", " \n", "", "one</>one"])
def test_a_continued_message_ends_the_text_as_in_transformers(tokenizer: Any, template: str, final: str) -> None:
    tokenizer.chat_template = template
    conversation = [{"role": "user", "content": final}, {"role": "assistant", "content": final}]
    text = render_chat(tokenizer, conversation, continue_final_message=True)
    assert text == tokenizer.apply_chat_template(conversation, tokenize=False, continue_final_message=True)
    assert (
        text.endswith("<assistant>" + (final.rstrip() if "trim" in template else final).lstrip()) or not final.strip()
    )
    assert conversation[1]["content"] == final, "the caller's messages are not changed"


def test_a_message_that_the_template_leaves_out_cannot_be_continued(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}{{ messages[-1].content[:5] }}"
    with pytest.raises(ModelError, match="leaves out the end of the final message"):
        render_chat(tokenizer, [*MESSAGES, {"role": "assistant", "content": "Once upon"}], continue_final_message=True)
    with pytest.raises(ModelError, match="has no text to continue"):
        render_chat(tokenizer, MESSAGES, continue_final_message=True)


HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ "\\n" }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1, seen=[]) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' }}{{ call.function | tojson(indent=2, sort_keys=true, separators=(',', ': ')) }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{{ ns.last }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MACROS = """{% macro wrap(text, tag='b') -%}
  <{{ tag }}>{{ text }}{{ caller() if caller }}</{{ tag }}>
{%- endmacro %}
{% for message in messages | selectattr('content') %}
    {% if loop.first %}
{{ wrap(message.content | replace('l', 'L')) }}
    {% else %}
{% call wrap(message.content, 'i') %} & more{% endcall %}
    {% endif %}
{% endfor %}
{{ dict(a=1, **{'b': 2}) }} {{ dict.fromkeys('ab', 0) }} {{ documents is none }} {{ unknown is defined }}"""
GENERATION = """{% set kept = 'outside' %}{% for message in messages %}
{% if message.role == 'assistant' %}{% generation %}
  {% set kept = 'inside' %}{{ message.content }}{{ kept }}
{% endgeneration %}{% endif %}
{% endfor %}{{ kept }}"""
REASONING = """{% for message in messages %}
{{ message.reasoning_content }}|{{ message.thinking }}|{{ message.reasoning }}{{ message.content is defined }}
{% endfor %}"""
CALL = {"function": {"name": "f", "arguments": {"é": [None, 1.5]}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Use <html> & 'quotes'"},
    {"role": "user", "content": "  Grüße \N{SNOWMAN} \U0001f600 </script> "},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"é": [None, 1.5]}}}],
    },
    {"role": "assistant", "content": "Yes", "reasoning": "as asked"},
    {"role": "assistant", "content": "No", "thinking": "", "reasoning_content": None},
    {"role": "stop", "content": "never"},
]


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (HERMES, {"tools": [TOOL], "add_generation_prompt": True}),
        (HERMES, {"tools": None, "add_generation_prompt": False}),
        (MACROS, {}),
        (GENERATION, {}),
        (REASONING, {}),
        ("{{ strftime_now('%d %b %Y') }} {{ strftime_now('') }}", {}),
        ("{{ messages[2] }}{{ messages[0].items() | list }}{{ tools }}{{ bos_token }}{{ pad_token }}", {}),
        ("  {% if true %}\n  kept\n  {% endif %}\n\n  {# note #}\nend\n", {}),
        ("{{ x.y }}{{ x['z'] | upper }}{{ [3, 1] | sort | join('-') }}{{ 'a' 'b' }}", {"x": {"y": None, "z": "ß"}}),
        ("{{ namespace(self=1, **{'a': 2}).self }}{{ namespace({'b': 3}).b }}", {}),
    ],
)
def test_templates_like_those_of_models_give_the_text_of_transformers(
    tokenizer: Any, template: str, variables: dict[str, Any]
) -> None:
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, **variables)
    assert render_chat(tokenizer, CONVERSATION, **variables) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only ' ~ messages | length) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._hidden = 1 %}",
        "{{ dict.__init__ }}{{ dict.mro() }}",
        "{{ strftime_now.__globals__ }}{{ raise_exception.__globals__.x }}",
        "{{ '{0.__class__.x}'.format(1) }}",
        "{% generation %}{% break %}{% endgeneration %}",
        "{% include 'x' %}",
        "{{ messages | tojson(default=1) }}",
        "{% for m in messages %}{{ 1 + m.role }}{% endfor %}",
    ],
)
def test_templates_that_fail_in_transformers_fail_here_with_the_same_kind_of_error(
    tokenizer: Any, template: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(Exception) as expected:  # noqa: B017 - any, of Jinja and of Python
        tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    with pytest.raises(type(expected.value)):
        render(template, CONVERSATION, {})
    with pytest.raises(ModelError, match="the chat template failed"):
        render_chat(tokenizer, CONVERSATION)


def test_the_environment_has_the_functions_and_settings_of_transformers(tokenizer: Any) -> None:
    """An addition to transformers' environment, such as a filter, must fail here."""
    theirs = chat_template_utils._compile_jinja_template("").environment
    ours = chat_template_process.make_environment()
    for name in ("filters", "tests", "globals"):
        assert getattr(ours, name).keys() == getattr(theirs, name).keys()
    for name in (
        "trim_blocks",
        "lstrip_blocks",
        "keep_trailing_newline",
        "autoescape",
        "undefined",
        "newline_sequence",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours.extensions) == len(theirs.extensions)
    assert {tag for item in ours.extensions.values() for tag in item.tags} == {
        tag for item in theirs.extensions.values() for tag in item.tags
    }


def test_the_process_imports_no_transformers(tokenizer: Any) -> None:
    command = [sys.executable, "-X", "importtime", "-c", f"import runpy; runpy.run_path({str(chat_template.SCRIPT)!r})"]
    imports = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "jinja2.sandbox" in imports
    assert not [name for name in ("transformers", "torch", "numpy", "tcdeploy") if f" {name}\n" in imports]


def test_reserved_names_are_the_arguments_of_transformers_and_jinja(tokenizer: Any) -> None:
    functions = (tokenizer.apply_chat_template, chat_template_utils.render_jinja_template)
    names = {"messages", "self"}.union(*(inspect.signature(function).parameters for function in functions))
    assert names <= reserved_names(tokenizer)


def test_variables_replace_neither_the_messages_nor_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }} {{ bos_token }}"
    variables = {"conversations": [[{"content": "Bye"}]], "chat_template": "Bye", "bos_token": "as in transformers"}
    assert render_chat(tokenizer, [{"content": "Hello"}], **variables) == "Hello as in transformers"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("\n\n{{ raise_exception('roles must alternate\\nor not') }}", "failed in line 3: roles must alternate"),
        ("x\n{% for %}", "failed in line 2: Expected an expression, got 'end of statement block'"),
        ("{{ system.name.first }}", "failed in line 1: 'system' is undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed in line 1: maximum recursion depth exceeded"),
        ("{{ 'a' * 10**10 }}", "failed: it needs more than 1024 MiB of memory"),
        ("{{ 'a' * 2**25 }}", "failed: its output has 33554432 characters; the limit is 16777216"),
    ],
)
def test_a_failing_template_is_an_error_with_its_line_and_the_first_line_of_its_message(
    tokenizer: Any, template: str, message: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ModelError) as failure:
        render_chat(tokenizer, MESSAGES)
    assert failure.value.message == f"the chat template {message}"


@pytest.mark.parametrize(
    "endless",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",  # one operation, which no exception can interrupt
    ],
)
def test_an_endless_template_is_stopped_and_the_next_one_works(
    tokenizer: Any, endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    render_chat(tokenizer, MESSAGES)  # the process has started
    stopped = chat_template._process._process
    assert stopped is not None
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.3)
    tokenizer.chat_template = endless
    started = time.monotonic()
    with pytest.raises(ModelError, match="the chat template is too slow: it did not finish within 0.3 s"):
        render_chat(tokenizer, MESSAGES)
    assert time.monotonic() - started < 5 and stopped.poll() is not None
    monkeypatch.undo()
    tokenizer.chat_template = "{{ messages[0].role }}"
    assert render_chat(tokenizer, MESSAGES) == "user"


def test_a_process_that_has_ended_is_replaced(tokenizer: Any) -> None:
    render_chat(tokenizer, MESSAGES)
    process = chat_template._process._process
    assert process is not None
    process.kill(), process.wait()
    tokenizer.chat_template = "{{ messages[0].role }}"
    assert render_chat(tokenizer, MESSAGES) == "user"


def test_a_template_sees_no_secrets_of_the_server(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCDEPLOY_API_KEY", "secret")
    chat_template._process.stop()
    render_chat(tokenizer, MESSAGES)
    process = chat_template._process._process
    assert process is not None
    environment = psutil.Process(process.pid).environ()
    assert "PATH" in environment and not any("secret" in value for value in environment.values())


def test_a_fork_renders_in_a_process_of_its_own(tokenizer: Any) -> None:
    """Two processes on one connection would read each other's replies."""
    assert render_chat(tokenizer, MESSAGES)
    child = os.fork()
    if child == 0:
        os._exit(0 if chat_template._process._process is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    tokenizer.chat_template = "{{ messages[0].role }}"
    assert render_chat(tokenizer, MESSAGES) == "user"


def test_a_tokenizer_with_a_method_of_its_own_keeps_it() -> None:
    class Mistral:
        def apply_chat_template(self, conversation: Any, tokenize: bool) -> str:
            if not conversation:
                raise ValueError("no messages")
            return f"[INST]{conversation[0]['content']}"

    assert render_chat(Mistral(), [{"content": "Hi"}]) == "[INST]Hi"
    with pytest.raises(ModelError, match="the chat template failed: no messages"):
        render_chat(Mistral(), [])


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, UsageError, "cannot be read: No such file"), (b"\xff", UsageError, "cannot be read: .*utf-8"),
        (b"a\n{% for m in messages %}\n{{ m.content }\n", ModelError, "has an error in line 3: unexpected '}'"),
        (b"{{ bos_token }}\n\n{{ messages | to_json }}", ModelError, "error in line 3: No filter named 'to_json'"),
        (b"{{ " + b"(" * 5000, ModelError, "nested too deep"),
    ],
)  # fmt: skip
def test_a_template_file_that_is_missing_or_broken_is_an_error_with_its_line(
    tmp_path: Path, content: bytes | None, error: type[Exception], message: str
) -> None:
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message) as failure:
        read_chat_template(path)
    assert str(path) in str(failure.value)


def test_a_template_that_fails_for_a_user_message_does_not_replace_the_models(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}\n{{ message.content | trim }}{{ now() }}{% endfor %}")
    with pytest.raises(ModelError, match="template.jinja: the chat template failed in line 2: 'now' is undefined"):
        replace_chat_template(tokenizer, read_chat_template(path))


def test_a_tokenizer_that_renders_in_python_takes_no_template() -> None:
    class Mistral:
        def apply_chat_template(self, conversation: Any, tokenize: bool) -> str:
            return "[INST]"

    with pytest.raises(ModelError, match="Mistral renders chats in Python"):
        replace_chat_template(Mistral(), ChatTemplate(Path("a"), "{{ messages }}"))
