"""Responses of completions and chat completions, whole or as stream chunks.

Concatenated chunks equal the whole response.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any

from tcdeploy.server.apis.answer import Answer, to_json
from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.generate.active_request import ActiveRequest
from tcdeploy.server.generate.choice import Choice, Delta, ScoredToken, Usage, Vocabulary, prompt_logprob_json
from tcdeploy.server.output.parser import OutputText, split_by_kind

DONE = b"data: [DONE]\n\n"
TOKENS_PER_SLICE = 64  # of a prompt, whose log-probabilities are encoded between two yields to the event loop: 7 ms
_to_finite_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class ChunkAnswer(Answer):
    """What the two APIs share. A chunk is one event with the new output of one choice."""

    end = DONE

    def __init__(self, active: ActiveRequest, id_prefix: str, object_type: str) -> None:
        super().__init__(active)
        options = active.request.stream_options
        self._with_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._vocabulary = active.service.vocabulary
        self._common_fields = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}", "object": object_type, "created": int(time.time()),
            "model": active.service.settings.model, "system_fingerprint": active.service.system_fingerprint,
        }  # fmt: skip
        self._first_fields: dict[str, Any] = {}  # further fields of the response, or of a stream's first chunk

    def chunk_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The entry of `choices` in a chunk."""
        raise NotImplementedError

    def whole_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The entry of `choices` in a response that is not streamed."""
        raise NotImplementedError

    async def body(self) -> bytes:
        """Log-probabilities of prompts are encoded in slices, because each takes up to 5 us."""
        choices = self.active.choices
        outputs = await self.whole_output()
        content = self._envelope(list(map(self.whole_choice, choices, outputs)), self.active.usage)
        text = _to_finite_json(content)
        parts: list[str] = []
        for choice in choices:
            if choice.num_prompt_logprobs is not None:
                before, _, text = text.partition(f'"{self._mark(choice)}"')
                parts += [before, "[", await _encode_scored(choice, choice.num_prompt_logprobs, self._vocabulary), "]"]
        return "".join([*parts, text]).encode()

    def first_events(self) -> bytes:
        return b""

    def events(self, deltas: dict[int, Delta]) -> bytes:
        events = b""
        for index, delta in deltas.items():
            choice = self.active.choices[index]
            if delta.parts or delta.token_ids or delta.logprobs or choice.finish_reason:
                events += self._chunk(self.chunk_choice(choice, delta))
        return events

    def last_events(self) -> bytes:
        return _data_event(self._envelope([], self.active.usage)) if self._with_usage else b""

    def error_events(self, error: ApiError) -> bytes:
        return _data_event(error.body)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return _data_event(self._envelope([choice], self.active.usage if self._continuous_usage else None))

    def _envelope(self, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        first_fields, self._first_fields = self._first_fields, {}
        usage_fields = {"usage": usage.json()} if usage else {}
        return {**self._common_fields, "choices": choices, **first_fields, **usage_fields}

    def _prompt_logprobs(self, choice: Choice) -> dict[str, str]:
        """vLLM's field `prompt_logprobs` if the choice has it. Its value is a mark, which `body` replaces."""
        return {} if choice.num_prompt_logprobs is None else {"prompt_logprobs": self._mark(choice)}

    def _mark(self, choice: Choice) -> str:
        return f"{self._common_fields['id']} {choice.index}"


def _data_event(content: dict[str, Any]) -> bytes:
    return b"data: " + to_json(content).encode() + b"\n\n"


async def _encode_scored(choice: Choice, num_top: int, vocabulary: Vocabulary) -> str:
    """The entries of `prompt_logprobs`, as JSON without the brackets."""
    slices: list[str] = []
    for first in range(0, len(choice.scored_prompt), TOKENS_PER_SLICE):
        entries = choice.scored_prompt[first : first + TOKENS_PER_SLICE]
        values = [prompt_logprob_json(*entry, num_top, vocabulary) for entry in entries]
        slices.append(_to_finite_json(values)[1:-1])
        await asyncio.sleep(0)
    return ",".join(slices)


def _token_ids(choice: Choice, delta: Delta) -> dict[str, list[int]]:
    return {"token_ids": delta.token_ids} if choice.returns_token_ids else {}


class CompletionAnswer(ChunkAnswer):
    def __init__(self, active: ActiveRequest) -> None:
        super().__init__(active, "cmpl", "text_completion")

    def chunk_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        has_prompt = choice.returns_token_ids and delta.is_first
        return {
            "index": choice.index,
            "text": "".join([part.text for part in delta.parts if isinstance(part, OutputText)]),
            "logprobs": self._logprobs(delta.logprobs, choice.num_top_logprobs),
            "finish_reason": choice.finish_reason or None,
            **({"prompt_token_ids": list(choice.prompt_token_ids)} if has_prompt else {}),
            **_token_ids(choice, delta),
            **self._prompt_logprobs(choice),
        }

    whole_choice = chunk_choice

    def _logprobs(self, scored: list[ScoredToken], num_top: int | None) -> dict[str, Any] | None:
        if num_top is None:
            return None
        text = self._vocabulary.text
        return {
            "tokens": [text(entry.token_id) for entry in scored],
            "token_logprobs": [entry.logprobs.chosen if entry.logprobs else None for entry in scored],
            "top_logprobs": [self._top_logprobs(entry) for entry in scored] if num_top else None,
            "text_offset": [entry.offset for entry in scored],
        }

    def _top_logprobs(self, entry: ScoredToken) -> dict[str, float] | None:
        """Log-probability by token text. If two tokens have the same text, the more likely one is returned."""
        if entry.logprobs is None:
            return None
        by_text: dict[str, float] = {}
        for token_id, value in entry.logprobs.top:
            by_text.setdefault(self._vocabulary.text(token_id), value)
        return by_text


class ChatAnswer(ChunkAnswer):
    def __init__(self, active: ActiveRequest) -> None:
        super().__init__(active, "chatcmpl", "chat.completion.chunk" if active.request.stream else "chat.completion")
        if active.request.return_token_ids:
            self._first_fields["prompt_token_ids"] = active.prompts[0].token_ids

    def first_events(self) -> bytes:
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return b"".join(self._chunk({**self.chunk_choice(choice, Delta()), **role}) for choice in self.active.choices)

    def chunk_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        content, reasoning, calls = split_by_kind(delta.parts)
        fields: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if content:
            fields["content"] = content
        if calls:
            fields["tool_calls"] = [{"index": call.number, **call.json()} for call in calls]
        return self._choice(choice, delta, delta=fields)

    def whole_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        self._first_fields |= self._prompt_logprobs(choice)
        content, reasoning, calls = split_by_kind(delta.parts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls and not content:
            message["content"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [call.json() for call in calls]
        return self._choice(choice, delta, message=message)

    def _choice(self, choice: Choice, output: Delta, **content: dict[str, Any]) -> dict[str, Any]:
        has_logprobs = choice.num_top_logprobs is not None
        logprobs = {"content": [self._logprob_entry(entry) for entry in output.logprobs]} if has_logprobs else None
        end = {"logprobs": logprobs, "finish_reason": choice.finish_reason or None}
        return {"index": choice.index, **content, **end, **_token_ids(choice, output)}

    def _logprob_entry(self, entry: ScoredToken) -> dict[str, Any]:
        assert entry.logprobs is not None
        top = [self._token_json(*alternative) for alternative in entry.logprobs.top]
        return {**self._token_json(entry.token_id, entry.logprobs.chosen), "top_logprobs": top}

    def _token_json(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._vocabulary.text(token_id),
            "logprob": logprob,
            "bytes": list(self._vocabulary.bytes(token_id)),
        }
