"""Tool calls: what the model may call goes into its chat template, and its answer is read back by transformers.

Each model family writes a call in its own markup. Which, its tokenizer's `response_template` says, or transformers' own
table of families; `ResponseParser` reads by it. No parser of ours: a model without either is refused by name. The
parser is fed while tokens arrive, and whole answers are its pieces put together. Content is told as it comes; what may
be the beginning of a call is held back, and a call is told whole, when it is complete.

A call that is cut or is no JSON is told to nobody, only counted and logged: a client would run it. After it nothing is
read any more. That arguments satisfy their schema is certain only where a call is forced (`tool_choice`): then a
grammar holds the answer to the family's markup around that schema. Such a grammar is made where the family writes plain
JSON between two fixed marks, and is used only after the parser has read an example of it behind this very prompt.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tcdeploy.server.protocol import ChatRequest, bad_request
from tcdeploy.server.structured_output import with_bounded_whitespace

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # what response templates call it
PROBE_TOOL_NAME = "a_tool_to_look_for"
log = logging.getLogger("tcdeploy.server")


class ParsedToolCall(NamedTuple):
    number: int  # within its answer
    id: str
    name: str
    arguments: str  # JSON

    def json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ParsedDelta(NamedTuple):
    """What some text of an answer turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedToolCall, ...] = ()


class Markup(NamedTuple):
    """How a family writes a call: `opening`, a JSON object with these two keys, `closing`."""

    opening: str
    closing: str
    name_key: str
    arguments_key: str

    def example(self, name: str) -> str:
        return f"{self.opening}{json.dumps({self.name_key: name, self.arguments_key: {}})}{self.closing}"


class ToolSupport:
    """What one model can do with tools; `unsupported_reason` says why it can do nothing."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        self._template = _response_template(tokenizer, model)
        self.unsupported_reason = ""
        if not _template_renders_tools(tokenizer):
            self.unsupported_reason = "the model's chat template does not take tools"
        elif "tool_calls" not in (self._template or {}).get("fields", {}):
            self.unsupported_reason = "the model's tokenizer has no response template by which to read tool calls"
        else:
            self.unsupported_reason = self._template_error()

    def check(self, tools: list[dict[str, Any]]) -> None:
        """Raises ApiError that names `tools` where there are some, and this model cannot use them."""
        if tools and self.unsupported_reason:
            raise bad_request(f"tools cannot be used: {self.unsupported_reason}", "tools", "unsupported_parameter")

    def tool_parser(self, request: ChatRequest, prompt: str) -> ToolCallParser:
        """For one answer to `prompt`, the rendered chat: templates write the beginning of some answers themselves."""
        parser = _parser(self._template, prompt, request.usable_tools)
        return ToolCallParser(parser, 1 if request.parallel_tool_calls is False else None)

    def grammar(self, request: ChatRequest, prompt: str) -> str:
        """What holds an answer to calls of `request.forced_tools`, as llguidance's Lark. Raises ApiError."""
        functions = [tool["function"] for tool in request.forced_tools]
        markup = find_markup(self._template or {})
        if markup is None or not self._parses_example(markup.example(functions[0]["name"]), request, prompt):
            raise bad_request(
                "tool_choice can be none or auto here: this model's way of writing a call, behind this prompt, is not "
                "one that a grammar can hold it to", "tool_choice", "unsupported_parameter",
            )  # fmt: skip
        delimiters = self._grammar_terminal(markup.opening), self._grammar_terminal(markup.closing)
        return call_grammar(functions, markup, delimiters, request.allows_multiple_calls)

    def _parses_example(self, example: str, request: ChatRequest, prompt: str) -> bool:
        """Whether it is one call and nothing else."""
        tool_parser = self.tool_parser(request, prompt)
        first, last = tool_parser.push(example), tool_parser.finish()
        return len(first.calls + last.calls) == 1 and not (first.content or last.content or tool_parser.is_broken)

    def _template_error(self) -> str:
        try:
            _parser(self._template, "", [])
        except (ImportError, ValueError) as error:
            return f"the response template of the model's tokenizer cannot be used: {error}"
        return ""

    def _grammar_terminal(self, delimiter: str) -> str:
        """A mark that is one token is written as that token: special ones have no text in a grammar."""
        ids = self._tokenizer(delimiter, add_special_tokens=False).input_ids
        return f"<[{ids[0]}]>" if len(ids) == 1 else json.dumps(delimiter)


class ToolCallParser:
    """One answer, read while it arrives."""

    def __init__(self, parser: Any, max_calls: int | None = None) -> None:
        self._parser, self._max_calls = parser, max_calls
        self._calls = 0
        self._content, self._reasoning = _WhitespaceTrimmer(), _WhitespaceTrimmer()
        self.is_broken = False

    @property
    def has_calls(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> ParsedDelta:
        return self._parse(lambda: self._parser.feed(text))

    def finish(self, was_truncated: bool = False) -> ParsedDelta:
        """At the end of the tokens. `was_truncated`: it was not the model that ended it, so an open call is half a call."""
        return self._parse(lambda: self._final_events(was_truncated))

    def _final_events(self, was_truncated: bool) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self._parser.finalize()[1]
        if was_truncated and any(_ends_tool_calls(event) for event in events):
            raise ValueError("the answer was cut within it")
        return events

    def _parse(self, advance: Callable[[], list[dict[str, Any]]]) -> ParsedDelta:
        if self.is_broken:
            return ParsedDelta()
        try:
            return self._collect(advance())
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # what templates do with what is no call
            self.is_broken = True
            log.warning("a tool call could not be read: %.200s", error)
            return ParsedDelta()

    def _collect(self, events: list[dict[str, Any]]) -> ParsedDelta:
        content = reasoning = ""
        calls: list[ParsedToolCall] = []
        for event in events:
            if _ends_tool_calls(event):
                calls += self._tool_calls(event["value"])
            elif event["type"] == "region_chunk" and event["field"] == "content":
                content += self._content.push(event["text"])
            elif event["type"] == "region_chunk" and event["field"] in REASONING_FIELDS:
                reasoning += self._reasoning.push(event["text"])
        return ParsedDelta(content, reasoning, tuple(calls))

    def _tool_calls(self, value: Any) -> Iterator[ParsedToolCall]:
        for one in value if isinstance(value, list) else [value]:
            name, arguments = one["function"]["name"], one["function"].get("arguments")
            if not isinstance(name, str):
                raise TypeError(f"a function is named {name!r}")
            if self._calls == self._max_calls:
                return
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
            yield ParsedToolCall(self._calls, f"call_{uuid.uuid4().hex}", name, text)
            self._calls += 1


class _WhitespaceTrimmer:
    """Text in pieces without the white space around all of it, which stands there for the markup's sake."""

    def __init__(self) -> None:
        self._trailing_space: str | None = None  # None: nothing has come

    def push(self, text: str) -> str:
        whole = text.lstrip() if self._trailing_space is None else self._trailing_space + text
        told = whole.rstrip()
        if told or self._trailing_space is not None:
            self._trailing_space = whole[len(told) :]
        return told


def _ends_tool_calls(event: dict[str, Any]) -> bool:
    return event["type"] == "region_close" and event["field"] == "tool_calls"


def _parser(template: dict[str, Any] | None, prompt: str, tools: list[dict[str, Any]]) -> Any:
    from transformers.utils.chat_parsing import ResponseParser

    return ResponseParser(template, prefix=prompt, tools=tools)


def find_markup(template: dict[str, Any]) -> Markup | None:
    """Of a response template whose calls are JSON between fixed marks; None of any other."""
    field = template.get("fields", {}).get("tool_calls", {})
    opening, closing = _literal_delimiter(field, "open"), _literal_delimiter(field, "close")
    if opening is None or closing is None or field.get("content") != "json" or field.get("content_args"):
        return None
    shape = field.get("transform")
    function = shape.get("function") if isinstance(shape, dict) else None
    if function == "{content}":
        return Markup(opening, closing, "name", "arguments")
    if not isinstance(function, dict):
        return None
    keys = [re.fullmatch(r"\{content\.(\w+)\}", str(function.get(key))) for key in ("name", "arguments")]
    return Markup(opening, closing, *(key[1] for key in keys if key)) if all(keys) else None


def call_grammar(
    functions: list[dict[str, Any]], markup: Markup, delimiters: tuple[str, str], allow_multiple: bool
) -> str:
    """One call of one of `functions`, or several in a row. Each schema stays a document, so that its $refs hold."""
    bodies, rules = [], []
    for number, function in enumerate(functions):
        head = f"{{{json.dumps(markup.name_key)}: {json.dumps(function['name'])}, {json.dumps(markup.arguments_key)}: "
        bodies.append(f'{json.dumps(head)} arguments_{number} "}}"')
        schema = with_bounded_whitespace(function.get("parameters") or {"type": "object"})
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    head = "start: call (space call)*" if allow_multiple else "start: call"
    call = f"call: {delimiters[0]} space ({' | '.join(bodies)}) space {delimiters[1]}"
    return "\n".join([head, call, *rules, r"space: /[ \n]{0,2}/"])


def _literal_delimiter(field: dict[str, Any], kind: str) -> str | None:
    """The text that opens or closes a region, where it is one; the pattern may have white space before it."""
    literal = field.get(kind)
    if isinstance(literal, list):
        return str(literal[0])
    if literal is not None:
        return str(literal)
    pattern = str(field.get(f"{kind}_pattern", "")).removeprefix(r"\s*")
    return pattern if pattern and re.escape(pattern) == pattern else None


def _template_renders_tools(tokenizer: Any) -> bool:
    """Whether a tool can be seen in what the chat template makes of it."""
    tool = {
        "type": "function",
        "function": {"name": PROBE_TOOL_NAME, "description": "", "parameters": {"type": "object"}},
    }
    message = {"role": "user", "content": "?"}
    try:
        return PROBE_TOOL_NAME in tokenizer.apply_chat_template([message], tools=[tool], tokenize=False)
    except Exception:  # no template, or one that refuses in Jinja's words
        return False


def _response_template(tokenizer: Any, model: Any) -> dict[str, Any] | None:
    """The tokenizer's own, or that of transformers' table (an internal of its server; None where it has moved)."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return dict(own)
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:
        return None
    found = get_response_template(tokenizer, model)
    return None if found is None else dict(found)
