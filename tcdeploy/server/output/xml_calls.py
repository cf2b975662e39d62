"""Calls in the syntax of Qwen3-Coder: `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`.

Values have no escapes and no types. A `</parameter>` ends a value only if another parameter or the end of the call
follows. If it is missing, `</function>` ends the value, if the end of the call or another call follows. At the end of
the output all closing tags may be missing, as in Qwen's own parser. The type of a value is that of its property in the
function's schema.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

from tcdeploy.server.output.json_text import dump, skip_space

END, PARAMETER, PARAMETER_END = "</function>", "<parameter=", "</parameter>"
CALL_END = "</tool_call>"
# Closing tag of a value -> texts of which one follows it, so that it is not part of the value.
FOLLOWERS = {PARAMETER_END: (PARAMETER, END, CALL_END), END: (CALL_END, "<tool_call>", "<function=")}
MAX_SPACE = 1000  # between two parameters
MAX_PARAMETER_CHARS = 200  # of `<parameter=KEY>`
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,188})>")
_VALUE_END = re.compile("|".join(FOLLOWERS))
_LAST_VALUE_END = re.compile(rf"{PARAMETER_END}|{PARAMETER}|{END}|\Z")
# By the type of a parsed value, other than text.
_TYPE_NAMES = {
    bool: ["boolean"], dict: ["object"], list: ["array"], int: ["integer", "number"], float: ["number"],
    type(None): ["null"],
}  # fmt: skip
_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class XmlCall:
    """The arguments of one call, in a text that grows."""

    def __init__(self, name: str, schema: dict[str, Any], start: int) -> None:
        """`schema`: of the arguments. `start`: index after `<function=NAME>`."""
        self.name = name
        self.arguments: dict[str, Any] = {}
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self.position = start  # after the last complete argument and white space
        self._search = start  # where the search for the end of a value continues

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(self.name, dump(self.arguments))]

    def cut_calls(self, text: str) -> list[tuple[str, str]]:
        return [(self.name, dump(self.arguments)[:-1])]

    def find_end(self, text: str, *, is_complete: bool = False) -> int | None:
        """The index after the call, or None. `is_complete`: closing tags may be missing. Raises ValueError."""
        while True:
            start = self.position = skip_space(text, self.position)
            if is_complete and start == len(text):
                return start
            if text.startswith((END, CALL_END), start):
                return start + len(END) if text.startswith(END, start) else start
            head = _PARAMETER.match(text, start)
            if head is None:
                rest = text[start : start + MAX_PARAMETER_CHARS]
                may_follow = PARAMETER.startswith(rest[: len(PARAMETER)]) and "\n" not in rest
                may_follow = may_follow and len(rest) < MAX_PARAMETER_CHARS or _may_begin(rest, (END, CALL_END))
                if may_follow and not is_complete:
                    return None
                raise ValueError(f"it contains {rest[:20]!r} outside of its parameters")
            value_end = self._find_value_end(text, max(self._search, head.end()))
            if value_end is None and is_complete:
                match = _LAST_VALUE_END.search(text, head.end())
                value_end = match and match.start()
            if value_end is None:
                return None
            self._add(head[1], text[head.end() : value_end])
            is_closed = text.startswith(PARAMETER_END, value_end)
            self.position = value_end + (len(PARAMETER_END) if is_closed else 0)
            self._search = max(self._search, self.position)  # no other end follows if the search has reached the end

    def _add(self, key: str, value: str) -> None:
        value = value.removeprefix("\n").removesuffix("\n")
        self.arguments[key.strip()] = convert(value, self._properties.get(key.strip()))

    def _find_value_end(self, text: str, start: int) -> int | None:
        while (match := _VALUE_END.search(text, start)) is not None:
            next_start = skip_space(text, match.end())
            if text.startswith(FOLLOWERS[match[0]], next_start):
                return match.start()
            is_near = next_start - match.start() <= MAX_SPACE  # otherwise this space would be read with each token
            if is_near and _may_begin(text[next_start : next_start + len(CALL_END)], FOLLOWERS[match[0]]):
                self._search = match.start()
                return None
            start = match.end()
        self._search = max(start, len(text) - len(PARAMETER_END))
        return None


def _may_begin(text: str, literals: tuple[str, ...]) -> bool:
    """Whether `text` is the beginning of one of `literals`."""
    return any(literal.startswith(text) for literal in literals)


def convert(value: str, schema: Any) -> Any:
    """`value` parsed as JSON if the result has a type of its schema, else the string."""
    types = _types(schema)
    if not types or value == "null" and "null" not in types and "string" in types:
        return value
    text = value.strip()
    try:
        parsed = json.loads(_PYTHON_CONSTANTS.get(text, text))
        if isinstance(parsed, float) and parsed.is_integer() and "number" not in types:
            parsed = int(Decimal(text))  # float64 would change integers beyond 2^53
        dump(parsed)  # refuses NaN and numbers beyond a float's range, which json.loads accepts
    except (ValueError, RecursionError):
        return value
    return parsed if not types.isdisjoint(_TYPE_NAMES.get(type(parsed), ())) else value


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {item for item in (declared if isinstance(declared, list) else [declared]) if isinstance(item, str)}
    for union in (schema.get("anyOf"), schema.get("oneOf")):
        for member in union if isinstance(union, list) else ():
            types |= _types(member)
    return types
