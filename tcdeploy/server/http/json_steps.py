"""A JSON parser that works in short steps and enforces limits as it goes, for large bodies on the event loop.

`pydantic_core.from_json` holds the GIL for the whole body, 0.1 s for a million token ids, in a thread as well. A step
of `JsonSteps` takes less than 1 ms. Strings, numbers and runs of integers are parsed by `from_json` in pieces, so both
accept the same documents; only the structure is parsed here, at about 3 us per value and 50 ns per integer of a run.
Limits are enforced before the values exist, because creating and freeing a million objects blocks as well. ijson was
rejected: it returns a string of 8 MiB in one call, and replaces lone surrogates instead of rejecting them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

from pydantic_core import from_json

MAX_DEPTH = 128  # nested containers; from_json accepts 200
# Keys and values, without the integers of runs. One garbage collection of this many containers takes about 7 ms.
MAX_VALUES = 24_000
MAX_NUMBER_CHARS = 4300  # Python's limit for the digits of an integer
STEP_WORK = 256  # work of one step; a value is 1, and so are 256 bytes or 16 integers of a run
STRING_PIECE_BYTES = 64 << 10
Reader: TypeAlias = "Callable[[JsonSteps, bytes], None]"

_SPACE = re.compile(rb"[ \t\n\r]{1,65536}+")
_SCALAR = re.compile(rb"-?[A-Za-z]{1,10}+|-?[0-9][0-9.eE+-]{0,%d}+" % MAX_NUMBER_CHARS)
_SHORT_STRING = re.compile(rb'"([^"\\\x00-\x1f\x80-\xff]{0,1024}+)"')
_INTEGERS = re.compile(rb"(?:[ \t\n\r]{0,8}+-?[0-9]{1,18}+[ \t\n\r]{0,8}+,){1,4096}+")
_STRING_PIECE = re.compile(  # ends neither inside an escape nor between the two escapes of a surrogate pair
    rb'(?:[^"\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u]){1,2048}+',
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
    """Parses `body`: call `step` until it returns True; then `value` is the document. It raises ValueError if the body
    is not JSON, and JsonLimitError if it exceeds a limit.
    """

    def __init__(self, body: bytes | bytearray, limits: JsonLimits) -> None:
        self.value: Any = None
        self._body, self._limits = body, limits
        self._position = self._num_values = self._work = 0
        self._containers: list[Any] = []  # open lists and objects, the innermost last
        self._keys: list[str] = []  # the current key of each open object, the innermost last
        self._string_pieces: list[str] | None = None  # of the open string; None outside of strings
        self._read: Reader = JsonSteps._read_value  # a bound method would create a reference cycle

    def step(self) -> bool:
        """Parse for less than 1 ms. True if the whole body has been parsed."""
        self._work = STEP_WORK
        while self._work > 0:
            self._work -= 1
            if self._string_pieces is not None:
                self._read_string_piece(self._string_pieces)
                continue
            if space := _SPACE.match(self._body, self._position):
                self._advance(space.end())
                continue
            character = bytes(self._body[self._position : self._position + 1])
            if not character and self._read is JsonSteps._read_end:
                return True
            self._read(self, character)
        return False

    # Structure. Each method reads a part that begins with `character`, which is empty at the end of the body.

    def _read_value(self, character: bytes) -> None:
        if character == b'"':
            self._read_string()
        elif character == b"{":
            self._open({}, JsonSteps._read_first_key)
        elif character == b"[":
            self._open([], JsonSteps._read_first_item)
        elif self._containers and isinstance(self._containers[-1], list):
            self._read_numbers()
        else:
            self._add(self._read_scalar())

    def _read_first_item(self, character: bytes) -> None:
        self._close() if character == b"]" else self._read_value(character)

    def _read_key(self, character: bytes) -> None:
        if character != b'"':
            self._fail("expected a key")
        self._read_string()

    def _read_first_key(self, character: bytes) -> None:
        if character == b"}":
            self._keys.pop()
            self._close()
        else:
            self._read_key(character)

    def _read_colon(self, character: bytes) -> None:
        if character != b":":
            self._fail("expected a colon")
        self._advance(self._position + 1)
        self._read = JsonSteps._read_value

    def _read_separator(self, character: bytes) -> None:
        """Read the comma after a value, or the end of its container."""
        is_object = isinstance(self._containers[-1], dict)
        if character == b",":
            self._advance(self._position + 1)
            self._read = JsonSteps._read_key if is_object else JsonSteps._read_value
        elif character == (b"}" if is_object else b"]"):
            if is_object:
                self._keys.pop()
            self._close()
        else:
            self._fail("expected a comma or the end of a list or object")

    def _read_end(self, _: bytes) -> None:
        self._fail("trailing characters")

    # Values

    def _open(self, container: Any, read: Reader) -> None:
        if len(self._containers) == MAX_DEPTH:
            raise JsonLimitError(f"the body has more than {MAX_DEPTH} nested lists and objects", self._field)
        self._add(container)
        self._containers.append(container)
        if isinstance(container, dict):
            self._keys.append("")
        self._advance(self._position + 1)
        self._read = read

    def _close(self) -> None:
        self._containers.pop()
        self._advance(self._position + 1)
        self._read = JsonSteps._read_separator if self._containers else JsonSteps._read_end

    def _add(self, value: Any) -> None:
        """Store a value in its container. A separator is next."""
        self._count_value()
        self._read = JsonSteps._read_separator if self._containers else JsonSteps._read_end
        if not self._containers:
            self.value = value
        elif isinstance(self._containers[-1], dict):
            self._containers[-1][self._keys[-1]] = value
        else:
            if type(self._containers[-1]) is Integers and type(value) is not int:
                self._replace_list(list(self._containers[-1]))
            self._containers[-1].append(value)

    def _replace_list(self, replacement: list[Any]) -> None:
        """Put `replacement` in the place of the innermost open list."""
        self._containers[-1] = replacement
        if len(self._containers) == 1:
            self.value = replacement
        elif isinstance(self._containers[-2], dict):
            self._containers[-2][self._keys[-1]] = replacement
        else:
            self._containers[-2][-1] = replacement

    def _count_value(self) -> None:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise JsonLimitError(f"the body has more than {MAX_VALUES} keys and values", self._field)

    def _read_numbers(self) -> None:
        """Read the next items of a list: integers up to the last comma of their run, or one scalar."""
        run = _INTEGERS.match(self._body, self._position)
        if run is None:
            self._add(self._read_scalar())
            return
        numbers = self._parse(b"[" + self._body[self._position : run.end() - 1] + b"]")
        if not self._containers[-1]:
            self._replace_list(Integers())
        self._containers[-1].extend(numbers)
        if len(self._containers[-1]) >= self._limits.integers:  # another item follows the comma
            raise TooLongError(f"a list has more than {self._limits.integers} integers", self._location)
        self._work -= len(numbers) >> 4
        self._position = run.end()
        self._read = JsonSteps._read_value

    def _read_scalar(self) -> Any:
        scalar = _SCALAR.match(self._body, self._position)
        if scalar is None:
            self._fail("expected a value")
        value = self._parse(scalar.group())
        self._advance(scalar.end())
        return value

    def _read_string(self) -> None:
        short = _SHORT_STRING.match(self._body, self._position)
        self._position += 1
        if short is None:
            self._string_pieces = []
        else:
            self._add_string(short[1].decode("ascii"), short.end())

    def _read_string_piece(self, pieces: list[str]) -> None:
        start = self._position
        if self._body[start : start + 1] == b'"':
            self._string_pieces = None
            self._add_string("".join(pieces), start + 1)
            return
        piece = _STRING_PIECE.match(self._body, start, start + STRING_PIECE_BYTES)
        if piece is None:
            self._fail("unterminated string or invalid escape")
        end = piece.end()
        while start < end < len(self._body) and self._body[end] & 0xC0 == 0x80:
            end -= 1  # do not split a UTF-8 sequence
        end = end if end > start else piece.end()  # not valid UTF-8, which from_json reports
        pieces.append(self._parse(b'"' + self._body[start:end] + b'"'))
        self._check_length(sum(map(len, pieces)))
        self._advance(end)

    def _add_string(self, text: str, end: int) -> None:
        """Store a string, which ends at `end`, as a value or as a key."""
        self._advance(end)
        if self._read in (JsonSteps._read_key, JsonSteps._read_first_key):
            self._count_value()
            self._keys[-1] = text
            self._read = JsonSteps._read_colon
        else:
            self._add(text)

    def _check_length(self, length: int) -> None:
        if length > self._limits.string_chars:
            raise TooLongError(f"a text has more than {self._limits.string_chars} characters", self._location)

    def _parse(self, part: bytes | bytearray) -> Any:
        try:
            return from_json(part)
        except ValueError as error:
            self._fail(str(error).split(" at line ")[0])

    def _advance(self, end: int) -> None:
        self._work -= (end - self._position) >> 8
        self._position = end

    def _fail(self, reason: str) -> NoReturn:
        problem = "unexpected end" if self._position >= len(self._body) else reason
        raise ValueError(f"{problem} at byte {self._position}")

    @property
    def _location(self) -> tuple[str | int, ...]:
        """Keys and indices of the value that is being read."""
        keys = iter(self._keys)
        last = len(self._containers) - 1
        return tuple(
            next(keys) if isinstance(container, dict) else len(container) - (number < last)
            for number, container in enumerate(self._containers)
        )

    @property
    def _field(self) -> str | None:
        return self._keys[0] if self._keys else None
