"""Formats the response to a generation request: the body, or the events of a stream. One subclass per API.

sse.py sends the events, generation.py the body. The methods for events return the bytes of zero or more events.
"""

from __future__ import annotations

import json
from typing import Any

from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.generate.active_request import ActiveRequest, full_body

KEEP_ALIVE, DONE = b": keep-alive\n\n", b"data: [DONE]\n\n"
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

    def first_events(self) -> bytes:
        """Before the first token."""
        raise NotImplementedError

    def events(self, texts: dict[int, str]) -> bytes:
        """For new output: `texts` has the new text by choice index."""
        raise NotImplementedError

    def last_events(self) -> bytes:
        """After the last token."""
        raise NotImplementedError

    def error_events(self, error: ApiError) -> bytes:
        """After an error, instead of all further events."""
        raise NotImplementedError


class ChunkAnswer(Answer):
    """Completions and chat completions: response_builder.py makes the chunks."""

    end = DONE  # also after an error

    def __init__(self, active: ActiveRequest) -> None:
        super().__init__(active)
        options = active.request.stream_options
        self._with_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats

    async def body(self) -> bytes:
        return await full_body(self.active)

    def first_events(self) -> bytes:
        first_deltas = map(self.active.builder.first_delta, self.active.choices)
        return b"".join(self._chunk([delta]) for delta in first_deltas if delta is not None)

    def events(self, texts: dict[int, str]) -> bytes:
        """One event per choice with new output."""
        choices, builder = self.active.choices, self.active.builder
        return b"".join(
            self._chunk([builder.delta(choice, text)])
            for choice, text in ((choices[index], text) for index, text in texts.items())
            if text or choice.has_unsent_output
        )

    def last_events(self) -> bytes:
        if not self._with_usage:
            return b""
        return _data_event(self.active.builder.envelope([], self.active.usage))

    def error_events(self, error: ApiError) -> bytes:
        return _data_event(error.body)

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        usage = self.active.usage if self._continuous_usage else None
        return _data_event(self.active.builder.envelope(choices, usage))


def _data_event(content: dict[str, Any]) -> bytes:
    return b"data: " + to_json(content).encode() + b"\n\n"


def named_event(name: str, content: str) -> bytes:
    """An event with the field `event`. `content` is JSON."""
    return f"event: {name}\ndata: {content}\n\n".encode()
