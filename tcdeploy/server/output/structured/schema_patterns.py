"""Rewrites regexes in JSON schemas for llguidance, which has the syntax of Rust's crate `regex` and no look-around.

- Rust has set operators (`&&`, `--`, `~~`) and nested classes inside of brackets. In ECMAScript and Python these are
  plain characters, so they are escaped.
- pydantic's regexes for Decimal and zod's for e-mail addresses and durations have look-arounds. Each is replaced by
  several regexes without look-around that must all match. Those that limit the digits allow no additional zeros.

llguidance refuses regexes with any other look-around.
"""

from __future__ import annotations

import re
from typing import Any

SET_OPERATORS = ("&&", "--", "~~")
# Look-ahead at the start of a regex -> a regex that matches the same texts, or fewer.
_LEADING = {
    r"(?!^[-+.]*$)": "[^-+.]",  # pydantic's Decimal
    r"(?!\.)": r"^(?s:[^.].*)?$",  # zod's e-mail
    r"(?!.*\.\.)": r"^(?s:\.?[^.])*\.?$",
}
_DURATION = (  # zod's
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
_DURATION_PATTERNS = [
    r"^P(?:\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$", r"^PT?\d", r"^[^T]*(?:T\d[^T]*)?$",
]  # fmt: skip
# The rest of pydantic's regexes for Decimal, after the sign and leading zeros.
_DECIMAL = "^[+-]?0*"
_PLACES = re.compile(r"\\d\*\\\.\?\\d\{0,(\d+)\}0\*\$")
_DIGITS = re.compile(
    r"\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,(?P<chars>\d+)\}0\*\$\)"
    r"(?:\\d\{0,\d+\}\\\.\\d\{0,(?P<places>\d+)\}0\*\$|\\d\*\\\.\\d\*0\*\$)\)\$?"
)


def with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a `pattern` that llguidance understands as the client does."""
    pattern, others = schema.get("pattern"), schema.get("allOf", [])
    if not isinstance(pattern, str):
        return schema
    patterns = _without_look_ahead(pattern)
    if len(patterns) == 1 or not isinstance(others, list):
        return {**schema, "pattern": rewrite_pattern(patterns[0])}
    rest = {key: value for key, value in schema.items() if key != "pattern"}
    return {**rest, "allOf": [*others, *({"pattern": rewrite_pattern(item)} for item in patterns)]}


def _without_look_ahead(pattern: str) -> list[str]:
    """Regexes that all match where `pattern` matches. A look-ahead that is not known is kept."""
    if "(?" not in pattern:
        return [pattern]
    if pattern == _DURATION:
        return _DURATION_PATTERNS
    conditions = []
    while leading := next((item for item in _LEADING if pattern.startswith(f"^{item}")), None):
        conditions.append(_LEADING[leading])
        pattern = f"^{pattern[1 + len(leading) :]}"
    if pattern.startswith(_DECIMAL):
        return _decimal_patterns(pattern) + conditions
    return [pattern, *conditions]


def rewrite_pattern(pattern: str) -> str:
    """The regex with set operators and brackets inside of classes escaped."""
    if not any(operator in pattern for operator in SET_OPERATORS) and pattern.count("[") < 2:
        return pattern
    pieces: list[str] = []
    in_class = False
    for piece in re.findall(r"(?s)\\.?|&&|--|~~|.", pattern):
        pieces.append(_escaped(piece, pieces) if in_class else piece)
        in_class = piece != "]" if in_class else piece == "["
    return "".join(pieces)


def _escaped(piece: str, before: list[str]) -> str:
    """The piece of a class, escaped. The first `-` of `--` after a character is the operator of a range."""
    if piece == "--" and before[-1] not in ("[", "^"):
        return "-\\-"
    if piece in SET_OPERATORS:
        return "".join(f"\\{character}" for character in piece)
    return "\\[" if piece == "[" else piece


def _decimal_patterns(pattern: str) -> list[str]:
    """Regexes that together replace the rest of one of pydantic's for Decimal, if it limits the digits."""
    rest = pattern.removeprefix(_DECIMAL)
    if match := _PLACES.fullmatch(rest):
        return [rf"^[+-]?\d*(\.\d{{0,{match[1]}}})?$"]
    if match := _DIGITS.fullmatch(rest):
        digits, whole = int(match["chars"]) - 1, int(match["whole"])
        if match["places"] is not None:
            places = min(int(match["places"]), digits - whole)
            return [rf"^[+-]?\d{{0,{whole}}}(\.\d{{0,{places}}})?$"]
        limited = rf"\d{{1,{digits}}}"
        return [rf"^[+-]?({limited}|[\d.]{{2,{digits + 1}}})$", rf"^[+-]?({limited}|\d*\.\d*)$"]
    return [pattern]
