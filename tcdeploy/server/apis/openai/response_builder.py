"""JSON of completions and chat completions, whole or as stream chunks. Concatenated chunks equal the whole response."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any, NamedTuple

from tcdeploy.server.apis.openai.protocol import ChatRequest, CompletionRequest
from tcdeploy.server.generate.choice import Choice, ScoredToken, Usage, prompt_logprob_json
from tcdeploy.server.generate.vocabulary import Vocabulary

TOKENS_PER_SLICE = 64  # of a prompt, whose log-probabilities are encoded between two yields to the event loop: 7 ms
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class ServedModel(NamedTuple):
    """What responses say about the model: its name in the API, `system_fingerprint`, and the text of its tokens."""

    name: str
    fingerprint: str
    vocabulary: Vocabulary


class ResponseBuilder:
    """Builds the JSON of one request: `delta` for a stream chunk, `full_json` for a response that is not streamed."""

    def __init__(self, served: ServedModel, id_prefix: str, object_type: str) -> None:
        self.common_fields = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "object": object_type,
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": served.fingerprint,
        }
        self.vocabulary = served.vocabulary
        self._scored_choices: dict[str, Choice] = {}  # by the mark in the response, in the order of the marks
        self.first_fields: dict[str, Any] = {}  # further fields of the response, or of a stream's first chunk

    def delta(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def full_json(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def prompt_logprobs(self, choice: Choice) -> dict[str, str]:
        """vLLM's field `prompt_logprobs` if the choice has it. Its value is a mark, which `body` replaces."""
        if choice.num_prompt_logprobs is None:
            return {}
        mark = uuid.uuid4().hex
        self._scored_choices[mark] = choice
        return {"prompt_logprobs": mark}

    async def body(self, content: dict[str, Any]) -> bytes:
        """The JSON of a response. Log-probabilities of prompts are encoded in slices, because each takes up to 5 us."""
        text = _to_json(content)
        parts: list[str] = []
        for mark, choice in self._scored_choices.items():
            before, _, text = text.partition(f'"{mark}"')
            parts += [before, "[", await _encode_scored(choice, self.vocabulary), "]"]
        return "".join([*parts, text]).encode()

    def first_delta(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk before the first token, if the API has one."""
        return None

    def envelope(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        first_fields, self.first_fields = self.first_fields, {}
        usage_fields = {"usage": usage.json()} if usage else {}
        return {**self.common_fields, "choices": choices, **first_fields, **usage_fields}


async def _encode_scored(choice: Choice, vocabulary: Vocabulary) -> str:
    """The entries of `prompt_logprobs`, as JSON without the brackets."""
    assert choice.num_prompt_logprobs is not None
    slices: list[str] = []
    for first in range(0, len(choice.scored_prompt), TOKENS_PER_SLICE):
        entries = choice.scored_prompt[first : first + TOKENS_PER_SLICE]
        values = [prompt_logprob_json(*entry, choice.num_prompt_logprobs, vocabulary) for entry in entries]
        slices.append(_to_json(values)[1:-1])
        await asyncio.sleep(0)
    return ",".join(slices)


class CompletionResponseBuilder(ResponseBuilder):
    def __init__(self, request: CompletionRequest, served: ServedModel) -> None:
        super().__init__(served, "cmpl", "text_completion")
        self.num_top_logprobs = request.logprobs

    def delta(self, choice: Choice, text: str) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice) if choice.wants_logprobs else None,
            "finish_reason": choice.finish_reason or None,
            **choice.take_prompt_token_ids(),
            **choice.take_token_ids(),
            **self.prompt_logprobs(choice),
        }

    full_json = delta

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        scored = choice.take_logprobs()
        text = self.vocabulary.text
        return {
            "tokens": [text(entry.token_id) for entry in scored],
            "token_logprobs": [entry.logprobs.chosen if entry.logprobs else None for entry in scored],
            "top_logprobs": [self._top_logprobs(entry) for entry in scored] if self.num_top_logprobs else None,
            "text_offset": [entry.offset for entry in scored],
        }

    def _top_logprobs(self, entry: ScoredToken) -> dict[str, float] | None:
        """Log-probability by token text. If two tokens have the same text, the more likely one is returned."""
        if entry.logprobs is None:
            return None
        by_text: dict[str, float] = {}
        for token_id, value in entry.logprobs.top:
            by_text.setdefault(self.vocabulary.text(token_id), value)
        return by_text


class ChatResponseBuilder(ResponseBuilder):
    def __init__(self, request: ChatRequest, served: ServedModel) -> None:
        super().__init__(served, "chatcmpl", "chat.completion.chunk" if request.stream else "chat.completion")

    def first_delta(self, choice: Choice) -> dict[str, Any] | None:
        return self._chunk_choice(choice, {"role": "assistant", "content": ""}, None)

    def delta(self, choice: Choice, text: str) -> dict[str, Any]:
        delta: dict[str, Any] = {**_reasoning_field(choice), **({"content": text} if text else {})}
        if calls := choice.take_calls():
            delta["tool_calls"] = [{"index": call.number, **call.json()} for call in calls]
        return self._chunk_choice(choice, delta, self._logprobs(choice))

    def full_json(self, choice: Choice, text: str) -> dict[str, Any]:
        self.first_fields |= self.prompt_logprobs(choice)
        calls = [call.json() for call in choice.take_calls()]
        message = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        return {
            "index": choice.index,
            "message": {**message, **_reasoning_field(choice), **({"tool_calls": calls} if calls else {})},
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            **choice.take_token_ids(),
        }

    def _chunk_choice(self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason or None,
            **choice.take_token_ids(),
        }

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not choice.wants_logprobs:
            return None
        return {"content": [self._logprob_entry(entry) for entry in choice.take_logprobs()]}

    def _logprob_entry(self, entry: ScoredToken) -> dict[str, Any]:
        assert entry.logprobs is not None
        top = [self._token_json(*alternative) for alternative in entry.logprobs.top]
        return {**self._token_json(entry.token_id, entry.logprobs.chosen), "top_logprobs": top}

    def _token_json(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.vocabulary.text(token_id),
            "logprob": logprob,
            "bytes": list(self.vocabulary.bytes(token_id)),
        }


def _reasoning_field(choice: Choice) -> dict[str, str]:
    reasoning = choice.take_reasoning()
    return {"reasoning_content": reasoning} if reasoning else {}
