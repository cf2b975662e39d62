"""Calls in Python's syntax, `[name(key=value, ...), ...]`, in the output of a model. Nothing is evaluated.

The list is parsed while it grows, with a stack of open brackets, and each character is read once. Rejected: `ast.parse`
of the complete list, which holds the GIL for 0.2 s per 120,000 characters, and for 2 s if they are f-strings. Only
single strings with escapes are decoded by `ast`.

After an error the list is only read to its end, so that the text of a malformed call is not searched for other calls.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from tcdeploy.server.output.json_text import dump

MAX_DEPTH = 100  # of brackets; values are written as JSON by recursion
MAX_CALLS = 1000  # in a list: they are returned together, when it is complete
MAX_WORD_CHARS = 1000  # of a number or name: one at the end of the text is read again when the text has grown
_TOKEN = re.compile(r"""(?P<space>\s+)|(?P<prefix>[a-zA-Z]{0,2})(?P<quote>["'])|(?P<word>[\w.+-]+)|(?P<mark>(?s:.))""")
_STRING_STOPS = {quote: re.compile(rf"(?s:\\.)|\\\Z|{quote}") for quote in ('"', "'", '"""', "'''")}
_LINE_BREAK = re.compile(r"(?s:\\.)|[\n\r]")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_NUMBER = re.compile(r"-?\.?\d.*")
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_BRACKETS = {"(": "tuple", "[": "list", "{": "dict"}
_CLOSINGS = {"calls": "]", "call": ")", "tuple": ")", "list": "]", "dict": "}"}


@dataclass
class _Bracket:
    """An open bracket.

    expects: what follows. "item": an item or the end; "sign": the `=`, `:` or `(` after a key; "value": a value;
        "comma": a comma or the end.
    """

    kind: str  # calls: the outer list; call, tuple, list, dict
    name: str = ""  # of the called function
    key: str = ""  # of the next value; in `calls`, the name of the next function
    expects: Literal["item", "sign", "value", "comma"] = "item"
    has_comma: bool = False
    items: list[Any] = field(default_factory=list)
    members: dict[str, Any] = field(default_factory=dict)  # of a call or dict


class PythonListParser:
    """A list of calls in a text that grows."""

    def __init__(self, start: int = 0) -> None:
        """`start`: index of the opening bracket."""
        self.position = start  # the text before it has been read
        self.calls: list[tuple[str, str]] = []  # name, and arguments as JSON
        self._stack: list[_Bracket] = []
        self._depth = 0  # as len(_stack), also after an error
        self._error: Exception | None = None
        self._prefix = self._quote = ""  # of the open string
        self._string_start = 0
        self._strings: list[str] = []  # adjacent strings, which are one value

    def find_end(self, text: str, *, is_complete: bool = False) -> int | None:
        """The index after the closing bracket; None if `text` does not contain it yet.

        At the closing bracket, raises ValueError or SyntaxError if the list is not one of calls.
        """
        while self._read_string(text) if self._quote else self._read_token(text):
            if self._depth == 0:
                if self._error is not None:
                    raise self._error
                return self.position
        return None

    def cut_calls(self, text: str) -> list[tuple[str, str]]:
        """The calls of a truncated list. The last one has only its complete arguments, as the beginning of JSON.

        Raises ValueError or SyntaxError.
        """
        if self._error is not None:
            raise self._error
        opened = [(call.name, dump(call.members)[:-1]) for call in self._stack[1:2]]
        return [*self.calls, *opened]

    def _read_token(self, text: str) -> bool:
        """Read one token. Returns False if more text is needed."""
        token = _TOKEN.match(text, self.position)
        if token is None:
            return False
        if token["quote"] is not None:
            return self._open_string(text, token)
        word, mark = token["word"], token["mark"]
        if word is not None and token.end() == len(text) and len(word) <= MAX_WORD_CHARS:
            return False
        self.position = token.end()
        self._depth += 1 if mark in ("(", "[", "{") else -1 if mark in (")", "]", "}") else 0
        if self._error is None and (word is not None or mark is not None):
            try:
                self._add_strings()
                if word is not None:
                    self._add_word(word)
                else:
                    self._add_mark(mark)
            except (ValueError, SyntaxError) as error:
                self._error = error
        return True

    def _open_string(self, text: str, token: re.Match[str]) -> bool:
        quote, start = token["quote"], token.start("quote")
        first_chars = text[start : start + 3]
        if first_chars in (quote, 2 * quote):
            return False  # three quotes begin another kind of string
        self._prefix = token["prefix"].lower()
        self._quote = 3 * quote if first_chars == 3 * quote else quote
        self.position = self._string_start = start + len(self._quote)
        return True

    def _read_string(self, text: str) -> bool:
        """Read to the next escape, or the end of the string. Returns False if more text is needed."""
        stop = _STRING_STOPS[self._quote].search(text, self.position)
        if stop is None:
            self.position = max(self.position, len(text) - len(self._quote) + 1)
            return False
        if stop[0] == "\\":
            self.position = stop.start()
            return False
        self.position = stop.end()
        if stop[0] == self._quote:
            if self._error is None:
                self._end_string(text[self._string_start : stop.start()])
            self._quote = ""
        return True

    def _end_string(self, body: str) -> None:
        try:
            if not self._strings:
                self._check_value()
            self._strings.append(_string_value(self._prefix, self._quote, body))
        except (ValueError, SyntaxError) as error:
            self._error = error

    def _add_strings(self) -> None:
        if self._strings:
            value, self._strings = "".join(self._strings), []
            self._add_value(value)

    def _add_word(self, word: str) -> None:
        bracket = self._stack[-1]
        if bracket.kind in ("calls", "call") and bracket.expects == "item" and _NAME.fullmatch(word):
            bracket.key, bracket.expects = word, "sign"
        else:
            self._add_value(_word_value(word))

    def _add_mark(self, mark: str) -> None:
        if mark in _BRACKETS:
            self._open(mark)
            return
        bracket = self._stack[-1]
        if mark == _CLOSINGS[bracket.kind] and bracket.expects in ("item", "comma"):
            self._close()
        elif mark == "," and bracket.expects == "comma":
            bracket.expects, bracket.has_comma = "item", True
        elif (bracket.kind, mark) in (("call", "="), ("dict", ":")) and bracket.expects == "sign":
            bracket.expects = "value"
        else:
            raise ValueError(f"unexpected {mark!r}")

    def _open(self, mark: str) -> None:
        kind = _BRACKETS[mark]
        if not self._stack:
            self._stack.append(_Bracket("calls"))
            return
        outer = self._stack[-1]
        if outer.kind == "calls" and mark == "(" and outer.expects == "sign":
            if len(self.calls) == MAX_CALLS:
                raise ValueError(f"it has more than {MAX_CALLS} calls")
            self._stack.append(_Bracket("call", outer.key))
            return
        self._check_value()
        if outer.kind == "dict" and outer.expects == "item":
            raise ValueError("a key is not a text or number")
        if len(self._stack) == MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_DEPTH} nested brackets")
        self._stack.append(_Bracket(kind))

    def _close(self) -> None:
        bracket = self._stack.pop()
        if bracket.kind == "calls" and not self.calls:
            raise ValueError("it contains no call")
        if bracket.kind == "call":
            self.calls.append((bracket.name, dump(bracket.members)))
            self._stack[-1].expects = "comma"
        elif bracket.kind == "dict":
            self._add_value(bracket.members)
        elif bracket.kind == "tuple" and len(bracket.items) == 1 and not bracket.has_comma:
            self._add_value(bracket.items[0])  # a value in parentheses
        elif bracket.kind != "calls":
            self._add_value(bracket.items)

    def _check_value(self) -> None:
        """Raises ValueError if a value may not follow."""
        bracket = self._stack[-1]
        needs_key = bracket.kind in ("calls", "call")
        if bracket.expects != "value" and (bracket.expects != "item" or needs_key):
            raise ValueError("it is not a list of calls with keyword arguments")

    def _add_value(self, value: Any) -> None:
        self._check_value()
        bracket = self._stack[-1]
        if bracket.kind == "dict" and bracket.expects == "item":
            if not isinstance(value, str | int | float):
                raise ValueError("a key is not a text or number")
            bracket.key, bracket.expects = str(value), "sign"
            return
        if bracket.kind == "call" and bracket.key in bracket.members:
            raise ValueError("an argument is repeated")
        if bracket.kind in ("call", "dict"):
            bracket.members[bracket.key] = value
        else:
            bracket.items.append(value)
        bracket.expects = "comma"


def _string_value(prefix: str, quote: str, body: str) -> str:
    """The value of a string, which may contain line breaks also between single quotes."""
    if prefix not in ("", "r", "u"):
        raise ValueError(f"a string has the prefix {prefix}")
    if prefix == "r" or "\\" not in body:
        return body
    escapes = {"\n": "\\n", "\r": "\\r", "\\\n": ""}
    escaped = _LINE_BREAK.sub(lambda match: escapes.get(match[0], match[0]), body)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes
        return str(ast.literal_eval(f"{quote}{escaped}{quote}"))


def _word_value(word: str) -> Any:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if len(word) > MAX_WORD_CHARS or not _NUMBER.fullmatch(word):
        raise ValueError(f"{word[:20]} is not a literal")
    try:
        return int(word, 0)
    except ValueError:
        if word.lstrip("-").isdigit():  # such as 007
            raise
        return float(word)
