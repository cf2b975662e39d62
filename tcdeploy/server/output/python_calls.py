"""Calls in Python's syntax, `[name(key=value, ...), ...]`, in the output of a model. Nothing is evaluated.

The ends of strings and brackets are found while the text grows, and each character is read once. At each comma and
bracket the text before it is translated to JSON, so a long call does not occupy the event loop at its end. The JSON
decoder finds most errors. Rejected: `ast.parse`, which holds the GIL for 0.2 s per 120,000 characters, and for 2 s if
they are f-strings. Only single strings with escapes are decoded by `ast`.

After an error the list is only read to its end, so that the text of a malformed call is not searched for other calls.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from tcdeploy.server.output.json_text import dump

MAX_DEPTH = 100  # of brackets; values are written as JSON by recursion
MAX_CALLS = 1000  # in a list: they are returned together, when it is complete
_MARK = re.compile(r"""["'()\[\]{},]""")
_STRING_STOPS = {quote: re.compile(rf"(?s:\\.)|\\\Z|{quote}") for quote in ('"', "'", '"""', "'''")}
_HEAD = re.compile(r"\s*+(,?)\s*+([^\W\d][\w.-]*+)\s*+\(")
_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<prefix>[a-zA-Z]{0,2})(?P<quote>\"{3}|'{3}|["'])(?P<body>(?s:[^\\"']++|\\.|(?!(?P=quote))["'])*)"""
    r"""(?P=quote)|(?P<key>[^\W\d][\w.-]*+)\s*+=(?!=)|(?P<word>[\w.+-]+)|(?P<mark>(?s:.))"""
)
_LAST_WORD = re.compile(r"(?<![\w.+-])[\w.+-]++\s*+\Z")  # that may be incomplete
_LINE_BREAK = re.compile(r"(?s:\\.)|[\n\r]")
_NUMBER = re.compile(r"-?\.?\d.*")
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSINGS = {"(": ")", "[": "]", "{": "}"}


class PythonListParser:
    """A list of calls in a text that grows."""

    def __init__(self, start: int = 0) -> None:
        """`start`: index of the opening bracket."""
        self.position = start + 1  # the text before it has been read
        self.calls: list[tuple[str, str]] = []  # name, and arguments as JSON
        self._depth = 1  # of brackets
        self._error: Exception | None = None
        self._quote, self._string_start = "", 0  # of the open string
        self._start = self.position  # of the text that has not been translated
        self._name, self._arguments = "", _Arguments()  # of the open call

    def find_end(self, text: str, *, is_complete: bool = False) -> int | None:
        """The index after the list, or None. At its end, raises ValueError or SyntaxError if it is not one of calls."""
        while True:
            match = (_STRING_STOPS[self._quote] if self._quote else _MARK).search(text, self.position)
            if match is None:
                self.position = max(self.position, len(text) + 1 - max(len(self._quote), 1))
                return None
            start, mark = match.start(), match[0]
            if mark == "\\" or (not self._quote and mark in "\"'" and text[start : start + 3] in (mark, 2 * mark)):
                self.position = start  # an escape, or three quotes, may follow
                return None
            self.position = match.end()
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "\"'":
                self._quote = 3 * mark if text.startswith(3 * mark, start) else mark
                self.position, self._string_start = start + len(self._quote), start
            elif self._read_mark(text, mark, start):
                return self.position

    def _read_mark(self, text: str, mark: str, start: int) -> bool:
        """Whether the list ends with a comma or bracket outside of strings."""
        self._depth += 1 if mark in _CLOSINGS else 0 if mark == "," else -1
        if self._depth == 0:
            if self._error is not None:
                raise self._error
            if mark != "]" or not self.calls or text[self._start : start].strip() not in ("", ","):
                raise ValueError("it is not a list of calls")
        elif self._error is None and (self._depth > 1 or mark != ","):
            try:
                self._read_part(text[self._start : self.position])
            except (ValueError, SyntaxError) as error:
                self._error = error
            self._start = self.position
        return self._depth == 0

    def _read_part(self, part: str) -> None:
        """Read a part of a call that ends with a comma or bracket. Raises ValueError and SyntaxError."""
        mark = part[-1]
        if self._depth == 1:  # the end of the call
            self._arguments.read(part[:-1])
            self._arguments.end()
            if mark != ")":
                raise ValueError(f"unexpected {mark!r}")
            self.calls.append((self._name, self._arguments.to_json()))
        elif self._depth == 2 and mark in _CLOSINGS:  # its beginning
            if len(self.calls) == MAX_CALLS:
                raise ValueError(f"it has more than {MAX_CALLS} calls")
            head = _HEAD.fullmatch(part)
            if head is None or bool(head[1]) != bool(self.calls):
                raise ValueError("it is not a list of calls")
            self._name, self._arguments = head[2], _Arguments()
        else:
            self._arguments.read(part)

    def cut_calls(self, text: str) -> list[tuple[str, str]]:
        """The calls of a truncated list, the last with its complete arguments. Raises ValueError and SyntaxError."""
        if self._error is not None:
            raise self._error
        if self._depth < 2:
            return self.calls
        arguments = self._arguments.to_json()
        rest = text[self._start : self._string_start if self._quote else self.position]
        self._arguments.read(_LAST_WORD.sub("", rest))  # raises an error if the incomplete argument is not valid
        return [*self.calls, (self._name, arguments[:-1])]


class _Arguments:
    """The keyword arguments of a call, translated to a JSON object while they grow."""

    def __init__(self) -> None:
        self._pieces, self._keys = ["{"], set[str]()
        self._brackets: list[tuple[str, int]] = []  # that are open, with their indices in `_pieces`
        self._num_complete = 1  # pieces of complete arguments

    def to_json(self) -> str:
        """The arguments that are complete. Raises ValueError."""
        return dump(json.loads("".join([*self._pieces[: self._num_complete], "}"])))

    def read(self, text: str) -> None:
        """Read whole tokens. Raises ValueError and SyntaxError."""
        pieces = self._pieces
        for token in _TOKEN.finditer(text):
            word, mark = token["word"], token["mark"]
            if key := token["key"]:
                if self._brackets or key in self._keys or pieces[-1] not in ("{", ","):
                    raise ValueError("it is not a list of calls with keyword arguments")
                self._keys.add(key)
                pieces.append(f"{json.dumps(key)}:")
            elif token["quote"]:
                value = _string_value(token["prefix"].lower(), token["quote"], token["body"])
                if pieces[-1] == '"':  # adjacent strings are one value
                    pieces.pop()
                else:
                    pieces.append('"')
                pieces += [json.dumps(value)[1:-1], '"']
            elif word:
                pieces.append(f" {dump(_word_value(word))}")
            elif mark:
                self._read_mark(mark)

    def _read_mark(self, mark: str) -> None:
        pieces, brackets = self._pieces, self._brackets
        if mark in _CLOSINGS:
            if len(brackets) + 2 == MAX_DEPTH:
                raise ValueError(f"it has more than {MAX_DEPTH} nested brackets")
            brackets.append((mark, len(pieces)))
            pieces.append(mark)
        elif mark == "," and pieces[-1] not in ("{", "[", "(", ","):
            if not brackets:
                self._num_complete = len(pieces)
            elif brackets[-1][0] == "(":
                pieces[brackets[-1][1]] = "["  # a tuple
            pieces.append(mark)
        elif mark == ":" and brackets and brackets[-1][0] == "{":
            if pieces[-1].strip() and pieces[-1][0] == " ":  # a number as a key
                pieces[-1] = json.dumps(pieces[-1].strip())
            pieces.append(mark)
        elif brackets and mark == _CLOSINGS[brackets[-1][0]]:
            _, index = brackets.pop()
            if pieces[-1] == ",":
                pieces.pop()
            if mark == ")":  # of a tuple, or of a value in parentheses
                is_value = pieces[index] == "(" and index < len(pieces) - 1
                pieces[index], mark = (" ", " ") if is_value else ("[", "]")
            pieces.append(mark)
            if not brackets:
                self._num_complete = len(pieces)
        else:
            raise ValueError(f"unexpected {mark!r}")

    def end(self) -> None:
        """The call ends here, so the last argument is complete."""
        self._num_complete = len(self._pieces) - (self._pieces[-1] == ",")


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
    if not _NUMBER.fullmatch(word):
        raise ValueError(f"{word[:20]} is not a literal")
    try:
        return int(word, 0)
    except ValueError:
        if word.lstrip("-").isdigit():  # such as 007
            raise
        return float(word)
