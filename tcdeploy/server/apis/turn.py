"""Builds messages for the chat template from the blocks or items of another API."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tcdeploy.server.apis.openai.protocol import Message, ToolCall
from tcdeploy.text.template_form import MESSAGE_SEPARATOR

BLOCKS_PER_SLICE = 256  # blocks or items that are translated between two yields to the event loop


@dataclass
class Turn:
    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def message(self) -> Message:
        fields: dict[str, Any] = {"role": self.role, "content": MESSAGE_SEPARATOR.join(self.texts), **self.extra}
        if self.calls:
            fields["tool_calls"] = self.calls
        if self.reasoning:
            fields["reasoning_content"] = MESSAGE_SEPARATOR.join(self.reasoning)
        return Message.model_construct(**fields)


async def to_messages(turns: list[Turn]) -> list[Message]:
    """The messages of the turns, made in slices so that the event loop is not blocked."""
    messages: list[Message] = []
    for start in range(0, len(turns), BLOCKS_PER_SLICE):
        messages += [turn.message() for turn in turns[start : start + BLOCKS_PER_SLICE]]
        await asyncio.sleep(0)
    return messages


def last_turn(turns: list[Turn], role: str) -> Turn:
    """The last turn if it has this role, else a new one."""
    if not turns or turns[-1].role != role:
        turns.append(Turn(role))
    return turns[-1]


def tool_turn(call_id: str, texts: list[str]) -> Turn:
    """The result of a call."""
    return Turn("tool", texts, extra={"tool_call_id": call_id})
