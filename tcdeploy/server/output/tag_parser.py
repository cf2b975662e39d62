"""Parses outputs in the formats of text/tool_formats.py into reasoning, content and calls.

The parser is a state machine with a buffer of the text that is not parsed yet: a step searches the next delimiter, or
the end of a call. The end of a JSON object is found by its structure, so delimiters inside strings are text. The text
of a malformed call becomes content.

A model may call a tool without closing its reasoning. From the opening of a call in the reasoning on, text is therefore
held back until the reasoning is closed, while a second parser parses it. If the reasoning is never closed and the
output ends with a call, the results of the second parser are used.
"""

from __future__ import annotations

import re
from typing import Any

from tcdeploy.server.output.json_text import CALL_KEYS, ObjectCall
from tcdeploy.server.output.parser import (
    PARSE_ERRORS,
    OutputPart,
    PartsBuilder,
    SteppingParser,
    log_malformed,
    split_by_kind,
)
from tcdeploy.server.output.python_calls import PythonListParser
from tcdeploy.server.output.xml_calls import XmlCall
from tcdeploy.text.tool_formats import ReasoningFormat, ToolFormat

MAX_HEADER_CHARS = 256  # between an opening and the arguments
MAX_SPACE = 256  # before a delimiter at the start of the output
NO_CALLS = ToolFormat("none", "json")
HEADER_ENDS = {"json": "{", "python": "[", "xml": ">"}  # by syntax: the arguments begin here, in XML after it


class TagParser(SteppingParser):
    """The output of one choice. In a call, the buffer begins with the call's opening."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        tools: list[dict[str, Any]],
        *,
        starts_in_reasoning: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._format, self._reasoning = tool_format or NO_CALLS, reasoning
        super().__init__(PartsBuilder(max_calls, self._format.id_length))
        self._tools, self._max_calls = tools, max_calls
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._may_reason = True  # False after the reasoning
        self._opening = ""  # of the open call
        self._is_listed = False  # whether the open call is not the first one after its opening
        self._is_closed = False  # whether a closing delimiter followed the last call
        self._num_searched = 0  # characters of held reasoning
        self._held_parser: TagParser | None = None  # parses held reasoning as if it were closed
        self._held_parts: list[OutputPart] = []
        self._has_name = False  # whether the header of the open call contains its name
        self._step = self._read_reasoning if starts_in_reasoning else self._read_start

    # Text outside of calls

    def _read_start(self, is_last: bool) -> bool:
        """At the start of the output, or after the reasoning: look for reasoning, and for a call without opening."""
        text = self._buffer.lstrip()
        if len(self._buffer) - len(text) > MAX_SPACE:
            self._step = self._read_content
            return True
        if self._reasoning is not None and self._may_reason:
            if text.startswith(self._reasoning.opening):
                self._buffer = text[len(self._reasoning.opening) :]
                self._step = self._read_reasoning
                return True
            if self._reasoning.opening.startswith(text) and not is_last:
                return False
        begins_call = self._begins_call(text) if self._format.starts_output else False
        if begins_call is None and not is_last:
            return False
        if begins_call:
            self._builder.add_content(self._buffer[: len(self._buffer) - len(text)])
            self._buffer = text
            self._open_call("")
        else:
            self._step = self._read_content
        return True

    def _begins_call(self, text: str) -> bool | None:
        """Whether a text without an opening begins a call; None if more text is needed to decide."""
        if self._format.syntax == "python":
            match, start = re.match(r"\[\s*([\w.-]+)\(", text), r"(\[\s*[\w.-]*)?"
            known_names = set(self._schemas)
        else:
            match, start = re.match(r'\{\s*"(\w+)"', text), r'(\{\s*("\w*)?)?'
            known_names = CALL_KEYS
        if match is not None:
            return match[1] in known_names
        return None if len(text) <= MAX_HEADER_CHARS and re.fullmatch(start, text) else False

    def _read_content(self, is_last: bool) -> bool:
        literal = self._find(self._call_marks, is_last, self._builder.add_content)
        if literal is None:
            return False
        if literal in self._format.openings:
            self._open_call(literal)
            return True
        self._buffer = self._buffer[len(literal) :]
        self._builder.end_content()
        return True

    def _read_reasoning(self, is_last: bool) -> bool:
        assert self._reasoning is not None
        literal = self._find((self._reasoning.closing, *self._call_marks), is_last, self._builder.add_reasoning)
        if literal is None:
            return False
        if literal != self._reasoning.closing:
            self._num_searched, self._held_parts, self._step = 0, [], self._read_held_reasoning
            self._held_parser = TagParser(self._format, None, self._tools, max_calls=self._max_calls)
            return True
        self._buffer, self._step, self._may_reason = self._buffer[len(literal) :], self._read_start, False
        self._builder.end_content()
        return True

    def _read_held_reasoning(self, is_last: bool) -> bool:
        """The buffer begins with an opening, and is reasoning if the end of the reasoning follows."""
        assert self._reasoning is not None and self._held_parser is not None
        closing = self._reasoning.closing
        index = self._buffer.find(closing, max(0, self._num_searched - len(closing)))
        if index >= 0:
            self._builder.add_reasoning(self._buffer[:index])
            self._buffer, self._step = self._buffer[index:], self._read_reasoning
            return True
        self._held_parts += self._held_parser.push(self._buffer[self._num_searched :])
        self._num_searched = len(self._buffer)
        if is_last:
            held = split_by_kind([*self._held_parts, *self._held_parser.finish(self._end or "complete")])
            ends_with_call = self._held_parser._builder.ends_with_call
            self._builder.add_reasoning(held.content if ends_with_call else self._buffer)
            self._builder.add_calls([(call.name, call.arguments) for call in held.calls if ends_with_call])
            self._buffer = ""
        return False

    @property
    def _call_marks(self) -> tuple[str, ...]:
        """Delimiters that begin a call or a list of calls."""
        return *self._format.openings, *self._format.dropped

    # Calls. The buffer begins with the opening until the call is complete.

    def _open_call(self, opening: str, is_listed: bool = False) -> None:
        self._opening, self._is_listed, self._is_closed, self._has_name = opening, is_listed, False, False
        self._step = self._read_header

    def _read_header(self, is_last: bool) -> bool:
        max_end = len(self._opening) + MAX_HEADER_CHARS
        index = self._buffer.find(HEADER_ENDS[self._format.syntax], len(self._opening), max_end)
        if index < 0:
            if is_last or len(self._buffer) > max_end:
                return self._fail("no arguments follow its opening delimiter")
            return False
        header = re.compile(self._format.header).fullmatch(self._buffer, len(self._opening), index)
        if header is None:
            return self._fail("the text between its opening delimiter and its arguments is not valid")
        name = header.groupdict().get("name")
        self._has_name = name is not None
        if self._format.syntax == "python":
            self._call = PythonListParser(index)
        elif self._format.syntax == "xml":
            name = str(name).strip()
            self._call = XmlCall(name, self._schemas.get(name, {}), index + 1)
        else:
            self._call = ObjectCall(index, name, self._schemas if self._has_no_opening else None)
        self._step = self._read_call
        return True

    def _read_call(self, is_last: bool) -> bool:
        try:
            end = self._call.find_end(self._buffer, is_complete=is_last and self._end == "complete")
            calls = [] if end is None else self._call.calls
        except PARSE_ERRORS as error:
            return self._fail(error, self._call.position)
        if end is None:
            return is_last and self._fail("the output ends inside the call", len(self._buffer))
        self._builder.add_calls(calls)
        self._buffer = self._buffer[end:]
        self._builder.end_content()
        self._step = self._read_after_call
        return True

    @property
    def _has_no_opening(self) -> bool:
        """Whether the open call has no opening delimiter, so that it may be content."""
        return not self._opening and not self._is_listed

    def _read_after_call(self, is_last: bool) -> bool:
        """Drop closing delimiters, and open the next call of a list, whose separator may be missing."""
        text = self._buffer = self._buffer.lstrip()
        separator = self._format.separator if not self._has_name else ""
        endings = tuple(filter(None, (*self._format.closings, separator)))
        ending = next((ending for ending in endings if text.startswith(ending)), "")
        if ending and ending == separator:
            self._buffer = text[len(ending) :]
            self._step = self._read_next_object
        elif ending:
            self._buffer, self._is_closed = text[len(ending) :], True
        elif any(ending.startswith(text) for ending in endings) and not (is_last and self._end == "complete"):
            self._buffer = "" if is_last else self._buffer  # drop a truncated delimiter
            return False
        elif (follows := self._object_follows(text)) is None and not is_last:
            return False
        elif follows:
            self._open_call("", is_listed=bool(self._format.closings))
        else:
            self._step = self._read_content
        return True

    def _object_follows(self, text: str) -> bool | None:
        """Whether the object of another call follows a call; None if more text is needed to decide."""
        if self._format.syntax != "json" or self._has_name or self._is_closed or not text.startswith("{"):
            return False
        return True if self._format.closings else self._begins_call(text)

    def _read_next_object(self, is_last: bool) -> bool:
        text = self._buffer = self._buffer.lstrip()
        if text.startswith("{"):
            self._open_call("", is_listed=True)
        elif text or is_last:
            self._step = self._read_content
        else:
            return False
        return True

    def _fail(self, reason: object, end: int | None = None) -> bool:
        """The text up to `end`, by default the end of the opening, is content, and is not searched for other calls.

        Text that has no opening, and may not be a call, is not counted as malformed; nor is a truncated call.
        """
        if self._end in (None, "complete") and not self._has_no_opening:
            if not self.num_malformed:
                log_malformed(reason)
            self.num_malformed += 1
        end = len(self._opening) if end is None else end
        self._builder.add_content(self._buffer[:end])
        self._buffer = self._buffer[end:]
        self._step = self._read_content
        return True
