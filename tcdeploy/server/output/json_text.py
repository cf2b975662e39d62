"""Parses calls in JSON in the output of a model: their end, and the raw values of their members, even if truncated."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

_STRING_STOP = re.compile(r'["\\]')
# A quote or bracket, or a character that is not valid in JSON outside of strings.
_STRUCTURE = re.compile(r'["{}\[\]]|[^\s\w:,+.\-]')
_SPACE = re.compile(r"\s*")
_CONTROL = re.compile(r"[\x00-\x1f]")
ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = {"name", "type", "id", "function", *ARGUMENT_KEYS}
MAX_MEMBERS = 64  # of an object that is split into its members: a call has up to five


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Not strict, because models write line breaks into strings. Python's decoder accepts NaN and infinities by default.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_reject_constant)


class ObjectCall:
    """A call as a JSON object in a text that grows. Each character is read once.

    name: of the function, if the object contains only the arguments.
    known_names: if given, an object that is not a call of one of these functions may be content.
    """

    def __init__(self, start: int, name: str | None = None, known_names: Collection[str] | None = None) -> None:
        """`start`: index of the opening brace."""
        self.position = start  # up to it the text has been read
        self.calls: list[tuple[str, str]] = []  # name and arguments
        self._start, self._name, self._known_names = start, name, known_names
        self._depth, self._is_in_string = 0, False

    def find_end(self, text: str, *, is_complete: bool = False) -> int | None:
        """The index after the object, or None. Raises ValueError and RecursionError if it is not a call."""
        while True:
            pattern = _STRING_STOP if self._is_in_string else _STRUCTURE
            match = pattern.search(text, self.position)
            if match is None:
                self.position = len(text)
                return None
            if match[0] == "\\" and self._is_in_string:
                if match.end() == len(text):
                    self.position = match.start()
                    return None
                self.position = match.end() + 1
                continue
            if match[0] not in '"{[}]':  # not consumed: it may begin a delimiter
                self.position = match.start()
                raise ValueError(f"{match[0]!r} is not valid in JSON outside of strings")
            self.position = match.end()
            if match[0] == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    self.calls = [self._parse(text[self._start : match.end()])]
                    return match.end()

    def _parse(self, text: str) -> tuple[str, str]:
        if self._name is not None:
            return self._name, valid_object(text)
        members = object_members(text, is_complete=True)
        name = string_value(members.get("name", ""))
        is_call = self._known_names is None or (name in self._known_names and members.keys() <= CALL_KEYS)
        if name is None or not is_call:
            raise ValueError("it has no function name")
        raw = _arguments_of(members) or "null"
        if raw == "null":
            return name, "{}"
        # An object without control characters was decoded when the members were split. Others may be in a string.
        is_valid = raw.startswith("{") and not _CONTROL.search(raw)
        return name, raw if is_valid else valid_object(string_value(raw) or raw)

    def cut_calls(self, text: str) -> list[tuple[str, str]]:
        """The call with the arguments so far, if its name is complete. Raises ValueError and RecursionError."""
        if self._name is not None:
            return [(self._name, text[self._start :].lstrip())]
        members = object_members(text[self._start :])
        name = string_value(members.get("name", ""))
        is_call = name is not None and (self._known_names is None or name in self._known_names)
        return [(str(name), _arguments_of(members))] if is_call else []


def _arguments_of(members: dict[str, str]) -> str:
    """The raw text of the arguments; "" if there are none."""
    return next((members[key] for key in ARGUMENT_KEYS if key in members), "")


def object_members(text: str, *, is_complete: bool = False) -> dict[str, str]:
    """The raw text of each value of a JSON object. If the object is truncated, the last value may be too.

    Raises ValueError if the text does not begin with an object, or if it has more than MAX_MEMBERS members. With
    `is_complete`, the text must be exactly one object, but strings may contain control characters.
    """
    members: dict[str, str] = {}
    position = skip_space(text, 0)
    if not text.startswith("{", position):
        raise ValueError("it is not a JSON object")
    position = skip_space(text, position + 1)
    num_members = 0
    while text.startswith('"', position):
        if num_members == MAX_MEMBERS:  # len(members) does not count a key that is repeated
            raise ValueError(f"it has more than {MAX_MEMBERS} members")
        num_members += 1
        try:
            key, position = _DECODER.raw_decode(text, position)
        except ValueError:  # the key is truncated
            break
        position = skip_space(text, position)
        if not text.startswith(":", position):
            break
        start = position = skip_space(text, position + 1)
        try:
            _, position = _DECODER.raw_decode(text, start)
        except ValueError:
            members[key] = text[start:]
            break
        members[key] = text[start:position]
        position = skip_space(text, position)
        if not text.startswith(",", position):
            break
        position = skip_space(text, position + 1)
    if is_complete and text[position:].strip() != "}":
        raise ValueError("it is not a JSON object")
    return members


def valid_object(raw: str) -> str:
    """`raw`, a JSON object, with control characters in strings escaped. Else raises ValueError or RecursionError."""
    value = _DECODER.decode(raw)
    if not isinstance(value, dict):
        raise ValueError("the arguments are not a JSON object")
    if _CONTROL.search(raw):
        try:
            json.loads(raw)
        except ValueError:
            return dump(value)
    return raw


def dump(value: Any) -> str:
    """JSON with unescaped Unicode, unless there is a lone surrogate. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if has_utf8(text) else json.dumps(value)


def has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def string_value(raw: str) -> str | None:
    """The value of a JSON string; None if `raw` is another value, is truncated, or cannot be encoded as UTF-8."""
    try:
        value: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) and has_utf8(value) else None


def skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()
