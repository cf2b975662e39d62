"""What parsers of outputs share: the parts that they emit, their interface, and the state machine.

Parts are text, reasoning and calls in the order in which the model generated them, and each API writes them in its own
format. How a text is cut into parts depends on the tokens, so consumers join consecutive texts of one kind.

A call is sent when it is complete. A call that `max_tokens` truncates is sent with the arguments generated so far,
which are not complete JSON; the finish reason `length` indicates this. The text of a malformed call, and of one that a
stop string truncates, is content.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

from tcdeploy.server.output.json_text import ObjectCall
from tcdeploy.server.output.python_calls import PythonListParser
from tcdeploy.server.output.xml_calls import XmlCall
from tcdeploy.text.stop_strings import partial_match_length

OutputEnd: TypeAlias = Literal["complete", "length", "stop_string"]  # why the output ended
PARSE_ERRORS = (ValueError, SyntaxError, RecursionError, MemoryError)  # of invalid JSON and Python
PIECE_CHARS = 1024  # of a long text, which is parsed in pieces
log = logging.getLogger("tcdeploy.server")


@dataclass(slots=True)
class OutputText:
    text: str


@dataclass(slots=True)
class OutputReasoning:
    text: str


@dataclass(slots=True)
class OutputCall:
    number: int  # index within the choice
    id: str
    name: str
    arguments: str  # JSON, or the beginning of it

    def json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


OutputPart: TypeAlias = OutputText | OutputReasoning | OutputCall


class SplitOutput(NamedTuple):
    content: str
    reasoning: str
    calls: list[OutputCall]


def split_by_kind(parts: Iterable[OutputPart]) -> SplitOutput:
    """The parts by kind, without their order."""
    parts = list(parts)
    return SplitOutput(
        "".join(part.text for part in parts if isinstance(part, OutputText)),
        "".join(part.text for part in parts if isinstance(part, OutputReasoning)),
        [part for part in parts if isinstance(part, OutputCall)],
    )


def joined(parts: Iterable[OutputPart]) -> Iterator[OutputPart]:
    """The parts, with consecutive texts of one kind as one part."""
    for kind, group in groupby(parts, type):
        if kind is OutputCall:
            yield from group
        else:
            yield kind("".join(part.text for part in group))  # type: ignore[union-attr, call-arg]


class TrimmedText:
    """Holds the white space at the end of a text that arrives in pieces back, until more text follows.

    `skips_space`: also drop the white space before the next text. The held pieces are joined once: a model in a loop
    may write nothing else until its context is full.
    """

    def __init__(self, *, skips_space: bool) -> None:
        self.skips_space = skips_space
        self._held: list[str] = []

    def push(self, text: str) -> str:
        if self.skips_space:
            text = text.lstrip()
            self.skips_space = not text
        stripped = text.rstrip()
        space = self.take_space() if stripped else ""
        if len(stripped) < len(text):
            self._held.append(text[len(stripped) :])
        return space + stripped

    def take_space(self) -> str:
        held, self._held = self._held, []
        return "".join(held)


class PartsBuilder:
    """Builds the parts of a choice, and numbers its calls.

    White space of the content is dropped next to delimiters; with `trims_content`, also at the start and end of the
    output. If delimiters divide the content, its parts are separated by a line break.
    """

    def __init__(self, max_calls: int | None, id_length: int = 0, *, trims_content: bool = False) -> None:
        self._max_calls, self._id_length, self._trims_content = max_calls, id_length, trims_content
        self._content, self._reasoning = TrimmedText(skips_space=trims_content), TrimmedText(skips_space=True)
        self._separator = ""  # before the next content
        self._has_content = False
        self._parts: list[OutputPart] = []
        self.num_calls = 0
        self.ends_with_call = False  # whether no content follows the last call

    def add_content(self, text: str) -> None:
        if text := self._content.push(text):
            self._parts.append(OutputText(self._separator + text))
            self._separator, self._has_content, self.ends_with_call = "", True, False

    def end_content(self) -> None:
        """Called at each delimiter."""
        self._content.take_space()
        self._content.skips_space = True
        self._separator = "\n" if self._has_content else ""

    def add_reasoning(self, text: str) -> None:
        if text := self._reasoning.push(text):
            self._parts.append(OutputReasoning(text))

    def add_calls(self, calls: list[tuple[str, str]]) -> None:
        """`calls`: names and arguments. Those beyond `max_calls` are dropped."""
        for name, arguments in calls:
            self.ends_with_call = True
            if self.num_calls != self._max_calls:
                call_id = uuid.uuid4().hex[: self._id_length] if self._id_length else f"call_{uuid.uuid4().hex}"
                self._parts.append(OutputCall(self.num_calls, call_id, name, arguments))
                self.num_calls += 1

    def finish(self) -> list[OutputPart]:
        space = self._content.take_space()
        if space and not self._trims_content:
            self._parts.append(OutputText(space))
        return self.take()

    def take(self) -> list[OutputPart]:
        """The parts since the last call."""
        parts, self._parts = self._parts, []
        return parts


class OutputParser:
    """Splits the output of one choice into parts as it arrives. No part has an empty text."""

    def __init__(self, builder: PartsBuilder) -> None:
        self.num_malformed = 0  # calls whose text was returned as content
        self._builder = builder

    @property
    def has_calls(self) -> bool:
        return self._builder.num_calls > 0

    def push(self, text: str) -> list[OutputPart]:
        raise NotImplementedError

    def finish(self, end: OutputEnd = "complete") -> list[OutputPart]:
        """The rest of the output, after the last `push`."""
        raise NotImplementedError


def log_malformed(reason: object) -> None:
    log.warning("cannot parse a tool call: %.200s", reason)


class SteppingParser(OutputParser):
    """A state machine: `_step` parses some of the buffer, and selects the next step.

    The argument of a step is whether the text has ended. It returns whether another step may follow without more text.
    A step removes the text that it parsed from the buffer, which copies the rest, so long texts are parsed in pieces.
    """

    _step: Callable[[bool], bool]

    def __init__(self, builder: PartsBuilder) -> None:
        super().__init__(builder)
        self._buffer = ""  # text that is not parsed yet
        self._end: OutputEnd | None = None
        self._call: ObjectCall | PythonListParser | XmlCall = ObjectCall(0)

    def push(self, text: str) -> list[OutputPart]:
        self._parse(text)
        return self._builder.take()

    def finish(self, end: OutputEnd = "complete") -> list[OutputPart]:
        self._run_steps(is_last=False)
        self._end = end
        if end == "length" and self._step == self._read_call:
            self._add_cut_call()
        self._run_steps(is_last=True)
        return self._builder.finish()

    def _read_call(self, is_last: bool) -> bool:
        """The step that parses an open call, `_call`."""
        raise NotImplementedError

    def _add_cut_call(self) -> None:
        """Add the open call with the arguments generated so far, if its name is complete."""
        try:
            calls = self._call.cut_calls(self._buffer)
        except PARSE_ERRORS:
            return
        if calls:
            self._builder.add_calls(calls)
            self._builder.end_content()
            self._buffer = ""

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

    def _find(self, literals: tuple[str, ...], is_last: bool, emit: Callable[[str], None]) -> str | None:
        """The first of `literals` in the buffer, or None. Emits the text before it, so that the buffer begins with it.

        Text that may be the beginning of a literal is kept in the buffer, unless it is the last text.
        """
        matches = [(index, literal) for literal in literals if (index := self._buffer.find(literal)) >= 0]
        if matches:
            index, literal = min(matches)
            emit(self._buffer[:index])
            self._buffer = self._buffer[index:]
            return literal
        num_kept = 0
        if not is_last and literals:
            num_kept = max(partial_match_length(self._buffer, literal) for literal in literals)
        end = len(self._buffer) - num_kept
        emit(self._buffer[:end])
        self._buffer = self._buffer[end:]
        return None
