"""The output of one choice as parts in the order in which the model generated them: reasoning, text and calls.

A delta of ActiveRequest may cover several tokens, and has their text, reasoning and calls separately. The blocks or
items of a response must not depend on how many tokens a delta covers, so the order is recorded with each token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tcdeploy.server.generate.choice import Choice
from tcdeploy.server.output.parsed_output import ParsedToolCall


class OutputPart(NamedTuple):
    kind: Literal["reasoning", "text", "call"]
    text: str
    call: ParsedToolCall | None = None


class OutputParts:
    """Collects the parts of a choice. Consecutive reasoning or text is one part until it is taken."""

    def __init__(self) -> None:
        self._parts: list[OutputPart] = []
        self._pieces: list[str] = []  # of the reasoning or text after these parts; `_last_kind` is its kind
        self._last_kind: Literal["", "reasoning", "text", "call"] = ""
        self.num_reasoning_tokens = 0

    def receive(self, choice: Choice, text: str) -> None:
        """Record the output that one token added to the choice. `text` is its content."""
        calls = choice.take_calls()
        self._append("reasoning", choice.take_reasoning())
        self._append("text", text)
        for call in calls:
            self._join_pieces()
            self._parts.append(OutputPart("call", "", call))
            self._last_kind = "call"
        if self._last_kind == "reasoning":  # a token inside a reasoning block, with or without text
            self.num_reasoning_tokens += 1

    def _append(self, kind: Literal["reasoning", "text"], text: str) -> None:
        if not text:
            return
        if self._last_kind != kind:
            self._join_pieces()
        self._pieces.append(text)
        self._last_kind = kind

    def _join_pieces(self) -> None:
        if self._pieces and self._last_kind in ("reasoning", "text"):
            self._parts.append(OutputPart(self._last_kind, "".join(self._pieces)))
        self._pieces = []

    def take(self) -> list[OutputPart]:
        """The parts since the last call. A part may continue the last one of the same kind."""
        self._join_pieces()
        parts, self._parts = self._parts, []
        return parts
