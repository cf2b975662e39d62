"""From an engine's tokens to what OpenAI's API says of them: text, log-probabilities, reasons, usage.

A `Choice` is one answer on its way. Two dialects (completions, chat) make JSON of it, whole or in pieces; the pieces
of a stream put together are the whole.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tcdeploy.engine.sequence import NewToken, TokenLogprobs
from tcdeploy.server.protocol import ChatRequest, CompletionRequest
from tcdeploy.server.stop_strings import StopStringDetokenizer
from tcdeploy.server.tools import ParsedDelta, ParsedToolCall, ToolCallParser
from tcdeploy.server.vocabulary import Vocabulary


class ScoredToken(NamedTuple):
    """A token with its log-probabilities, and where its text begins in the answer (characters)."""

    token_id: int
    logprobs: TokenLogprobs | None  # None of a prompt's first token
    offset: int


@dataclass
class Choice:
    index: int
    text: StopStringDetokenizer
    prompt_tokens: int
    wants_logprobs: bool
    echo: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    finish_reason: str = ""
    num_chars: int = 0
    unsent_logprobs: list[ScoredToken] = field(default_factory=list)  # not yet told
    tool_parser: ToolCallParser | None = None  # where the answer may call tools
    calls: list[ParsedToolCall] = field(default_factory=list)  # not yet told
    reasoning: str = ""  # not yet told

    @property
    def has_unsent_output(self) -> bool:
        return bool(self.finish_reason or self.unsent_logprobs or self.calls or self.reasoning)

    def receive(self, token: NewToken, vocabulary: Vocabulary) -> str:
        """The text that a token adds, calls of tools left out. Sets `finish_reason` at the end, or at a stop string."""
        self.num_tokens += 1
        delta = ""
        if self.num_tokens == 1 and self.echo is not None:
            delta = self.echo
            if self.wants_logprobs:
                self._add_prompt_logprobs(token.prompt_logprobs or (), vocabulary)
        if self.wants_logprobs and token.logprobs is not None:
            self.unsent_logprobs.append(ScoredToken(token.token_id, token.logprobs, self.num_chars + len(delta)))
        delta += self.text.push(token.token_id)
        if self.text.stopped:
            self.finish_reason = "stop"
        elif token.finish_reason:
            delta += self.text.finish()
            self.finish_reason = "stop" if self.text.stopped else token.finish_reason
        if self.tool_parser is not None:
            delta = self._parse_tool_calls(delta, self.tool_parser)
        self.num_chars += len(delta)
        return delta

    def _parse_tool_calls(self, delta: str, tool_parser: ToolCallParser) -> str:
        content = self._store_parsed(tool_parser.push(delta))
        if self.finish_reason:
            content += self._store_parsed(
                tool_parser.finish(was_truncated=self.finish_reason == "length" or self.text.stopped)
            )
        if self.finish_reason == "stop" and tool_parser.has_calls:
            self.finish_reason = "tool_calls"
        return content

    def _store_parsed(self, parsed: ParsedDelta) -> str:
        self.calls += parsed.calls
        self.reasoning += parsed.reasoning
        return parsed.content

    def take_calls(self) -> list[ParsedToolCall]:
        taken, self.calls = self.calls, []
        return taken

    def take_reasoning(self) -> dict[str, str]:
        taken, self.reasoning = self.reasoning, ""
        return {"reasoning_content": taken} if taken else {}

    def take_logprobs(self) -> list[ScoredToken]:
        taken, self.unsent_logprobs = self.unsent_logprobs, []
        return taken

    def _add_prompt_logprobs(self, found: tuple[TokenLogprobs, ...], vocabulary: Vocabulary) -> None:
        offset = 0
        for token_id, logprobs in zip(self.prompt_token_ids, (None, *found), strict=True):
            self.unsent_logprobs.append(ScoredToken(token_id, logprobs, offset))
            offset += 0 if vocabulary.is_special(token_id) else len(vocabulary.text(token_id))


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int

    def json(self) -> dict[str, int]:
        return {**self._asdict(), "total_tokens": self.prompt_tokens + self.completion_tokens}


def total_usage(choices: list[Choice], prompts: int) -> Usage:
    """A prompt counts once, however many choices it has."""
    each = len(choices) // prompts
    return Usage(sum(entry.prompt_tokens for entry in choices[::each]), sum(entry.num_tokens for entry in choices))


class ResponseBuilder:
    """One request's way of saying things."""

    def __init__(self, model: str, vocabulary: Vocabulary, prefix: str, kind: str) -> None:
        self.common_fields = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self.vocabulary = vocabulary

    def delta(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def full_json(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def first_delta(self, choice: Choice) -> dict[str, Any] | None:
        return None

    def envelope(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        return {**self.common_fields, "choices": choices, **({"usage": usage.json()} if usage else {})}


class CompletionResponseBuilder(ResponseBuilder):
    def __init__(self, request: CompletionRequest, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(model, vocabulary, "cmpl", "text_completion")
        self.num_top_logprobs = request.logprobs

    def delta(self, choice: Choice, text: str) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice) if choice.wants_logprobs else None,
            "finish_reason": choice.finish_reason or None,
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
        """Two tokens may have one text: the more likely one is told."""
        if entry.logprobs is None:
            return None
        found: dict[str, float] = {}
        for token_id, value in entry.logprobs.top:
            found.setdefault(self.vocabulary.text(token_id), value)
        return found


class ChatResponseBuilder(ResponseBuilder):
    def __init__(self, request: ChatRequest, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(
            model, vocabulary, "chatcmpl", "chat.completion.chunk" if request.stream else "chat.completion"
        )

    def first_delta(self, choice: Choice) -> dict[str, Any] | None:
        return self._chunk_choice(choice, {"role": "assistant", "content": ""}, None)

    def delta(self, choice: Choice, text: str) -> dict[str, Any]:
        delta: dict[str, Any] = {**choice.take_reasoning(), **({"content": text} if text else {})}
        if calls := choice.take_calls():
            delta["tool_calls"] = [{"index": call.number, **call.json()} for call in calls]
        return self._chunk_choice(choice, delta, self._logprobs(choice))

    def full_json(self, choice: Choice, text: str) -> dict[str, Any]:
        calls = [call.json() for call in choice.take_calls()]
        message = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        return {
            "index": choice.index,
            "message": {**message, **choice.take_reasoning(), **({"tool_calls": calls} if calls else {})},
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
        }

    def _chunk_choice(self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        reason = choice.finish_reason or None
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

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
