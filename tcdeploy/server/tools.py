"""Tool calls: tools enter the prompt through the chat template, and transformers parses the calls in the output.

Model families delimit calls differently. The format comes from the tokenizer's `response_template`, or from
transformers' table of families, and transformers' `ResponseParser` reads it; models without either reject `tools`.
After a start without transformers, the first request with tools imports it.

The parser is fed while tokens arrive. Content is streamed as it comes, except text that may start a call; a call is
sent once it is complete.

A call that is truncated or malformed is counted and logged but not returned, because a client would execute it;
parsing stops there. Arguments are guaranteed to follow their schema only if `tool_choice` forces a call: then a
grammar enforces the family's delimiters and the schema. Such a grammar is available for families that write plain
JSON between two fixed delimiters, and only if the parser reads an example of it after the same prompt.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tcdeploy.errors import ModelError
from tcdeploy.models.chat_template import render_chat
from tcdeploy.models.response_template import response_template
from tcdeploy.planning.extras import is_installed
from tcdeploy.server.protocol import ChatRequest, bad_request
from tcdeploy.server.structured_output import with_bounded_whitespace

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names in response templates
PROBE_TOOL_NAME = "probe_tool_name"
log = logging.getLogger("tcdeploy.server")


class ParsedToolCall(NamedTuple):
    number: int  # index within the choice
    id: str
    name: str
    arguments: str  # JSON

    def json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ParsedDelta(NamedTuple):
    """A piece of output, split into its parts."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedToolCall, ...] = ()


class Markup(NamedTuple):
    """A family's format of a call: `opening`, a JSON object with the two keys, `closing`."""

    opening: str
    closing: str
    name_key: str
    arguments_key: str

    def example(self, name: str) -> str:
        return f"{self.opening}{json.dumps({self.name_key: name, self.arguments_key: {}})}{self.closing}"


class ToolSupport:
    """Tool calling of one model. `unsupported_reason` is "" if the model supports it."""

    def __init__(self, tokenizer: Any, model_type: str) -> None:
        self._tokenizer = tokenizer
        self._template = response_template(tokenizer, model_type)
        if not _template_renders_tools(tokenizer):
            self.unsupported_reason = "the model's chat template does not render tools"
        elif "tool_calls" not in (self._template or {}).get("fields", {}):
            self.unsupported_reason = "the model's tokenizer has no response template that describes tool calls"
        else:
            self.unsupported_reason = ""

    def check(self, tools: list[dict[str, Any]]) -> None:
        """Raises ApiError 400 if `tools` is not empty and their calls cannot be parsed.

        The first call with tools may block for a second, because it may import transformers.
        """
        if tools and (reason := self.unsupported_reason or self._parser_problem):
            raise bad_request(f"tools are not supported: {reason}", "tools", "unsupported_parameter")

    def tool_parser(self, request: ChatRequest, prompt: str) -> ToolCallParser:
        """Parser for one choice. `prompt` is the rendered chat, which may contain the start of the output."""
        parser = _new_response_parser(self._template, prompt, request.usable_tools)
        return ToolCallParser(parser, 1 if request.parallel_tool_calls is False else None)

    def grammar(self, request: ChatRequest, prompt: str) -> str:
        """Grammar for calls of `request.forced_tools`, in llguidance's Lark syntax. Raises ApiError 400."""
        functions = [tool["function"] for tool in request.forced_tools]
        markup = find_markup(self._template or {})
        if markup is None or not self._parses_example(markup.example(functions[0]["name"]), request, prompt):
            raise bad_request(
                "tool_choice must be none or auto for this request: no grammar can enforce the model's format of tool "
                "calls after this prompt", "tool_choice", "unsupported_parameter",
            )  # fmt: skip
        delimiters = self._grammar_terminal(markup.opening), self._grammar_terminal(markup.closing)
        return call_grammar(functions, markup, delimiters, request.allows_multiple_calls)

    def _parses_example(self, example: str, request: ChatRequest, prompt: str) -> bool:
        """Whether the parser reads `example` as one call and nothing else."""
        tool_parser = self.tool_parser(request, prompt)
        first, last = tool_parser.push(example), tool_parser.finish()
        return len(first.calls + last.calls) == 1 and not (first.content or last.content or tool_parser.is_broken)

    @functools.cached_property
    def _parser_problem(self) -> str:
        """Why transformers' parser cannot be used; "" if it can."""
        if not is_installed("transformers"):
            return "transformers, which parses tool calls, is not installed (pip install 'tcdeploy[compile]')"
        try:
            _new_response_parser(self._template, "", [])
        except (ImportError, ValueError) as error:
            return f"the response template of the model's tokenizer is not usable: {error}"
        return ""

    def _grammar_terminal(self, delimiter: str) -> str:
        """A delimiter that is one token is written as its id, because special tokens have no text in a grammar."""
        ids = self._tokenizer(delimiter, add_special_tokens=False).input_ids
        return f"<[{ids[0]}]>" if len(ids) == 1 else json.dumps(delimiter)


class ToolCallParser:
    """Parses the output of one choice incrementally."""

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
        """After the last token. `was_truncated`: a limit or stop string ended the output, so an open call is cut."""
        return self._parse(lambda: self._final_events(was_truncated))

    def _final_events(self, was_truncated: bool) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self._parser.finalize()[1]
        if was_truncated and any(_ends_tool_calls(event) for event in events):
            raise ValueError("the output ends inside the call")
        return events

    def _parse(self, advance: Callable[[], list[dict[str, Any]]]) -> ParsedDelta:
        if self.is_broken:
            return ParsedDelta()
        try:
            return self._collect(advance())
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:  # raised by ResponseParser for malformed calls
            self.is_broken = True
            log.warning("cannot parse a tool call: %.200s", error)
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
        for call in value if isinstance(value, list) else [value]:
            name, arguments = call["function"]["name"], call["function"].get("arguments")
            if not isinstance(name, str):
                raise TypeError(f"the function name is {name!r}, not a string")
            if self._calls == self._max_calls:
                return
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
            yield ParsedToolCall(self._calls, f"call_{uuid.uuid4().hex}", name, text)
            self._calls += 1


class _WhitespaceTrimmer:
    """Strips the white space around a text that arrives in pieces. Models put it around delimiters."""

    def __init__(self) -> None:
        self._trailing_space: str | None = None  # None before the first text

    def push(self, text: str) -> str:
        unsent = text.lstrip() if self._trailing_space is None else self._trailing_space + text
        stripped = unsent.rstrip()
        if stripped or self._trailing_space is not None:
            self._trailing_space = unsent[len(stripped) :]
        return stripped


def _ends_tool_calls(event: dict[str, Any]) -> bool:
    return event["type"] == "region_close" and event["field"] == "tool_calls"


def _new_response_parser(template: dict[str, Any] | None, prompt: str, tools: list[dict[str, Any]]) -> Any:
    """transformers' ResponseParser, a module without stability guarantees. Raises ImportError if it has moved."""
    from transformers.utils.chat_parsing import ResponseParser

    return ResponseParser(template, prefix=prompt, tools=tools)


def find_markup(template: dict[str, Any]) -> Markup | None:
    """The markup of a response template whose calls are JSON between fixed delimiters, else None."""
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
    """Grammar of one call, or of several in a row. Each schema is a document of its own, so that its $refs resolve."""
    bodies, rules = [], []
    for number, function in enumerate(functions):
        head = f"{{{json.dumps(markup.name_key)}: {json.dumps(function['name'])}, {json.dumps(markup.arguments_key)}: "
        bodies.append(f'{json.dumps(head)} arguments_{number} "}}"')
        schema = with_bounded_whitespace(function.get("parameters") or {"type": "object"})
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    head = "start: call (space call)*" if allow_multiple else "start: call"
    call = f"call: {delimiters[0]} space ({' | '.join(bodies)}) space {delimiters[1]}"
    return "\n".join([head, call, *rules, r"space: /[ \n]{0,2}/"])


def _literal_delimiter(field: dict[str, Any], side: str) -> str | None:
    """The fixed text that opens or closes a region, or None. `side`: "open" or "close"."""
    literal = field.get(side)
    if isinstance(literal, list):
        return str(literal[0])
    if literal is not None:
        return str(literal)
    pattern = str(field.get(f"{side}_pattern", "")).removeprefix(r"\s*")
    return pattern if pattern and re.escape(pattern) == pattern else None


def _template_renders_tools(tokenizer: Any) -> bool:
    """Whether the name of a tool appears in the rendered prompt."""
    tool = {
        "type": "function",
        "function": {"name": PROBE_TOOL_NAME, "description": "", "parameters": {"type": "object"}},
    }
    message = {"role": "user", "content": "?"}
    try:
        return PROBE_TOOL_NAME in render_chat(tokenizer, [message], tools=[tool])
    except ModelError:  # no template, or one that fails
        return False
