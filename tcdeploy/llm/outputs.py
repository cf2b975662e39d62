"""Results of the library: an `Answer`, or its pieces while it is generated. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tcdeploy.engine.schedule.sequence import NewToken, SamplingParams, TokenLogprobs
from tcdeploy.text.stop_strings import StopStringDetokenizer


class Request(NamedTuple):
    """A prompt as token ids, with the parameters that the engine gets."""

    prompt: str | None  # as given, or as the chat template rendered it; None if it was given as token ids
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class AnswerPiece:
    """What one or more new tokens add to an answer. `text` is empty while a character or a stop string is incomplete.

    finish_reason: "" until the last piece, then as in `Answer`.
    logprobs: one entry per token, if the parameters ask for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one prompt.

    prompt: the text that was tokenized; for a chat, what the chat template rendered. None for a prompt of token ids.
    text: without special tokens; it ends before the stop string that ended it.
    token_ids: all new tokens, those of a stop string and the stop token included.
    finish_reason: "stop" (a stop string, a stop token or the end of the sequence) or "length" (`max_tokens`).
    stop_reason: the stop string or the id of the stop token; None if neither ended the answer.
    logprobs, prompt_logprobs: if the parameters ask for them: log-probabilities of each new token, and of each token of
        the prompt after its first.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class TextOutput:
    """Makes the text of one request from its tokens. `finish_reason` is "" while the answer is incomplete."""

    def __init__(self, tokenizer: Any, request: Request) -> None:
        self.request, self.finish_reason = request, ""
        self._detokenizer = StopStringDetokenizer(tokenizer, tuple(request.params.stop))
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs] | None = None

    def receive(self, tokens: Iterable[NewToken]) -> AnswerPiece:
        """Add the engine's next tokens. Those after a stop string are dropped."""
        start, text = len(self._token_ids), ""
        for token in tokens:
            piece, self.finish_reason = self._detokenizer.receive(token.token_id, token.finish_reason)
            text += piece
            self._token_ids.append(token.token_id)
            if self._logprobs is not None and token.logprobs is not None:
                self._logprobs.append(token.logprobs)
            if token.prompt_logprobs is not None:  # with the first token
                self._prompt_logprobs = list(token.prompt_logprobs)
            if self.finish_reason:
                break
        self._text.append(text)
        return AnswerPiece(
            text=text, token_ids=self._token_ids[start:], finish_reason=self.finish_reason,
            logprobs=None if self._logprobs is None else self._logprobs[start:],
        )  # fmt: skip

    def answer(self) -> Answer:
        """The answer so far."""
        prompt, prompt_token_ids, params = self.request
        stop_reason: str | int | None = self._detokenizer.matched
        if stop_reason is None and self.finish_reason == "stop" and self._token_ids[-1] in params.stop_token_ids:
            stop_reason = self._token_ids[-1]
        return Answer(
            prompt=prompt, prompt_token_ids=prompt_token_ids, text="".join(self._text), token_ids=self._token_ids,
            finish_reason=self.finish_reason, stop_reason=stop_reason, logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )  # fmt: skip
