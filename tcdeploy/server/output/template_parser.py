"""Parses outputs with transformers' ResponseParser, for tokenizers that have a `response_template`.

ResponseParser raises an exception for a malformed call and cannot continue. Its events contain neither the text of
delimiters nor the groups that their patterns captured, so this module keeps the text since the last call, and searches
it with the same patterns when a call is malformed or truncated. ResponseParser's time is quadratic in the length of
white space outside of calls (20 s for 120,000 spaces), so the rest of a long run is dropped.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from tcdeploy.server.output.json_text import dump, has_utf8, object_members, string_value
from tcdeploy.server.output.parser import OutputEnd, OutputParser, OutputPart, PartsBuilder, log_malformed
from tcdeploy.text.tool_formats import ForcedCall, ReasoningFormat, ToolFormat

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names in response templates
# Raised by ResponseParser for malformed calls.
PARSER_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
MAX_SPACE = 256  # white space in a row that reaches ResponseParser, outside of calls
# Splits text after characters that may end a delimiter, so that ResponseParser reports a call before the next one
# fails. ResponseParser's time is quadratic in the length of a piece.
_PIECE = re.compile(r"[^>\]}\n]{0,256}[>\]}\n]?")


class TemplateParser(OutputParser):
    """The output of one choice."""

    def __init__(
        self, template: dict[str, Any], prompt: str, tools: list[dict[str, Any]], max_calls: int | None = None
    ) -> None:
        """Raises ImportError without transformers, and ValueError for an invalid template."""
        super().__init__(PartsBuilder(max_calls, trims_content=True))
        # a module without stability guarantees
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(template, prefix=prompt, tools=tools)
        self._field = template.get("fields", {}).get("tool_calls", {})
        self._text: list[str] = []  # since the last call, or the last reasoning
        self._body: list[str] | None = None  # the reported text of the open call; None: no call is open
        self._num_spaces = 0  # at the end of the text

    def push(self, text: str) -> list[OutputPart]:
        for piece in _PIECE.findall(text):
            if self.num_malformed:
                self._builder.add_content(piece)
                continue
            if self._body is None:
                piece = self._without_long_space(piece)
            self._text.append(piece)
            self._collect(functools.partial(self._parser.feed, piece))
        return self._builder.take()

    def _without_long_space(self, piece: str) -> str:
        num_leading = len(piece) - len(piece.lstrip())
        num_kept = min(num_leading, max(0, MAX_SPACE - self._num_spaces))
        is_space = num_leading == len(piece)
        self._num_spaces = self._num_spaces + num_leading if is_space else len(piece) - len(piece.rstrip())
        return piece[num_leading - num_kept :]

    def finish(self, end: OutputEnd = "complete") -> list[OutputPart]:
        is_open = self._body is not None and not self.num_malformed
        if is_open and end == "length" and (call := self._cut_call()) is not None:
            self._builder.add_calls([call])
        elif is_open and end != "complete":
            self._builder.add_content(self._text_of_call())
        elif not self.num_malformed:
            self._collect(lambda: self._parser.finalize()[1])
        return self._builder.take()

    def _collect(self, parse: Callable[[], list[dict[str, Any]]]) -> None:
        """Add the events of some text. If it has a malformed call, all text from its opening on is content."""
        try:
            for event in parse():
                self._add(event["type"], event["field"], event)
        except PARSER_ERRORS as error:
            self.num_malformed = 1
            log_malformed(error)
            self._builder.add_content(self._text_of_call())

    def _add(self, kind: str, field: str, event: dict[str, Any]) -> None:
        if field == "tool_calls":
            if kind == "region_open":
                self._body = []
            elif kind == "region_chunk":
                assert self._body is not None  # a chunk follows the opening of its region
                self._body.append(event["text"])
            else:
                self._add_calls(event["value"])
                self._body, self._text = None, []
        elif kind == "region_chunk" and field == "content":
            self._builder.add_content(event["text"])
        elif kind == "region_chunk" and field in REASONING_FIELDS:
            self._builder.add_reasoning(event["text"])
            self._text = []

    def _add_calls(self, value: Any) -> None:
        calls = []
        for call in value if isinstance(value, list) else [value]:
            name, arguments = call["function"]["name"], call["function"].get("arguments")
            if not isinstance(name, str) or string_value(json.dumps(name)) is None:
                raise TypeError(f"the function name is {name!r}, not a text")
            text = arguments if isinstance(arguments, str) else dump(arguments or {})
            if not has_utf8(text):
                raise ValueError("its arguments contain a lone surrogate")
            calls.append((name, text))
        self._builder.end_content()
        self._builder.add_calls(calls)

    def _text_of_call(self) -> str:
        """The text from the opening of the call on."""
        text = "".join(self._text)
        match = _find_opening(self._field, text)
        return text[match.start() :].lstrip() if match else text

    def _cut_call(self) -> tuple[str, str] | None:
        """Name of the open call, and its arguments so far; None if the name is incomplete."""
        assert self._body is not None
        body = "".join(self._body)
        if keys := _json_keys(self._field):
            try:
                members = object_members(body)
            except (ValueError, RecursionError):
                return None
            name = string_value(members.get(keys[0], ""))
            return None if name is None else (name, members.get(keys[1], ""))
        opening = _find_opening(self._field, "".join(self._text))
        name = opening.groupdict().get("name") if opening else None
        if name is None:
            return None
        tag_pattern = self._field.get("content_args", {}).get("tag_pattern")
        if tag_pattern is None:
            return name, body.strip()
        arguments = {match["key"]: match["value"] for match in re.finditer(tag_pattern, body, re.DOTALL)}
        return name, dump(arguments)[:-1]


def _find_opening(field: dict[str, Any], text: str) -> Any:
    """The first match of a field's opening. Patterns use the syntax of `regex`, a dependency of transformers."""
    import regex  # type: ignore[import-untyped]

    literals = field.get("open")
    if literals is not None:
        pattern = "|".join(map(regex.escape, [literals] if isinstance(literals, str) else literals))
    else:
        pattern = field.get("open_pattern", "(?!)")
    return regex.search(pattern, text, regex.DOTALL)


def template_format(template: dict[str, Any]) -> ToolFormat | None:
    """The format of the calls of a response template; None if it describes none."""
    field = template.get("fields", {}).get("tool_calls")
    if field is None:
        return None
    opening, closing = _literal_delimiter(field, "open"), _literal_delimiter(field, "close")
    keys, forced = _json_keys(field), None
    if opening and closing and keys:
        forced = ForcedCall(
            f'{{"{keys[0]}": "', f'", "{keys[1]}": ', "}",
            separator="", opening=opening, closing=closing, allows_space=True,
        )  # fmt: skip
    openings, closings = (opening,) if opening else (), (closing,) if closing else ()
    return ToolFormat("template", "template", openings, closings=closings, forced=forced)


def template_reasoning(template: dict[str, Any]) -> ReasoningFormat | None:
    """The reasoning of a response template, if its delimiters are fixed texts."""
    for name in REASONING_FIELDS:
        field = template.get("fields", {}).get(name, {})
        opening, closing = _literal_delimiter(field, "open"), _literal_delimiter(field, "close")
        if opening is not None and closing is not None:
            return ReasoningFormat("template", opening, closing)
    return None


def _json_keys(field: dict[str, Any]) -> tuple[str, str] | None:
    """The keys of a call's name and arguments, if the calls of a response template are JSON objects."""
    if field.get("content") != "json" or field.get("content_args"):
        return None
    shape = field.get("transform")
    function = shape.get("function") if isinstance(shape, dict) else None
    if function == "{content}":
        return "name", "arguments"
    if not isinstance(function, dict):
        return None
    name, arguments = (re.fullmatch(r"\{content\.(\w+)\}", str(function.get(key))) for key in ("name", "arguments"))
    return (name[1], arguments[1]) if name and arguments else None


def _literal_delimiter(field: dict[str, Any], side: str) -> str | None:
    """The fixed text that opens or closes a region, or None. `side`: "open" or "close"."""
    literal = field.get(side)
    if isinstance(literal, list):
        return str(literal[0])
    if literal is not None:
        return str(literal)
    pattern = str(field.get(f"{side}_pattern", "")).removeprefix(r"\s*")
    return pattern if pattern and re.escape(pattern) == pattern else None
