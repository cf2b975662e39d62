"""Types that parsers of outputs share: deltas of content, reasoning and tool calls, and their builder.

A call is sent when it is complete. A call that `max_tokens` truncates is sent with the arguments generated so far,
which are not complete JSON; the finish reason `length` indicates this. The text of a malformed call, and of one that a
stop string truncates, is content.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

OutputEnd: TypeAlias = Literal["complete", "length", "stop_string"]  # why the output ended
log = logging.getLogger("tcdeploy.server")


class ParsedToolCall(NamedTuple):
    number: int  # index within the choice
    id: str
    name: str
    arguments: str  # JSON, or the beginning of it

    def json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ParsedDelta(NamedTuple):
    """A piece of output, split into its parts."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedToolCall, ...] = ()


class OutputParser(Protocol):
    """Splits the output of one choice incrementally."""

    num_malformed: int  # calls whose text was returned as content

    @property
    def has_calls(self) -> bool: ...

    def push(self, text: str) -> ParsedDelta: ...

    def finish(self, end: OutputEnd = "complete") -> ParsedDelta:
        """The rest of the output, after the last `push`."""
        ...


class WhitespaceTrimmer:
    """Strips leading and trailing white space of a text that arrives in pieces. Models put it around delimiters."""

    def __init__(self) -> None:
        self._trailing_space: str | None = None  # None before the first text

    def push(self, text: str) -> str:
        unsent = text.lstrip() if self._trailing_space is None else self._trailing_space + text
        stripped = unsent.rstrip()
        if stripped or self._trailing_space is not None:
            self._trailing_space = unsent[len(stripped) :]
        return stripped


class DeltaBuilder:
    """Builds successive deltas, and numbers the calls of the choice.

    White space of the content is dropped next to delimiters; with `trims_content`, also at the start and end of the
    output. If delimiters divide the content, its parts are separated by a line break.
    """

    def __init__(self, max_calls: int | None, id_length: int = 0, *, trims_content: bool = False) -> None:
        self._max_calls, self._id_length = max_calls, id_length
        self._trims_content = self._skips_space = trims_content
        self._trailing_space = ""  # of the content; dropped if a delimiter follows
        self._separator = ""  # before the next content
        self._has_content = False
        self._reasoning_trimmer = WhitespaceTrimmer()
        self._content = self._reasoning = ""
        self._calls: list[ParsedToolCall] = []
        self.num_calls = 0

    def add_content(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        text = self._trailing_space + text
        stripped = text.rstrip()
        self._trailing_space = text[len(stripped) :]
        if stripped:
            self._content += self._separator + stripped
            self._separator, self._has_content = "", True

    def end_content(self) -> None:
        """Called at each delimiter."""
        self._trailing_space, self._skips_space = "", True
        self._separator = "\n" if self._has_content else ""

    def add_reasoning(self, text: str) -> None:
        self._reasoning += self._reasoning_trimmer.push(text)

    def add_call(self, name: str, arguments: str) -> None:
        """Calls beyond `max_calls` are dropped."""
        if self.num_calls == self._max_calls:
            return
        call_id = uuid.uuid4().hex[: self._id_length] if self._id_length else f"call_{uuid.uuid4().hex}"
        self._calls.append(ParsedToolCall(self.num_calls, call_id, name, arguments))
        self.num_calls += 1

    def finish(self) -> ParsedDelta:
        if not self._trims_content:
            self._content += self._trailing_space
        return self.take()

    def take(self) -> ParsedDelta:
        delta = ParsedDelta(self._content, self._reasoning, tuple(self._calls))
        self._content = self._reasoning = ""
        self._calls = []
        return delta


def log_malformed(reason: object) -> None:
    log.warning("cannot parse a tool call: %.200s", reason)
