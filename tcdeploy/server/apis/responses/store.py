"""Responses of the Responses API that clients may retrieve or continue, in bounded memory.

The least recently used one is evicted first. A client can only access responses that were created with its API key.
Replicas do not share them, and a restart loses them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from tcdeploy.server.apis.openai.protocol import Message

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
OBJECT_BYTES = 2048  # upper bound for one message or call without its texts; measured: 1.5 KB


class StoredResponse(NamedTuple):
    body: bytes  # the JSON of the response
    messages: list[Message]  # of the conversation, the response included, without its instructions
    num_bytes: int  # upper bound of its memory
    api_key: str  # "" if the server has none


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # the least recently used first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Store a response, and evict others if the limits are exceeded. One that exceeds them alone is not stored."""
        if response.num_bytes > self._max_bytes:
            return
        self._responses[response_id] = response
        self.num_bytes += response.num_bytes
        while self.num_bytes > self._max_bytes or len(self._responses) > self._max_responses:
            self._drop(next(iter(self._responses)))

    def get(self, response_id: str, api_key: str) -> StoredResponse | None:
        """None if there is no such response, or if it was created with another key."""
        response = self._responses.get(response_id)
        if response is None or response.api_key != api_key:
            return None
        self._responses.move_to_end(response_id)
        return response

    def delete(self, response_id: str, api_key: str) -> bool:
        """Delete a response. Returns whether there was one that was created with this key."""
        if self.get(response_id, api_key) is None:
            return False
        self._drop(response_id)
        return True

    def _drop(self, response_id: str) -> None:
        self.num_bytes -= self._responses.pop(response_id).num_bytes


def memory_of(messages: Iterable[Message]) -> int:
    """Upper bound of the bytes that messages use. Responses of one conversation share most of their messages."""
    total = 0
    for message in messages:
        texts = [message.content, message.tool_call_id, *(message.model_extra or {}).values()]
        calls = message.tool_calls or []
        for call in calls:
            texts += [call.id, call.function.name, call.function.arguments]
        total += (1 + len(calls)) * OBJECT_BYTES + sum(map(sys.getsizeof, texts))
    return total
