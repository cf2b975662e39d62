"""Chat templates give the text that transformers gives, and cannot exceed their limits on time, memory and output."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tcdeploy.errors import ModelError
from tcdeploy.models import chat_template
from tcdeploy.models.chat_template import render_chat, start_renderer
from tcdeploy.models.load import resolve_model_path
from tests.conftest import TINY

MESSAGES = [{"role": "user", "content": "Hello \N{SNOWMAN}\ud800"}, {"role": "assistant", "content": None}]
TOOL = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}


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
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"PATH=" in environment and b"secret" not in environment


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
