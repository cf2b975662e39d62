"""Types that parsers of outputs share: deltas of content, reasoning and tool calls, and their builder.

A call is sent when it is complete. A call that `max_tokens` truncates is sent with the arguments generated so far,
which are not complete JSON; the finish reason `length` indicates this. The text of a malformed call, and of one that a
stop string truncates, is content.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

OutputEnd: TypeAlias = Literal["complete", "length", "stop_string"]  # why the output ended
PIECE_CHARS = 1024  # of a long text, which is parsed in pieces
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
        self._has_text = False
        self._trailing_space = TrailingSpace()

    def push(self, text: str) -> str:
        if not self._has_text:
            text = text.lstrip()
            self._has_text = bool(text)
        return self._trailing_space.push(text)


class TrailingSpace:
    """The white space at the end of a text that arrives in pieces.

    The pieces are joined once: a model in a loop may write nothing else until its context is full.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def push(self, text: str) -> str:
        """The text with the space before it, and without the space at its end."""
        stripped = text.rstrip()
        space = self.take() if stripped else ""
        if len(stripped) < len(text):
            self._pieces.append(text[len(stripped) :])
        return space + stripped

    def take(self) -> str:
        pieces, self._pieces = self._pieces, []
        return "".join(pieces)


class DeltaBuilder:
    """Builds successive deltas, and numbers the calls of the choice.

    White space of the content is dropped next to delimiters; with `trims_content`, also at the start and end of the
    output. If delimiters divide the content, its parts are separated by a line break.
    """

    def __init__(self, max_calls: int | None, id_length: int = 0, *, trims_content: bool = False) -> None:
        self._max_calls, self._id_length = max_calls, id_length
        self._trims_content = self._skips_space = trims_content
        self._trailing_space = TrailingSpace()  # of the content; dropped if a delimiter follows
        self._separator = ""  # before the next content
        self._has_content = False
        self._reasoning_trimmer = WhitespaceTrimmer()
        self._content = self._reasoning = ""
        self._calls: list[ParsedToolCall] = []
        self.num_calls = 0
        self.ends_with_call = False  # whether no content follows the last call

    def add_content(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        if text := self._trailing_space.push(text):
            self._content += self._separator + text
            self._separator, self._has_content, self.ends_with_call = "", True, False

    def end_content(self) -> None:
        """Called at each delimiter."""
        self._trailing_space.take()
        self._skips_space = True
        self._separator = "\n" if self._has_content else ""

    def add_reasoning(self, text: str) -> None:
        self._reasoning += self._reasoning_trimmer.push(text)

    def add_call(self, name: str, arguments: str) -> None:
        """Calls beyond `max_calls` are dropped."""
        self.ends_with_call = True
        if self.num_calls == self._max_calls:
            return
        call_id = uuid.uuid4().hex[: self._id_length] if self._id_length else f"call_{uuid.uuid4().hex}"
        self._calls.append(ParsedToolCall(self.num_calls, call_id, name, arguments))
        self.num_calls += 1

    def finish(self) -> ParsedDelta:
        if not self._trims_content:
            self._content += self._trailing_space.take()
        return self.take()

    def take(self) -> ParsedDelta:
        delta = ParsedDelta(self._content, self._reasoning, tuple(self._calls))
        self._content = self._reasoning = ""
        self._calls = []
        return delta


def log_malformed(reason: object) -> None:
    log.warning("cannot parse a tool call: %.200s", reason)


class SteppingParser:
    """An `OutputParser` that is a state machine: `_step` parses some of the buffer, and selects the next step.

    The argument of a step is whether the text has ended. It returns whether another step may follow without more text.
    A step removes the text that it parsed from the buffer, which copies the rest, so long texts are parsed in pieces.
    """

    _step: Callable[[bool], bool]

    def __init__(self, builder: DeltaBuilder) -> None:
        self.num_malformed = 0
        self._builder = builder
        self._buffer = ""  # text that is not parsed yet

    @property
    def has_calls(self) -> bool:
        return self._builder.num_calls > 0

    @property
    def ends_with_call(self) -> bool:
        return self._builder.ends_with_call

    def push(self, text: str) -> ParsedDelta:
        self._parse(text)
        return self._builder.take()

    def _parse(self, text: str) -> None:
        for start in range(0, len(text), PIECE_CHARS):
            # CPython extends a string in place if a local variable holds the only reference. `self._buffer += text`
            # would copy all of a long call with each token.
            buffer, self._buffer = self._buffer, ""
            buffer += text[start : start + PIECE_CHARS]
            self._buffer = buffer
            del buffer
            self._run_steps(is_last=False)

    def _run_steps(self, *, is_last: bool) -> None:
        while self._step(is_last):
            pass
