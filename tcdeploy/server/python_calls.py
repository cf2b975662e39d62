"""Calls in Python's syntax, `[name(key=value, ...), ...]`, in the output of a model. Nothing is evaluated."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any, NamedTuple

from tcdeploy.server.json_text import dump

_STRUCTURE = re.compile(r"[\"'()\[\]{},]")
_CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's names, which models use too
_CALL_HEAD = re.compile(r"[\s,]*([\w.]+)\(")


class PythonCall(NamedTuple):
    name: str
    arguments: str  # JSON, or the beginning of it


class PythonListScanner:
    """Finds the end of a list in a text that grows. Each character is read once."""

    def __init__(self, start: int = 0) -> None:
        """`start`: index of the opening bracket."""
        self._start = self._position = start
        self._depth = 0
        self._quote = ""
        self._calls_end = start + 1  # after the last complete call
        self._last_comma = 0  # between two arguments of a call

    def find_end(self, text: str) -> int | None:
        """The index after the closing bracket; None if `text` does not contain it yet."""
        while True:
            if self._quote:
                match = re.compile(rf"[\\{self._quote}]").search(text, self._position)
            else:
                match = _STRUCTURE.search(text, self._position)
            if match is None:
                self._position = len(text)
                return None
            if match[0] == "\\":
                if match.end() == len(text):
                    self._position = match.start()
                    return None
                self._position = match.end() + 1
                continue
            self._position = match.end()
            if self._quote or match[0] in "\"'":
                self._quote = "" if self._quote else match[0]
            elif match[0] == ",":
                self._last_comma = match.start() if self._depth == 2 else self._last_comma
            elif match[0] in "([{":
                self._depth += 1
            else:
                self._depth -= 1
                self._calls_end = match.end() if self._depth == 1 else self._calls_end
                if self._depth <= 0:
                    return match.end()

    def cut_calls(self, text: str) -> list[PythonCall]:
        """The calls of a truncated list. The last one has only its complete arguments, as the beginning of JSON.

        Raises the exceptions of `parse_calls`.
        """
        calls = parse_calls(f"{text[self._start : self._calls_end]}]")
        head = _CALL_HEAD.match(text, self._calls_end)
        if head is None:
            return calls
        arguments = text[head.end() : max(head.end(), self._last_comma)]
        [call] = parse_calls(f"[{head[1]}({arguments})]")
        return [*calls, call._replace(arguments=call.arguments[:-1])]


def parse_calls(text: str) -> list[PythonCall]:
    """Raises SyntaxError, ValueError, RecursionError or MemoryError for text that is not a list of such calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in strings
        body = ast.parse(text.strip(), mode="eval").body
    if not isinstance(body, ast.List):
        raise ValueError("it is not a list of calls")
    return [_call(node) for node in body.elts]


def _call(node: ast.expr) -> PythonCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("it is not a call with keyword arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("it is not a call with keyword arguments")
        arguments[keyword.arg] = _value(keyword.value)
    return PythonCall(_dotted_name(node.func), dump(arguments))


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("the function is not a name")
    return node.id


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(item) for key, item in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if isinstance(value, int | float):
            return -value
    raise ValueError(f"{type(node).__name__} is not a literal")


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str | int | float):
        raise ValueError("a key is not a text or number")
    return str(node.value)
