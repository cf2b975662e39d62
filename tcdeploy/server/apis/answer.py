"""Formats the response to a generation request: the body, or the events of a stream. Each API has subclasses.

The methods for events return the bytes of zero or more events.
"""

from __future__ import annotations

import json

from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.generate.active_request import ActiveRequest
from tcdeploy.server.generate.choice import Delta

KEEP_ALIVE = b": keep-alive\n\n"
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Answer:
    """Interface. `active` has been submitted."""

    keep_alive = KEEP_ALIVE  # sent if there was no event for some time
    end = b""  # sent after the last event, also after an error

    def __init__(self, active: ActiveRequest) -> None:
        self.active = active

    async def body(self) -> bytes:
        """Wait for the last token. The JSON of the response."""
        raise NotImplementedError

    async def whole_output(self) -> list[Delta]:
        """Wait for the last token. All output of each choice."""
        whole = [Delta() for _ in self.active.choices]
        async for deltas in self.active.deltas():
            for index, delta in deltas.items():
                whole[index].append(delta)
        return whole

    def first_events(self) -> bytes:
        """Before the first token."""
        raise NotImplementedError

    def events(self, deltas: dict[int, Delta]) -> bytes:
        """For new output, by choice index."""
        raise NotImplementedError

    def last_events(self) -> bytes:
        """After the last token."""
        raise NotImplementedError

    def error_events(self, error: ApiError) -> bytes:
        """After an error, instead of all further events."""
        raise NotImplementedError


def named_event(name: str, content: str) -> bytes:
    """An event with the field `event`. `content` is JSON."""
    return f"event: {name}\ndata: {content}\n\n".encode()
