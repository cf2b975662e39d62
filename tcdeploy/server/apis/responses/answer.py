"""Responses of OpenAI's Responses API: a response with output items, or the typed events that build it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

from tcdeploy.server.apis.answer import Answer, named_event, to_json
from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.apis.openai.unsupported_fields import rename_error
from tcdeploy.server.apis.responses.protocol import RESPONSES_FIELD_NAMES, ResponsesRequest
from tcdeploy.server.generate.active_request import ActiveRequest
from tcdeploy.server.generate.choice import Delta
from tcdeploy.server.output.parser import OutputCall, OutputPart, OutputText, joined

REPEATED_FIELDS = (
    "instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "safety_identifier", "user",
)  # fmt: skip
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponsesAnswer(Answer):
    """`store` is called with the JSON and the output items of the finished response."""

    def __init__(
        self, active: ActiveRequest, body: ResponsesRequest, response_id: str,
        store: Callable[[bytes, list[dict[str, Any]]], None],
    ) -> None:  # fmt: skip
        super().__init__(active)
        self._store = store
        self._sequence_number = 0
        self._items: list[dict[str, Any]] = []
        self._open_texts: list[str] | None = None  # pieces of the open item's text; None: no item is open
        # The JSON of the fields that do not change is made once, because tools and instructions may be long.
        self._fixed_json = to_json(_fixed_fields(active, body, response_id))

    async def body(self) -> bytes:
        [output] = await self.whole_output()
        for part in joined(output.parts):
            self._add(part)
        self._end_output()
        return self._finish().encode()

    def first_events(self) -> bytes:
        response = self._response("in_progress")
        return b"".join(self._response_event(name, response) for name in ("response.created", "response.in_progress"))

    def events(self, deltas: dict[int, Delta]) -> bytes:
        return b"".join(self._add(part) for delta in deltas.values() for part in joined(delta.parts))

    def last_events(self) -> bytes:
        events = self._end_output()
        response = self._finish()
        return events + self._response_event(f"response.{self._status}", response)

    def error_events(self, error: ApiError) -> bytes:
        error = rename_error(error, RESPONSES_FIELD_NAMES)
        event = self._event("error", code=error.code or error.error_type, message=error.message, param=error.param)
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self._close("incomplete")
        response = self._response("failed", error={"code": code, "message": error.message})
        return event + self._response_event("response.failed", response)

    def _add(self, part: OutputPart) -> bytes:
        """Add a part to the items. Returns the events."""
        if isinstance(part, OutputCall):
            return self._close() + self._add_call(part)
        item_type = "message" if isinstance(part, OutputText) else "reasoning"
        events = b""
        if self._open_texts is None or self._items[-1]["type"] != item_type:
            events = self._close() + self._open(item_type)
        assert self._open_texts is not None
        self._open_texts.append(part.text)
        return events + self._text_event("delta", delta=part.text)

    def _add_call(self, call: OutputCall) -> bytes:
        item = self._new_item("function_call", call_id=call.id, name=call.name, arguments="")
        events = self._item_event("response.output_item.added")
        name = "response.function_call_arguments"
        events += self._event(f"{name}.delta", **self._place(), delta=call.arguments)
        events += self._event(f"{name}.done", **self._place(), name=call.name, arguments=call.arguments)
        is_cut = self._was_cut and not _is_json(call.arguments)
        item |= {"arguments": call.arguments, "status": "incomplete" if is_cut else "completed"}
        return events + self._item_event("response.output_item.done")

    def _open(self, item_type: str) -> bytes:
        fields: dict[str, Any] = {"role": "assistant"} if item_type == "message" else {"summary": []}
        item = self._new_item(item_type, **fields, content=[])
        events = self._item_event("response.output_item.added")
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
        item["content"].append(part if item_type == "message" else {"type": "reasoning_text", "text": ""})
        self._open_texts = []
        return events + self._content_event("response.content_part.added", part=item["content"][0])

    def _close(self, status: str = "completed") -> bytes:
        """End the open item, if there is one. Returns the events."""
        if self._open_texts is None:
            return b""
        text, self._open_texts = "".join(self._open_texts), None
        item = self._items[-1]
        item["content"][0]["text"], item["status"] = text, status
        events = self._text_event("done", text=text)
        events += self._content_event("response.content_part.done", part=item["content"][0])
        return events + self._item_event("response.output_item.done")

    def _end_output(self) -> bytes:
        """End the last item. If there is no item, add an empty message, as OpenAI's API does."""
        events = b"" if self._items else self._open("message")
        return events + self._close(self._status)

    def _new_item(self, item_type: str, **fields: Any) -> dict[str, Any]:
        item_id = f"{ID_PREFIXES[item_type]}_{uuid.uuid4().hex}"
        self._items.append({"id": item_id, "type": item_type, "status": "in_progress", **fields})
        return self._items[-1]

    def _finish(self) -> str:
        """The JSON of the complete response, which is also stored."""
        details = {"reason": "max_output_tokens"} if self._was_cut else None
        response = self._response(self._status, incomplete_details=details, completed_at=int(time.time()))
        self._store(response.encode(), self._items)
        return response

    @property
    def _was_cut(self) -> bool:
        return self.active.choices[0].finish_reason == "length"

    @property
    def _status(self) -> str:
        return "incomplete" if self._was_cut else "completed"

    def _response(self, status: str, **fields: Any) -> str:
        is_running = status == "in_progress"
        changing = {
            "status": status, "completed_at": None, "error": None, "incomplete_details": None,
            "output": [] if is_running else self._items, "usage": None if is_running else self._usage(), **fields,
        }  # fmt: skip
        return f"{self._fixed_json[:-1]},{to_json(changing)[1:]}"

    def _usage(self) -> dict[str, Any]:
        usage = self.active.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.active.choices[0].num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _text_event(self, event_type: str, **fields: Any) -> bytes:
        content_type = self._items[-1]["content"][0]["type"]
        extra: dict[str, Any] = {"logprobs": []} if content_type == "output_text" else {}
        return self._content_event(f"response.{content_type}.{event_type}", **fields, **extra)

    def _content_event(self, event_type: str, **fields: Any) -> bytes:
        return self._event(event_type, **self._place(), content_index=0, **fields)

    def _item_event(self, event_type: str) -> bytes:
        return self._event(event_type, output_index=len(self._items) - 1, item=self._items[-1])

    def _event(self, event_type: str, **fields: Any) -> bytes:
        return named_event(event_type, to_json({**self._event_head(event_type), **fields}))

    def _response_event(self, event_type: str, response: str) -> bytes:
        return named_event(event_type, f'{to_json(self._event_head(event_type))[:-1]},"response":{response}}}')

    def _event_head(self, event_type: str) -> dict[str, Any]:
        self._sequence_number += 1
        return {"type": event_type, "sequence_number": self._sequence_number - 1}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _fixed_fields(active: ActiveRequest, body: ResponsesRequest, response_id: str) -> dict[str, Any]:
    """The fields that do not change during generation. Omitted parameters have the values that are used."""
    params = active.group.engine_requests[0].params
    text_format = body.text.format if body.text else None
    tool_choice = body.tool_choice or "auto"
    return {
        "id": response_id, "object": "response", "created_at": int(time.time()), "background": False,
        **{name: getattr(body, name) for name in REPEATED_FIELDS}, "max_tool_calls": None,
        "metadata": body.metadata or {}, "model": active.service.settings.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default", "store": body.is_stored, "temperature": params.temperature,
        "text": {"format": text_format.model_dump(by_alias=True) if text_format else {"type": "text"}},
        "tool_choice": tool_choice if isinstance(tool_choice, str) else tool_choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or []], "top_logprobs": 0, "top_p": params.top_p,
        "truncation": "disabled",
    }  # fmt: skip
