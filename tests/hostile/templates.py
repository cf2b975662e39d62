"""Chat templates and conversations: each message must be in the prompt, or the request is a 400 that names it.

Templates are those of tests/template_families.py and those in transformers' source files. A conversation has one of the
shapes below, with random words as texts, and is sent with random fields of a chat request. The attack succeeds if the
request is accepted and a word, or the name or an argument of a call, is not in the prompt; if an object is printed as
Python prints it; or if the request is refused without the name of a field.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from transformers import AutoTokenizer

from tcdeploy.models.load import resolve_model_path
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest
from tcdeploy.server.apis.openai.validation import ModelLimits, check_combinations
from tcdeploy.server.generate.text_encoder import TextEncoder
from tcdeploy.server.generate.tokenization import PromptTokenizer
from tcdeploy.server.http.request_parsing import parse
from tcdeploy.server.output.tools import ToolSupport
from tests.conftest import TINY
from tests.template_families import TEMPLATES, templates_of_transformers

DEFAULT_COUNT = 5000
AROUND = ("", " ", "\n\n", '"', "<b>", "\u00e9\u2603", "{% x %}", "{{ y }}", "\\", "'")
Messages = list[dict[str, Any]]


class Words:
    """Random words, which must all be in the prompt. `spare()` returns one that templates may drop."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self.required: list[str] = []

    def spare(self) -> str:
        return "w" + "".join(self._source.choices(string.ascii_lowercase, k=9))

    def __call__(self) -> str:
        word = self.spare()
        self.required.append(word)
        return word

    def text(self) -> str:
        """A text whose word must be kept, with characters that templates strip or escape around it."""
        before, after = self._source.choices(
            ["", " ", "\n\n", '"', "<b>", "é\u2603", "{% x %}", "{{ y }}", "\\", "'"], k=2
        )
        return before + self() + after

    def call(self, **fields: Any) -> dict[str, Any]:
        name = self()
        make = self._source.choice(
            [
                lambda: "", lambda: "{}", lambda: json.dumps({"city": self()}), lambda: f'{{"x":"{self()}"}}',
                lambda: json.dumps({"city": self(), "country": self()}),
                lambda: json.dumps({"a b": {"c": [self(), None, True]}, "n": 12345678901234567890}),
            ]
        )  # fmt: skip
        arguments = make()
        return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def call(words: Words, number: int = 0, **fields: Any) -> dict[str, Any]:
    """An assistant message with a call."""
    return {"role": "assistant", "content": None, "tool_calls": [words.call(id=f"call0000{number}")], **fields}


def result(words: Words, number: int = 0, content: Any = None) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content or words.text()}


def message(role: str, words: Words, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": words.text(), **fields}


def parts(words: Words, *kinds: str) -> list[dict[str, Any]]:
    return [{"type": kind, "refusal" if kind == "refusal" else "text": words.text()} for kind in kinds]


def legacy(words: Words) -> Messages:
    name = words()
    arguments = json.dumps({"city": words()})
    return [
        {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": arguments}},
        {"role": "function", "name": name, "content": words.text()},
    ]


def user(words: Words) -> dict[str, Any]:
    return message("user", words)


def assistant(words: Words, **fields: Any) -> dict[str, Any]:
    return message("assistant", words, **fields)


SHAPES: dict[str, Callable[[Words], Messages]] = {
    "user": lambda w: [user(w)],
    "user parts": lambda w: [{"role": "user", "content": parts(w, "text", "text", "input_text")}],
    "system": lambda w: [message("system", w), user(w)],
    "system parts": lambda w: [{"role": "system", "content": parts(w, "text", "text")}, user(w)],
    "developer": lambda w: [message("developer", w), user(w)],
    "developer parts": lambda w: [{"role": "developer", "content": parts(w, "text")}, user(w)],
    "two system": lambda w: [message("system", w), message("system", w), user(w)],
    "system, developer": lambda w: [message("system", w), message("developer", w), user(w)],
    "developer, system, developer": lambda w: [
        *(message(role, w) for role in ("developer", "system", "developer")), user(w)
    ],
    "later system": lambda w: [user(w), assistant(w), message("system", w), user(w)],
    "later developer": lambda w: [message("system", w), user(w), assistant(w), message("developer", w), user(w)],
    "only system": lambda w: [message("system", w)],
    "three turns": lambda w: [user(w), assistant(w), user(w), assistant(w), user(w)],
    "two users": lambda w: [user(w), user(w)],
    "two assistants": lambda w: [user(w), assistant(w), assistant(w), user(w)],
    "assistant first": lambda w: [assistant(w), user(w)],
    "assistant last": lambda w: [user(w), assistant(w)],
    "assistant parts": lambda w: [user(w), {"role": "assistant", "content": parts(w, "output_text", "text")}, user(w)],
    "refusal part": lambda w: [user(w), {"role": "assistant", "content": parts(w, "refusal")}, user(w)],
    "refusal": lambda w: [user(w), {"role": "assistant", "content": None, "refusal": w.text()}, user(w)],
    "reasoning": lambda w: [user(w), assistant(w, reasoning_content=w.spare()), user(w)],
    "think": lambda w: [
        user(w), {"role": "assistant", "content": f"<think>{w.spare()}</think>\n\n{w()}"}, user(w)
    ],
    "think of a user": lambda w: [{"role": "user", "content": f"{w()}</think>{w()}"}],
    "two thinks": lambda w: [user(w), {"role": "assistant", "content": f"{w.spare()}</think> </think>{w()}"}, user(w)],
    "only think": lambda w: [user(w), {"role": "assistant", "content": f"<think>{w.spare()}</think>\n"}, user(w)],
    "call": lambda w: [user(w), call(w), result(w)],
    "call, empty": lambda w: [user(w), call(w, content=""), result(w), assistant(w), user(w)],
    "call, blank": lambda w: [user(w), call(w, content="\n\n"), result(w)],
    "call, no parts": lambda w: [user(w), call(w, content=[]), result(w)],
    "call and text": lambda w: [user(w), call(w, content=w.text()), result(w)],
    "call and text and reasoning": lambda w: [
        message("system", w), user(w), call(w, content=w.text(), reasoning_content=w.spare()), result(w), user(w)
    ],
    "two calls": lambda w: [
        user(w), {"role": "assistant", "tool_calls": [w.call(id="call00000"), w.call(id="call00001")]},
        result(w), result(w, 1),
    ],
    "two rounds": lambda w: [user(w), call(w), result(w), call(w, 1), result(w, 1), assistant(w)],
    "call without id": lambda w: [user(w), {"role": "assistant", "tool_calls": [w.call()]}, message("tool", w)],
    "call without result": lambda w: [user(w), call(w), user(w)],
    "call of a user": lambda w: [{**call(w), "role": "user", "content": w.text()}],
    "result parts": lambda w: [user(w), call(w), result(w, content=parts(w, "text", "text"))],
    "result without call": lambda w: [user(w), result(w), user(w)],
    "legacy call": lambda w: [user(w), *legacy(w), user(w)],
    "unknown role": lambda w: [user(w), message("critic", w), user(w)],
    "ipython": lambda w: [user(w), call(w), message("ipython", w)],
    "names": lambda w: [message("user", w, name="Ann"), assistant(w, name="Bob"), message("user", w, name="Cem")],
    "long": lambda w: [message("system", w), *(item for _ in range(40) for item in (user(w), assistant(w))), user(w)],
}  # fmt: skip


def request_fields(source: random.Random, words: Words, messages: Messages) -> dict[str, Any]:
    """Random fields of a chat request that templates may read."""
    fields: dict[str, Any] = {"messages": messages}
    if source.random() < 0.25:
        names = {call["function"]["name"] for item in messages for call in item.get("tool_calls", ())}
        fields["tools"] = [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
            for name in sorted(names | {words.spare()})
        ]
    if source.random() < 0.2:
        fields["chat_template_kwargs"] = {"enable_thinking": source.random() < 0.5, "guideline": "g"}
    if source.random() < 0.2:
        fields["continue_final_message" if messages[-1]["role"] == "assistant" else "add_generation_prompt"] = (
            messages[-1]["role"] == "assistant"
        )
    return fields


def outcome(prompts: PromptTokenizer, fields: dict[str, Any], required: list[str]) -> str:
    """ "rendered", "refused: FIELD", or what went wrong."""
    try:
        request = parse(ChatRequest, json.dumps(fields).encode())
        check_combinations(request)
        [prompt] = asyncio.run(prompts.prompts(request))
    except ApiError as error:
        param = (error.param or "").partition("[")[0]
        is_named = error.status == 400 and param in ("messages", "tools", "continue_final_message")
        return f"refused: {param}" if is_named else f"failed: {error.status} {error.param} {error.message}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    text = prompt.text or ""
    lost = [word for word in required if word not in text]
    if lost:
        return f"lost {lost} in {text!r}"
    printed = [mark for mark in ("{'city'", "{'x'", "{'type': 'text'") if mark in text]
    return f"printed {printed} in {text!r}" if printed else "rendered"


def attack(source: random.Random, count: int) -> tuple[Counter[str], set[tuple[str, str]], list[str]]:
    """The outcomes, the pairs of a template and a shape that were rendered, and the attacks that succeeded."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(TINY))
    templates = {**TEMPLATES, **templates_of_transformers()}
    limits = ModelLimits(context=1 << 17, vocab_size=2048)
    prompts = {}
    for name, template in templates.items():
        tokenizer.chat_template = template
        support = ToolSupport(tokenizer, "llama", tool_parser="hermes")
        prompts[name] = PromptTokenizer(tokenizer, TextEncoder(tokenizer), limits, name, support)
    pairs = [(name, shape) for name in templates for shape in SHAPES]
    outcomes: Counter[str] = Counter()
    rendered, succeeded = set(), []
    for number in range(count):
        name, shape = pair = pairs[number % len(pairs)]
        tokenizer.chat_template = templates[name]
        words = Words(source)
        fields = request_fields(source, words, SHAPES[shape](words))
        kind = outcome(prompts[name], fields, words.required)
        if kind == "rendered":
            rendered.add(pair)
        elif not kind.startswith("refused"):
            succeeded.append(f"{name}: {shape}: {kind}; {json.dumps(fields)}")
        outcomes[kind if kind.startswith("refused") else kind.partition(" ")[0]] += 1
    return outcomes, rendered, succeeded


def run(source: random.Random, count: int) -> dict[str, Any]:
    outcomes, rendered, succeeded = attack(source, count)
    return {
        "attacks": count, "templates": len(TEMPLATES) + len(templates_of_transformers()), "shapes": len(SHAPES),
        "outcomes": dict(sorted(outcomes.items())), "rendered_pairs": len(rendered), "succeeded": succeeded,
    }  # fmt: skip
