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
from tcdeploy.server.stop_strings import AnswerText
from tcdeploy.server.tools import Call, Said, ToolReader
from tcdeploy.server.vocabulary import Vocabulary


class Scored(NamedTuple):
    """A token with its log-probabilities, and where its text begins in the answer (characters)."""

    token_id: int
    logprobs: TokenLogprobs | None  # None of a prompt's first token
    offset: int


@dataclass
class Choice:
    index: int
    text: AnswerText
    prompt_tokens: int
    wants_logprobs: bool
    echo: str | None = None
    echoed_ids: tuple[int, ...] = ()
    tokens: int = 0
    finish_reason: str = ""
    characters: int = 0
    pending: list[Scored] = field(default_factory=list)  # not yet told
    reader: ToolReader | None = None  # where the answer may call tools
    calls: list[Call] = field(default_factory=list)  # not yet told
    reasoning: str = ""  # not yet told

    @property
    def has_news(self) -> bool:
        return bool(self.finish_reason or self.pending or self.calls or self.reasoning)

    def receive(self, token: NewToken, vocabulary: Vocabulary) -> str:
        """The text that a token adds, calls of tools left out. Sets `finish_reason` at the end, or at a stop string."""
        self.tokens += 1
        piece = ""
        if self.tokens == 1 and self.echo is not None:
            piece = self.echo
            if self.wants_logprobs:
                self._score_prompt(token.prompt_logprobs or (), vocabulary)
        if self.wants_logprobs and token.logprobs is not None:
            self.pending.append(Scored(token.token_id, token.logprobs, self.characters + len(piece)))
        piece += self.text.push(token.token_id)
        if self.text.stopped:
            self.finish_reason = "stop"
        elif token.finish_reason:
            piece += self.text.finish()
            self.finish_reason = "stop" if self.text.stopped else token.finish_reason
        if self.reader is not None:
            piece = self._read(piece, self.reader)
        self.characters += len(piece)
        return piece

    def _read(self, piece: str, reader: ToolReader) -> str:
        content = self._hear(reader.push(piece))
        if self.finish_reason:
            content += self._hear(reader.finish(was_cut=self.finish_reason == "length" or self.text.stopped))
        if self.finish_reason == "stop" and reader.has_called:
            self.finish_reason = "tool_calls"
        return content

    def _hear(self, said: Said) -> str:
        self.calls += said.calls
        self.reasoning += said.reasoning
        return said.content

    def take_calls(self) -> list[Call]:
        taken, self.calls = self.calls, []
        return taken

    def take_reasoning(self) -> dict[str, str]:
        taken, self.reasoning = self.reasoning, ""
        return {"reasoning_content": taken} if taken else {}

    def take_scored(self) -> list[Scored]:
        taken, self.pending = self.pending, []
        return taken

    def _score_prompt(self, found: tuple[TokenLogprobs, ...], vocabulary: Vocabulary) -> None:
        offset = 0
        for token_id, logprobs in zip(self.echoed_ids, (None, *found), strict=True):
            self.pending.append(Scored(token_id, logprobs, offset))
            offset += 0 if vocabulary.is_special(token_id) else len(vocabulary.text(token_id))


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int

    def json(self) -> dict[str, int]:
        return {**self._asdict(), "total_tokens": self.prompt_tokens + self.completion_tokens}


def usage_of(choices: list[Choice], prompts: int) -> Usage:
    """A prompt counts once, however many choices it has."""
    each = len(choices) // prompts
    return Usage(sum(one.prompt_tokens for one in choices[::each]), sum(one.tokens for one in choices))


class Dialect:
    """One request's way of saying things."""

    def __init__(self, model: str, vocabulary: Vocabulary, prefix: str, kind: str) -> None:
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
        self.vocabulary = vocabulary

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return None

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        return {**self.head, "choices": choices, **({"usage": usage.json()} if usage else {})}


class Completions(Dialect):
    def __init__(self, request: CompletionRequest, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(model, vocabulary, "cmpl", "text_completion")
        self.alternatives = request.logprobs

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice) if choice.wants_logprobs else None,
            "finish_reason": choice.finish_reason or None,
        }

    whole = piece

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        scored = choice.take_scored()
        text = self.vocabulary.text
        return {
            "tokens": [text(one.token_id) for one in scored],
            "token_logprobs": [one.logprobs.chosen if one.logprobs else None for one in scored],
            "top_logprobs": [self._top(one) for one in scored] if self.alternatives else None,
            "text_offset": [one.offset for one in scored],
        }

    def _top(self, one: Scored) -> dict[str, float] | None:
        """Two tokens may have one text: the more likely one is told."""
        if one.logprobs is None:
            return None
        found: dict[str, float] = {}
        for token_id, value in one.logprobs.top:
            found.setdefault(self.vocabulary.text(token_id), value)
        return found


class Chat(Dialect):
    def __init__(self, request: ChatRequest, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(
            model, vocabulary, "chatcmpl", "chat.completion.chunk" if request.stream else "chat.completion"
        )

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self._streamed(choice, {"role": "assistant", "content": ""}, None)

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        delta: dict[str, Any] = {**choice.take_reasoning(), **({"content": text} if text else {})}
        if calls := choice.take_calls():
            delta["tool_calls"] = [{"index": call.number, **call.json()} for call in calls]
        return self._streamed(choice, delta, self._logprobs(choice))

    def whole(self, choice: Choice, text: str) -> dict[str, Any]:
        calls = [call.json() for call in choice.take_calls()]
        message = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        return {
            "index": choice.index,
            "message": {**message, **choice.take_reasoning(), **({"tool_calls": calls} if calls else {})},
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
        }

    def _streamed(self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        reason = choice.finish_reason or None
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not choice.wants_logprobs:
            return None
        return {"content": [self._entry(one) for one in choice.take_scored()]}

    def _entry(self, one: Scored) -> dict[str, Any]:
        assert one.logprobs is not None
        top = [self._token(*alternative) for alternative in one.logprobs.top]
        return {**self._token(one.token_id, one.logprobs.chosen), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.vocabulary.text(token_id),
            "logprob": logprob,
            "bytes": list(self.vocabulary.bytes(token_id)),
        }
