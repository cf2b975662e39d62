"""Conversations are rendered in the template's form, and messages that it leaves out are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tcdeploy.errors import ModelError
from tcdeploy.models.load import resolve_model_path
from tcdeploy.text import chat_template, conversation
from tcdeploy.text.chat_template import ChatTemplate
from tcdeploy.text.conversation import render_conversation, replace_chat_template
from tcdeploy.text.template_form import RefusedMessageError, TemplateForm, make_outline
from tests.conftest import TINY
from tests.template_families import TEMPLATES

USER = {"role": "user", "content": "Hello"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"utc": true}'}}],
}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Any]:
    yield AutoTokenizer.from_pretrained(resolve_model_path(TINY))
    chat_template._process.stop()


def clock(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_a_template_that_looks_up_names_of_calls_in_the_tools_can_be_checked(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES["names"]
    text = render_conversation(tokenizer, [USER, CALL, USER], {"tools": [clock("clock"), clock("other")]})
    assert '{"name": "clock", "arguments": {"utc": true}}' in text
    assert render_conversation(tokenizer, [USER, CALL, USER], {"tools": [clock("other"), clock("clock")]}) != ""
    with pytest.raises(ModelError, match="unknown tool"):
        render_conversation(tokenizer, [USER, CALL, USER], {"tools": [clock("other")]})


def test_a_result_whose_name_is_no_text_is_rendered(tokenizer: Any) -> None:
    """Unknown fields of messages may be any JSON."""
    tokenizer.chat_template = TEMPLATES["chatml"]
    result = {"role": "function", "name": ["clock"], "content": "Done"}
    assert "Done" in render_conversation(tokenizer, [USER, result], {})


def test_the_refusal_of_a_template_names_the_role_that_it_never_renders(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES["no system"]
    with pytest.raises(RefusedMessageError, match="failed in line 1: no system role") as refusal:
        render_conversation(tokenizer, [{"role": "system", "content": "Be brief"}, USER], {})
    assert (refusal.value.number, refusal.value.field) == (0, "role")
    with pytest.raises(ModelError, match="roles must alternate") as failure:
        render_conversation(tokenizer, [USER, USER], {})
    assert not isinstance(failure.value, RefusedMessageError)


def test_blank_texts_and_reasoning_need_not_be_in_the_prompt(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES["branches"]
    earlier = {"role": "assistant", "content": "<think>Hm</think>Yes", "reasoning_content": "Hm"}
    blank = {"role": "assistant", "content": " \n"}
    assert render_conversation(tokenizer, [USER, earlier, USER, blank, USER], {}).count("Hm") == 0


def test_text_before_the_end_of_reasoning_may_be_dropped_from_answers_only(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES["splits all"]
    answer = {"role": "assistant", "content": "Hm</think>Yes"}
    assert render_conversation(tokenizer, [USER, answer, USER], {}) == "<user>Hello<assistant>Yes<user>Hello"
    with pytest.raises(RefusedMessageError) as refusal:
        render_conversation(tokenizer, [USER, answer, {"role": "user", "content": "What is </think>?"}], {})
    assert (refusal.value.number, refusal.value.field) == (2, "role")


def test_the_outline_of_a_conversation_is_short_and_is_rendered_once_for_all_of_its_shape(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"role": "user", "content": "word " * 100_000}
    outline, _ = make_outline(TemplateForm().messages([long]))
    assert len(str(outline)) < 100
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    rendered = []
    render = conversation.render_messages
    monkeypatch.setattr(conversation, "render_messages", lambda *a, **k: rendered.append(a) or render(*a, **k))
    for text in ("a", "b", "c"):
        assert render_conversation(tokenizer, [{"role": "user", "content": text}], {"x": 1}) == text
    assert len(rendered) == 4, "three prompts and one outline"


@pytest.mark.parametrize("template", ["{{ messages[0].content[0]['text'] + '' }}", "no message at all"])
def test_a_template_of_another_form_or_without_messages_can_replace_the_models(tokenizer: Any, template: str) -> None:
    replace_chat_template(tokenizer, ChatTemplate(Path("a.jinja"), template))
    assert tokenizer.chat_template == template
