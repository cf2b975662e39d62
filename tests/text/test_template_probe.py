"""The probe finds the form of each template, within its time, and never fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from tcdeploy.models.load import resolve_model_path
from tcdeploy.server.output.tools import ToolSupport
from tcdeploy.text import chat_template, template_probe
from tcdeploy.text.template_form import TemplateForm
from tcdeploy.text.template_probe import template_form
from tests.conftest import TINY
from tests.template_families import ALL_PARTS, FORMS, ONLY_RESULTS, TEMPLATES, templates_of_transformers


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Any]:
    yield AutoTokenizer.from_pretrained(resolve_model_path(TINY))
    chat_template._process.stop()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_of_a_template_is_found(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    assert template_form(tokenizer, has_tools=True) == FORMS[name]


def test_the_forms_of_transformers_templates_are_found(tokenizer: Any) -> None:
    forms = {}
    for name, template in templates_of_transformers().items():
        tokenizer.chat_template = template
        forms[name.partition(":")[0]] = template_form(tokenizer, has_tools=True)
    expected = {
        "processing_llama4": TemplateForm(renders_tools=True),
        "processing_qwen2_audio": TemplateForm(unrendered=ONLY_RESULTS),
        "processing_smolvlm": TemplateForm(part_roles=ALL_PARTS, unrendered=ONLY_RESULTS),
    }
    known = forms.keys() & expected.keys()
    assert known and {name: forms[name] for name in known} == {name: expected[name] for name in known}


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{{ 1 / 0 }}", "{% for %}", "text", ""])
def test_a_template_that_renders_no_message_has_the_default_form(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    assert template_form(tokenizer) == template_form(tokenizer, has_tools=True) == TemplateForm()


def test_a_template_is_probed_once_with_tools_and_once_without(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer.chat_template = {"default": TEMPLATES["parts"], "tool_use": TEMPLATES["chatml"]}
    forms = template_form(tokenizer), template_form(tokenizer, has_tools=True)
    assert forms == (FORMS["parts"], FORMS["chatml"])
    monkeypatch.setattr(template_probe, "_Probe", None)
    assert (template_form(tokenizer), template_form(tokenizer, has_tools=True)) == forms


def test_a_probe_that_ran_out_of_time_is_repeated(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer.chat_template = TEMPLATES["chatml"] + "{# slow at first #}"
    with monkeypatch.context() as slow:
        slow.setattr(template_probe, "PROBE_SECONDS", -1.0)
        tools = ToolSupport(tokenizer, "llama")
        assert template_form(tokenizer, has_tools=True) != FORMS["chatml"]
    assert template_form(tokenizer, has_tools=True) == FORMS["chatml"]
    assert "does not render tools" not in tools.unsupported_reason


def test_a_slow_template_is_probed_a_few_times(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each probe blocks the requests that wait for a rendering."""
    tokenizer.chat_template = TEMPLATES["chatml"] + "{# always slow #}"
    monkeypatch.setattr(template_probe, "PROBE_SECONDS", -1.0)
    forms = [template_form(tokenizer) for _ in range(2 * template_probe.MAX_PROBES)]
    assert len(set(forms)) == 1 and len(caplog.records) == template_probe.MAX_PROBES == 3
    assert "took over" in caplog.text


def test_an_endless_template_ends_the_probe_at_its_time_limit(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = "{% if messages | length > 1 %}" + endless + "{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.5)
    monkeypatch.setattr(template_probe, "PROBE_SECONDS", 1.0)
    start = time.monotonic()
    form = template_form(tokenizer)
    assert "assistant" in form.unrendered and form.part_roles == frozenset()
    assert time.monotonic() - start < 15, "each of some 20 renderings took its time limit and a new process"
