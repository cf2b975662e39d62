"""Finds the form of messages that a chat template expects, by rendering small conversations with it.

Each step of the probe has candidate forms, the most common first, and selects the first one with which the template
renders all messages of a conversation. The conversations are legal ones, because many templates raise an exception if
roles do not alternate or if a result has no call. A template that fails for a form does not support it. If a template
does not even render a user message, for example because it requires a variable, the default form is used. Some 15
conversations are rendered; the limit is PROBE_SECONDS and one more rendering. A probe that exceeds it has not learned
what the template supports, so it is repeated when the form is needed again, MAX_PROBES times in all.

The source text is not searched for roles: a template may mention a role to reject it. Does not import torch.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

from tcdeploy.errors import ModelError
from tcdeploy.text.chat_template import render_messages, renders_in_python
from tcdeploy.text.template_form import Arguments, CallContent, TemplateForm, render_outline

PROBE_SECONDS = 2.0
MAX_PROBES = 3  # of a slow template; each one delays the requests that wait for a rendering
log = logging.getLogger("tcdeploy.models")
PROBE_TOOL_NAME = "probe_tool_name"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_TOOL_NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ARGUMENTS_REPR = "{'city': "  # how Python prints the arguments of CALL
UNKNOWN_ROLE = "unknownrole"
USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Hello"}
DEVELOPER = {"role": "developer", "content": "Hello"}
CALL = {
    "role": "assistant",
    "tool_calls": [  # Mistral's templates require ids of 9 letters and digits
        {"id": "call00001", "type": "function", "function": {"name": PROBE_TOOL_NAME, "arguments": {"city": "Rome"}}}
    ],
}
ARGUMENTS: tuple[Arguments, ...] = get_args(Arguments)
CALL_CONTENTS: tuple[CallContent, ...] = get_args(CallContent)
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "sunny"}


def template_form(tokenizer: Any, *, has_tools: bool = False) -> TemplateForm:
    """The form of the template that the tokenizer uses with or without tools. Probes each template once, if in time."""
    tools = [PROBE_TOOL] if has_tools else None
    try:
        template = "" if renders_in_python(tokenizer) else tokenizer.get_chat_template(None, tools)
    except ValueError:  # no template
        return TemplateForm()
    # A late probe is not repeated from the cache, because the number of late ones is a part of its key.
    return _probe(tokenizer, template, has_tools, min(_num_late_probes[template, has_tools], MAX_PROBES - 1))


_num_late_probes: Counter[tuple[str, bool]] = Counter()


@functools.lru_cache(maxsize=16)
def _probe(tokenizer: Any, template: str, has_tools: bool, num_late: int) -> TemplateForm:
    probe = _Probe(tokenizer, template, has_tools)
    form = probe.form()
    if probe.is_late:
        _num_late_probes[template, has_tools] = num_late + 1
        log.warning(
            "the probe of the chat template took over %g s, so tools and some messages may be refused%s",
            PROBE_SECONDS, "" if num_late + 1 == MAX_PROBES else "; the next request repeats it",
        )  # fmt: skip
    return form


class _Probe:
    def __init__(self, tokenizer: Any, template: str, has_tools: bool) -> None:
        self._tokenizer = tokenizer
        self._template = template  # "" if the tokenizer renders in Python
        self._variables = {"add_generation_prompt": True, **({"tools": [PROBE_TOOL]} if has_tools else {})}
        self._deadline = math.inf
        self._unrendered: set[str] = set()

    def form(self) -> TemplateForm:
        user_form = self._first(_contents(TemplateForm(), "user"), USER)
        if user_form is None:
            return TemplateForm(renders_tools=self._renders_tools(TemplateForm()))
        renders_tools = self._renders_tools(user_form)  # first, so that tools are not refused if the time runs out
        form = self._select(user_form, "assistant", _contents(user_form, "assistant"), USER, ASSISTANT, USER)
        form = self._with_instructions(form)
        form = self._with_calls(form)
        return replace(form, renders_tools=renders_tools, unrendered=frozenset(self._unrendered))

    @property
    def is_late(self) -> bool:
        """Whether the time is over, so that renderings may have been left out."""
        return time.monotonic() > self._deadline

    def _with_instructions(self, form: TemplateForm) -> TemplateForm:
        form = self._select(form, "system", _contents(form, "system"), SYSTEM, USER)
        known = replace(form, developer_role="developer")
        candidates = _contents(known, "system") if "system" in self._unrendered else (known,)
        knowing = next(filter(self._knows_developer, candidates), None)
        if knowing is not None:
            form = replace(knowing, system_role="developer") if "system" in self._unrendered else knowing
            self._unrendered.discard("system")
        elif "system" in self._unrendered:
            self._unrendered.add("developer")
        merging = replace(form, merges_instructions=True)
        for other in (SYSTEM, DEVELOPER):
            form = self._first((form, merging), SYSTEM, other, USER) or form
        return form

    def _knows_developer(self, form: TemplateForm) -> bool:
        """Whether the role `developer` is rendered, and differently from an unknown role.

        A template that prints the name of any role belongs to a model that was trained with `system`.
        """
        if not self._renders(form, DEVELOPER, USER):
            return False
        unknown = replace(form, developer_role=UNKNOWN_ROLE)
        texts = [self._text(candidate, DEVELOPER, USER).lower() for candidate in (form, unknown)]
        return texts[0] != texts[1].replace(UNKNOWN_ROLE, "developer")

    def _with_calls(self, form: TemplateForm) -> TemplateForm:
        candidates = [
            replace(candidate, arguments=arguments, call_content=content)
            for candidate, arguments, content in itertools.product(_contents(form, "tool"), ARGUMENTS, CALL_CONTENTS)
        ]
        if self._template and "tool_calls" not in self._template:
            candidates = candidates[:1]  # such a template can only print whole messages; this saves 20 renderings
        call_form = self._first(candidates, USER, CALL, RESULT, checked=1)
        call_form = call_form or self._first(candidates[: len(candidates) // 2 or 1], USER, CALL, USER, checked=1)
        if call_form is None:
            self._unrendered.add("tool call")
            return self._select(form, "tool result", _contents(form, "tool"), USER, ASSISTANT, RESULT)
        call_form = self._select(call_form, "tool result", _contents(call_form, "tool"), USER, CALL, RESULT)
        answer = {**CALL, "content": "Hello"}
        splitting = replace(call_form, splits_calls=True)
        return self._first((call_form, splitting), USER, answer, RESULT, checked=1) or call_form

    def _renders_tools(self, form: TemplateForm) -> bool:
        return "tools" in self._variables and PROBE_TOOL_NAME in self._text(form, USER)

    def _select(
        self, form: TemplateForm, kind: str, candidates: Iterable[TemplateForm], *conversation: dict[str, Any]
    ) -> TemplateForm:
        """The first candidate that renders the conversation. If there is none, `kind` is unrendered."""
        selected = self._first(candidates, *conversation)
        if selected is None:
            self._unrendered.add(kind)
        return selected or form

    def _first(
        self, candidates: Iterable[TemplateForm], *conversation: dict[str, Any], checked: int | None = None
    ) -> TemplateForm | None:
        return next((form for form in candidates if self._renders(form, *conversation, checked=checked)), None)

    def _renders(self, form: TemplateForm, *conversation: dict[str, Any], checked: int | None = None) -> bool:
        """Whether all messages, or the one at the index `checked`, are in the prompt, and not as Python objects."""
        messages = form.messages(conversation)
        try:
            text, missing = render_outline(messages, self._render)
        except ModelError:
            return False
        if any(checked in (None, place.number) for place in missing) or "'type': 'text'" in text:
            return False
        return form.arguments == "json" or ARGUMENTS_REPR not in text

    def _text(self, form: TemplateForm, *conversation: dict[str, Any]) -> str:
        """The prompt, or "" if the template fails."""
        try:
            return self._render([message.fields for message in form.messages(conversation)])
        except ModelError:
            return ""

    def _render(self, messages: list[dict[str, Any]]) -> str:
        """Render within the time limit of the probe.

        The limit counts from the end of the first rendering, which may wait until the renderer's process has started.
        If a rendering fails, the limit counts from its start, because it may have taken RENDER_SECONDS.
        """
        counted_from = time.monotonic()
        if counted_from > self._deadline:
            raise ModelError("the probe of the chat template has exceeded its time")
        try:
            text = render_messages(self._tokenizer, messages, self._variables)
            counted_from = time.monotonic()
            return text
        finally:
            self._deadline = min(self._deadline, counted_from + PROBE_SECONDS)


def _contents(form: TemplateForm, role: str) -> tuple[TemplateForm, TemplateForm]:
    """The form with the content of `role` as text, and as parts."""
    return (replace(form, part_roles=form.part_roles - {role}), replace(form, part_roles=form.part_roles | {role}))
