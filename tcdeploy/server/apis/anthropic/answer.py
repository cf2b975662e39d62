"""Responses of Anthropic's Messages API: a message of content blocks, or the events that build it."""

from __future__ import annotations

import uuid
from typing import Any

from pydantic_core import from_json

from tcdeploy.server.apis.answer import Answer, named_event, to_json
from tcdeploy.server.apis.anthropic.protocol import MESSAGES_FIELD_NAMES, MessagesRequest, messages_error_body
from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.apis.openai.unsupported_fields import rename_error
from tcdeploy.server.generate.active_request import ActiveRequest
from tcdeploy.server.generate.choice import Delta
from tcdeploy.server.output.json_text import dump
from tcdeploy.server.output.parser import OutputCall, OutputPart, OutputReasoning, OutputText, joined

STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}


class MessagesAnswer(Answer):
    keep_alive = named_event("ping", '{"type":"ping"}')

    def __init__(self, active: ActiveRequest, body: MessagesRequest) -> None:
        super().__init__(active)
        self._max_tokens = body.max_tokens
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._id = f"msg_{uuid.uuid4().hex}"
        self._open_kind: type[OutputPart] | None = None  # of the block that is not closed yet
        self._num_blocks = 0

    async def body(self) -> bytes:
        [output] = await self.whole_output()
        content = []
        for part in joined(output.parts):
            block, key, value = self._block(part)
            content.append({**block, key: value})
        return to_json(self._message(content, **self._end())).encode()

    def first_events(self) -> bytes:
        message = self._message([], stop_reason=None, stop_sequence=None)
        return _event("message_start", message=message) + self.keep_alive

    def events(self, deltas: dict[int, Delta]) -> bytes:
        return b"".join(self._part_events(part) for delta in deltas.values() for part in joined(delta.parts))

    def last_events(self) -> bytes:
        delta = _event("message_delta", delta=self._end(), usage=self._usage())
        return self._close_block() + delta + _event("message_stop")

    def error_events(self, error: ApiError) -> bytes:
        return named_event("error", to_json(messages_error_body(rename_error(error, MESSAGES_FIELD_NAMES))))

    def _part_events(self, part: OutputPart) -> bytes:
        block, key, value = self._block(part)
        events = b""
        if isinstance(part, OutputCall) or type(part) is not self._open_kind:
            events += self._close_block()
            events += _event("content_block_start", index=self._num_blocks, content_block=block)
            self._open_kind = type(part)
        if key == "input":
            delta = {"type": "input_json_delta", "partial_json": to_json(value)}
        else:
            delta = {"type": f"{key}_delta", key: value}
        return events + _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close_block(self) -> bytes:
        if self._open_kind is None:
            return b""
        self._open_kind = None
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)

    def _block(self, part: OutputPart) -> tuple[dict[str, Any], str, Any]:
        """An empty block for a part, and the field that the part fills with its value."""
        match part:
            case OutputCall():
                call_id = part.id.replace("call_", "toolu_", 1)
                return {"type": "tool_use", "id": call_id, "name": part.name, "input": {}}, "input", _input(part)
            case OutputText():
                return {"type": "text", "text": ""}, "text", part.text
            case OutputReasoning():
                thinking = part.text if self._shows_thinking else ""
                return {"type": "thinking", "thinking": "", "signature": ""}, "thinking", thinking

    def _message(self, content: list[dict[str, Any]], **end: Any) -> dict[str, Any]:
        model = self.active.service.settings.model
        head = {"id": self._id, "type": "message", "role": "assistant", "model": model, "content": content}
        return {**head, **end, "usage": self._usage()}

    def _end(self) -> dict[str, Any]:
        [choice] = self.active.choices
        if choice.finish_reason == "length":
            is_cut = choice.num_tokens >= self._max_tokens
            reason = "max_tokens" if is_cut else "model_context_window_exceeded"
        else:
            reason = STOP_REASONS[choice.finish_reason]
        matched = choice.detokenizer.matched if reason == "end_turn" else None
        return {"stop_reason": "stop_sequence" if matched is not None else reason, "stop_sequence": matched}

    def _usage(self) -> dict[str, int]:
        """Cached tokens are not part of `input_tokens`. They are known with the first token."""
        usage = self.active.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens, "output_tokens": usage.completion_tokens,
        }  # fmt: skip


def _input(call: OutputCall) -> Any:
    """The arguments as an object, in which those of another type are wrapped; of a truncated call, what there is."""
    try:
        value = from_json(call.arguments, allow_partial=True)
        dump(value)  # refuses numbers beyond a float's range, which would be written as Infinity
    except ValueError:
        value = call.arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _event(event_type: str, **fields: Any) -> bytes:
    return named_event(event_type, to_json({"type": event_type, **fields}))
