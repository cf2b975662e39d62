"""Regexes in JSON schemas, for llguidance, which has the syntax of Rust's crate `regex` and no look-around.

- Rust has set operators (`&&`, `--`, `~~`) and nested classes inside of brackets. In ECMAScript and Python these are
  plain characters, so they are escaped.
- pydantic writes Decimal as a regex with look-arounds: not only signs and points, and a maximum of digits. Its forms
  are replaced by regexes without look-around, which allow no additional zeros if the digits are limited.

A regex with another look-around is refused by llguidance.
"""

from __future__ import annotations

import re
from typing import Any

SET_OPERATORS = ("&&", "--", "~~")
# The regexes of pydantic 2 for Decimal. Digits of the integer part and of the fraction are limited, both or neither.
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
_NO_LIMIT = r"\d*\.?\d*$"
_PLACES = re.compile(r"\\d\*\\\.\?\\d\{0,(\d+)\}0\*\$")
_DIGITS = re.compile(
    r"\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,(?P<chars>\d+)\}0\*\$\)"
    r"(?:\\d\{0,\d+\}\\\.\\d\{0,(?P<places>\d+)\}0\*\$|\\d\*\\\.\\d\*0\*\$)\)"
)


def with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a `pattern` that llguidance understands as the client does."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return schema
    others = schema.get("allOf", [])
    is_decimal = pattern.startswith(_DECIMAL) and isinstance(others, list)
    if is_decimal and (replacement := _decimal_patterns(pattern.removeprefix(_DECIMAL))):
        conditions = [*others, *({"pattern": item} for item in replacement)]
        return {**{key: value for key, value in schema.items() if key != "pattern"}, "allOf": conditions}
    return {**schema, "pattern": rewrite_pattern(pattern)}


def rewrite_pattern(pattern: str) -> str:
    """The regex with set operators and brackets inside of classes escaped."""
    if not any(operator in pattern for operator in SET_OPERATORS) and pattern.count("[") < 2:
        return pattern
    pieces: list[str] = []
    position, in_class = 0, False
    while position < len(pattern):
        piece = _next_piece(pattern, position, in_class)
        position += 2 if piece in SET_OPERATORS or piece[0] == "\\" else 1
        pieces.append(_escaped(piece, pieces) if in_class else piece)
        in_class = piece != "]" if in_class else piece == "["
    return "".join(pieces)


def _next_piece(pattern: str, position: int, in_class: bool) -> str:
    """An escape, a set operator inside of a class, or a character."""
    two = pattern[position : position + 2]
    return two if two[0] == "\\" or (in_class and two in SET_OPERATORS) else two[0]


def _escaped(piece: str, before: list[str]) -> str:
    """A piece of a class. Of `--` after a character, the first is the operator of a range."""
    if piece == "--" and before[-1] not in ("[", "^"):
        return "-\\-"
    if piece in SET_OPERATORS:
        return "".join(f"\\{character}" for character in piece)
    return "\\[" if piece == "[" else piece


def _decimal_patterns(rest: str) -> list[str]:
    """Regexes that together allow what pydantic's regex for Decimal allows; [] if it is another one.

    `rest`: the regex after the sign and leading zeros.
    """
    number = rf"^[+-]?0*{_NO_LIMIT}"
    some_digit = "[0-9]"
    if rest == _NO_LIMIT:
        return [number, some_digit]
    if match := _PLACES.fullmatch(rest):
        return [rf"^[+-]?\d*(\.\d{{0,{match[1]}}})?$", some_digit]
    if match := _DIGITS.fullmatch(rest.removesuffix("$") if rest.endswith(")$") else rest):
        digits, whole = int(match["chars"]) - 1, int(match["whole"])
        if match["places"] is not None:
            places = min(int(match["places"]), digits - whole)
            return [rf"^[+-]?\d{{0,{whole}}}(\.\d{{0,{places}}})?$", some_digit]
        return [
            rf"^[+-]?(\d{{1,{digits}}}|[\d.]{{2,{digits + 1}}})$",
            rf"^[+-]?(\d{{1,{digits}}}|\d*\.\d*)$",
            some_digit,
        ]
    return []
