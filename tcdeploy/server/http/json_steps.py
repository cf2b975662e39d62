"""A JSON parser that works in short steps and enforces limits as it goes, for large bodies on the event loop.

`pydantic_core.from_json` holds the GIL for the whole body, 0.1 s for a million token ids, in a thread as well. A step
of `JsonSteps` takes less than 1 ms. Strings, numbers and runs of integers are parsed by `from_json` in pieces, so both
accept the same documents; only the structure is parsed here, at about 3 us per value and 50 ns per integer of a run.
Limits are enforced before the values exist, because creating and freeing a million objects blocks as well. ijson was
rejected: it returns a string of 8 MiB in one call, and replaces lone surrogates instead of rejecting them.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from pydantic_core import from_json

MAX_DEPTH = 128  # nested containers; from_json accepts 200
# Keys and values, without the integers of runs. One garbage collection of this many containers takes about 7 ms.
MAX_VALUES = 24_000
MAX_NUMBER_CHARS = 4300  # Python's limit for the digits of an integer
STEP_WORK = 256  # work of one step; a value is 1, and so are 256 bytes or 16 integers of a run
STRING_PIECE_BYTES = 64 << 10
ResultT = TypeVar("ResultT")
Steps: TypeAlias = Generator[None, None, ResultT]

_SPACE = re.compile(rb"[ \t\n\r]{1,65536}+")
_SCALAR = re.compile(rb"-?[A-Za-z]{1,10}+|-?[0-9][0-9.eE+-]{0,%d}+" % MAX_NUMBER_CHARS)
_SHORT_STRING = re.compile(rb'"([^"\\\x00-\x1f\x80-\xff]{0,1024}+)"')
# The repeated groups are not possessive: Python 3.11.2 consumes the beginning of a repetition that does not match.
_INTEGERS = re.compile(rb"(?:[ \t\n\r]{0,8}+-?[0-9]{1,18}+[ \t\n\r]{0,8}+,){1,4096}")
_STRING_PIECE = re.compile(  # ends neither inside an escape nor between the two escapes of a surrogate pair
    rb'(?:[^"\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u]){1,2048}',
    re.DOTALL,
)


class JsonLimits(NamedTuple):
    """Limits that depend on the model. The others are constants of this module."""

    string_chars: int  # in one string
    integers: int  # in one list
    context: int | None = None  # tokens; names the model's context in errors for prompts


class JsonLimitError(ValueError):
    """The body exceeds a limit. `field` is the top-level key of the value, or None outside of all keys."""

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.message, self.field = message, field


class TooLongError(JsonLimitError):
    """A text or a list of integers is too long. `location`: the keys and indices of the text, or of the list's end."""

    def __init__(self, message: str, location: tuple[str | int, ...]) -> None:
        field = location[0] if location and isinstance(location[0], str) else None
        super().__init__(f"{field}: {message}" if field else message, field)
        self.location = location


class Integers(list[int]):
    """A list that is known to contain only integers, so that validators can skip its items."""


class JsonSteps:
    """Call `step` until it returns True; then `value` is the document. Raises ValueError if the body is not JSON."""

    def __init__(self, body: bytes | bytearray, limits: JsonLimits) -> None:
        self.value: Any = None
        self._reader = _Reader(body, limits)
        self._steps = self._reader.document()

    def step(self) -> bool:
        """Parse for less than 1 ms. True if the whole body has been parsed."""
        self._reader.work = STEP_WORK
        try:
            next(self._steps)
        except StopIteration as end:
            self.value = end.value
            return True
        return False


class _Reader:
    """Its generators, which yield at the end of each step, are not its attributes: they would be a reference cycle."""

    def __init__(self, body: bytes | bytearray, limits: JsonLimits) -> None:
        self._body, self._limits = body, limits
        self.position = self.work = self._num_values = 0
        self._path: list[str | int] = []  # keys and indices of the value that is being read

    def document(self) -> Steps[Any]:
        value = yield from self._value((yield from self._next()))
        if (yield from self._next()):
            self._fail("trailing characters")
        return value

    def _next(self) -> Steps[bytes]:
        """The next character that is not a space, which is not consumed; empty at the end of the body."""
        while True:
            self.work -= 1
            if self.work <= 0:
                yield
            space = _SPACE.match(self._body, self.position)
            if space is None:
                return bytes(self._body[self.position : self.position + 1])
            self._advance(space.end())

    def _value(self, character: bytes) -> Steps[Any]:
        """The value that begins with `character`."""
        if character in (b"{", b"["):
            if len(self._path) == MAX_DEPTH:
                raise JsonLimitError(f"the body has more than {MAX_DEPTH} nested lists and objects", self._field)
            self._count_value()
            self._advance(self.position + 1)
            self._path.append(0 if character == b"[" else "")
            container = yield from (self._list() if character == b"[" else self._object())
            self._path.pop()
            return container
        value = (yield from self._string()) if character == b'"' else self._scalar()
        self._count_value()
        return value

    def _object(self) -> Steps[dict[str, Any]]:
        fields: dict[str, Any] = {}
        character = yield from self._next()
        has_next = character != b"}"
        if not has_next:
            self._advance(self.position + 1)
        while has_next:
            if character != b'"':
                self._fail("expected a key")
            key = yield from self._string()
            self._count_value()
            self._path[-1] = key
            if (yield from self._next()) != b":":
                self._fail("expected a colon")
            self._advance(self.position + 1)
            fields[key] = yield from self._value((yield from self._next()))
            has_next = yield from self._has_next(b"}")
            character = yield from self._next()
        return fields

    def _list(self) -> Steps[list[Any]]:
        items: list[Any] = []
        character = yield from self._next()
        has_next = character != b"]"
        if not has_next:
            self._advance(self.position + 1)
        while has_next:
            if run := _INTEGERS.match(self._body, self.position):
                items = items or Integers()
                items.extend(self._integers(run, len(items)))
            else:
                self._path[-1] = len(items)
                value = yield from self._value(character)
                if type(items) is Integers and type(value) is not int:
                    items = list(items)
                items.append(value)
                has_next = yield from self._has_next(b"]")
            character = yield from self._next()
        return items

    def _has_next(self, end: bytes) -> Steps[bool]:
        """Read the comma after a value, or the end of its container. Whether it is a comma."""
        character = yield from self._next()
        if character not in (b",", end):
            self._fail("expected a comma or the end of a list or object")
        self._advance(self.position + 1)
        return character == b","

    def _integers(self, run: re.Match[bytes], num_before: int) -> list[int]:
        """The integers up to the last comma of their run. Another item of the list follows."""
        numbers: list[int] = self._parse(b"[" + self._body[self.position : run.end() - 1] + b"]")
        if num_before + len(numbers) >= self._limits.integers:
            location = (*self._path[:-1], num_before + len(numbers))
            raise TooLongError(f"a list has more than {self._limits.integers} integers", location)
        self.work -= len(numbers) >> 4
        self.position = run.end()
        return numbers

    def _scalar(self) -> Any:
        scalar = _SCALAR.match(self._body, self.position)
        if scalar is None:
            self._fail("expected a value")
        value = self._parse(scalar.group())
        self._advance(scalar.end())
        return value

    def _string(self) -> Steps[str]:
        if short := _SHORT_STRING.match(self._body, self.position):
            self._advance(short.end())
            return short[1].decode("ascii")
        self.position += 1
        pieces: list[str] = []
        while self._body[self.position : self.position + 1] != b'"':
            self.work -= 1
            if self.work <= 0:
                yield
            start = self.position
            piece = _STRING_PIECE.match(self._body, start, start + STRING_PIECE_BYTES)
            if piece is None:
                self._fail("unterminated string or invalid escape")
            end = piece.end()
            while start < end < len(self._body) and self._body[end] & 0xC0 == 0x80:
                end -= 1  # do not split a UTF-8 sequence
            end = end if end > start else piece.end()  # not valid UTF-8, which from_json reports
            pieces.append(self._parse(b'"' + self._body[start:end] + b'"'))
            if sum(map(len, pieces)) > self._limits.string_chars:
                raise TooLongError(f"a text has more than {self._limits.string_chars} characters", tuple(self._path))
            self._advance(end)
        self._advance(self.position + 1)
        return "".join(pieces)

    def _count_value(self) -> None:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise JsonLimitError(f"the body has more than {MAX_VALUES} keys and values", self._field)

    def _parse(self, part: bytes | bytearray) -> Any:
        try:
            return from_json(part)
        except ValueError as error:
            self._fail(str(error).split(" at line ")[0])

    def _advance(self, end: int) -> None:
        self.work -= (end - self.position) >> 8
        self.position = end

    def _fail(self, reason: str) -> NoReturn:
        problem = "unexpected end" if self.position >= len(self._body) else reason
        raise ValueError(f"{problem} at byte {self.position}")

    @property
    def _field(self) -> str | None:
        return self._path[0] if self._path and isinstance(self._path[0], str) else None
