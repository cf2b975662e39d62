"""Outputs of requests with tools and a format: tool calls, or content that follows the format.

OpenAI's API allows both in one request, and agents send both in every turn. A grammar begins with the reasoning, if the
model reasons, and then has two alternatives: calls, and JSON of the request's schema. Where the format of calls has no
grammar of its own, any text may follow an opening of a call.

The parser of calls would also find calls in the strings of JSON content. `CallsOrContent` therefore bypasses that
parser once the content has begun.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tcdeploy.server.output.parser import OutputEnd, OutputParser, OutputPart, OutputText
from tcdeploy.server.output.structured.json_schema import exact_schemas, objects
from tcdeploy.server.output.structured.schema_numbers import UnsupportedSchemaError
from tcdeploy.text.tool_formats import ReasoningFormat


class CallsOrContent(OutputParser):
    """Uses the parser of calls."""

    def __init__(self, parser: OutputParser) -> None:
        super().__init__(parser._builder)
        self._parser, self._is_content = parser, False

    def push(self, text: str) -> list[OutputPart]:
        parts: list[OutputPart] = []
        for index, char in enumerate(text):  # so that the parser reads nothing after the start of the content
            if self._is_content:
                return [*parts, OutputText(text[index:])]
            added = self._parser.push(char)
            parts += added
            if not self.has_calls and any(isinstance(part, OutputText) for part in added):
                parts += self.finish("stop_string")
                self._is_content = True
        return parts

    def finish(self, end: OutputEnd = "complete") -> list[OutputPart]:
        if self._is_content:
            return []
        parts = self._parser.finish(end)
        self.num_malformed = self._parser.num_malformed
        return parts


def plain_calls(functions: list[dict[str, Any]]) -> str:
    """Grammar of one call as a JSON object without delimiters, `{"name": ..., "parameters": ...}`.

    The whole object is JSON of one schema. Rejected: a fixed text before the arguments, whose beginning llguidance's
    lexer cannot distinguish from that of the content. Raises UnsupportedSchemaError.
    """
    schemas = []
    for function in functions:
        parameters = function.get("parameters") or {"type": "object"}
        schema = {
            "type": "object", "properties": {"name": {"const": function["name"]}, "parameters": parameters},
            "required": ["name", "parameters"], "additionalProperties": False,
        }  # fmt: skip
        for item in objects(parameters):  # a reference must mean the same once the parameters are in the call's schema
            reference = item.get("$ref")
            if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
                raise UnsupportedSchemaError(
                    f"the reference {reference[:80]!r} is not supported in calls of this format"
                )
        schema |= {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}  # targets of $refs
        schemas.append(schema)
    rules = [f"call_{number}: %json {json.dumps(exact)}" for number, exact in enumerate(exact_schemas(schemas))]
    return "\n".join([f"start: {' | '.join(f'call_{number}' for number in range(len(functions)))}", *rules])


def calls_or_content(
    calls: str,
    schema: dict[str, Any],
    text: Callable[[str], str],
    *,
    reasoning: ReasoningFormat | None = None,
    starts_in_reasoning: bool = False,
    after_reasoning: str = "",
    before_content: str = "",
) -> str:
    """Grammar of reasoning, which may be omitted, and then `calls` or JSON of `schema`.

    `calls`: a grammar with the rule `start`. `after_reasoning`, `before_content`: fixed texts of the model's format.
    """
    rules = [re.sub("^start:", "calls:", calls), f"json: %json {json.dumps(schema)}"]
    rules.append(f"content: {text(before_content)} json")
    start = "start: (calls | content)"
    if reasoning is not None:
        closing = text(reasoning.closing)
        if closing.startswith('"'):  # a text, at which the rule ends; a token cannot occur in the text before it
            rules.append(f"reasoning_text[suffix={closing}]: /(?s:.*)/")
        else:
            rules.append(f"reasoning_text: /(?s:.*)/ {closing}")
        opening = "" if starts_in_reasoning else text(reasoning.opening)
        after = text(after_reasoning) if after_reasoning else "gap"
        rules += [f"reasoning: {opening} reasoning_text {after}", r"gap: /\s{0,4}/"]
        start = f"start: reasoning{'' if starts_in_reasoning else '?'} (calls | content)"
    return "\n".join([start, *rules])
