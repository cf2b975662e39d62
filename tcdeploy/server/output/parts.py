"""The parts of an output in the order in which the model generated them: text, reasoning and tool calls.

Parsers emit parts, and each API writes them in its own format. A call is one part, which is emitted when the call is
complete. How a text is cut into parts depends on the tokens, so consumers join consecutive texts of one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias


@dataclass(slots=True)
class OutputText:
    text: str


@dataclass(slots=True)
class OutputReasoning:
    text: str


@dataclass(slots=True)
class OutputCall:
    number: int  # index within the choice
    id: str
    name: str
    arguments: str  # JSON, or the beginning of it

    def json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


OutputPart: TypeAlias = OutputText | OutputReasoning | OutputCall


class SplitOutput(NamedTuple):
    content: str
    reasoning: str
    calls: list[OutputCall]


def split(parts: Iterable[OutputPart]) -> SplitOutput:
    """The parts by kind, without their order."""
    parts = list(parts)
    return SplitOutput(
        "".join(part.text for part in parts if isinstance(part, OutputText)),
        "".join(part.text for part in parts if isinstance(part, OutputReasoning)),
        [part for part in parts if isinstance(part, OutputCall)],
    )


def joined(parts: Iterable[OutputPart]) -> Iterator[OutputPart]:
    """The parts, with consecutive texts of one kind as one part."""
    for kind, group in groupby(parts, type):
        if kind is OutputCall:
            yield from group
        else:
            yield kind("".join(part.text for part in group))  # type: ignore[union-attr, call-arg]
