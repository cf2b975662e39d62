"""One choice of a request: its text, what each token adds, and token usage; text and bytes of single tokens."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tcdeploy.engine.schedule.sequence import NewToken, TokenLogprobs
from tcdeploy.server.output.parser import OutputParser, OutputPart, OutputReasoning, OutputText
from tcdeploy.text.stop_strings import StopStringDetokenizer

BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """The text and the bytes of single tokens. The two differ if a token is part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._special = frozenset(tokenizer.all_special_ids)
        self.text = functools.lru_cache(maxsize=65536)(self._text)
        self.bytes = functools.lru_cache(maxsize=65536)(self._bytes)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a special token, such as BOS, which has no text of its own."""
        return token_id in self._special

    def _text(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _bytes(self, token_id: int) -> bytes:
        """The token's bytes. A token that is part of a character has the text U+FFFD but exact bytes."""
        token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        fallback = BYTE_FALLBACK.fullmatch(token)
        if fallback:
            return bytes([int(fallback[1], 16)])
        table = _byte_decoder()
        if self._is_byte_level and token_id not in self._special and all(c in table for c in token):
            return bytes(table[character] for character in token)
        return self.text(token_id).encode()


@functools.cache
def _byte_decoder() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable bytes map to themselves, the others to code points from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class ScoredToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None  # None for the first token of a prompt
    offset: int  # characters from the start of the text


class Delta:
    """The output that new tokens add to a choice. The parts may be empty although there are tokens: a parser holds text
    back that may belong to a call. A dataclass with default factories would take 0.4 us per token.
    """

    __slots__ = ("is_first", "logprobs", "parts", "token_ids")

    def __init__(self) -> None:
        self.is_first = False  # whether it begins the choice
        self.parts: list[OutputPart] = []
        self.token_ids: list[int] = []  # if the response contains them
        self.logprobs: list[ScoredToken] = []  # if the response contains them

    def append(self, other: Delta) -> None:
        self.is_first |= other.is_first
        self.parts += other.parts
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs


@dataclass
class Choice:
    index: int  # prompt index * n + choice index
    detokenizer: StopStringDetokenizer
    num_prompt_tokens: int
    num_top_logprobs: int | None  # alternatives per token in `logprobs`; None: no log-probabilities
    echo: str | None = None  # prompt text to return before the output
    drops_output: bool = False  # only the prompt is returned; the engine samples one token nevertheless
    returns_token_ids: bool = False
    prompt_token_ids: tuple[int, ...] = ()  # empty unless the response contains them, or their log-probabilities
    num_cached_tokens: int = 0  # of the prompt; known with the first token
    num_tokens: int = 0
    num_reasoning_tokens: int = 0  # also those inside of the reasoning that add no text
    finish_reason: str = ""
    output_parser: OutputParser | None = None  # set if the output may contain tool calls or reasoning
    num_prompt_logprobs: int | None = None  # alternatives per token in vLLM's field `prompt_logprobs`
    scored_prompt: list[tuple[int, TokenLogprobs | None]] = field(default_factory=list)  # if that field is wanted
    _is_reasoning: bool = False  # whether the last part is reasoning
    _num_chars: int = 0  # of the text; not counted with an output parser

    def receive(self, token: NewToken, vocabulary: Vocabulary, delta: Delta) -> None:
        """Add the output of a token to `delta`. Sets `finish_reason` at the end of the choice."""
        if not self.num_tokens:
            self._start(token, vocabulary, delta)
        if self.drops_output:
            self.finish_reason = "length"
            return
        self.num_tokens += 1
        if self.returns_token_ids:
            delta.token_ids.append(token.token_id)
        if self.num_top_logprobs is not None and token.logprobs is not None:
            delta.logprobs.append(ScoredToken(token.token_id, token.logprobs, self._num_chars))
        text, self.finish_reason = self.detokenizer.receive(token.token_id, token.finish_reason)
        if self.output_parser is None:
            self._add_text(text, delta)
        else:
            self._parse(text, self.output_parser, delta)

    def _start(self, token: NewToken, vocabulary: Vocabulary, delta: Delta) -> None:
        """Add the prompt, if it is returned. The first token brings what the engine knows about the prompt."""
        delta.is_first, self.num_cached_tokens = True, token.cached_tokens
        if token.prompt_logprobs is not None:
            scored = list(zip(self.prompt_token_ids, (None, *token.prompt_logprobs), strict=True))
            if self.echo is not None and self.num_top_logprobs is not None:
                delta.logprobs += _echoed_logprobs(scored, self.num_top_logprobs, vocabulary)
            if self.num_prompt_logprobs is not None:
                self.scored_prompt = scored
        self._add_text(self.echo or "", delta)

    def _add_text(self, text: str, delta: Delta) -> None:
        if text:
            delta.parts.append(OutputText(text))
            self._num_chars += len(text)

    def _parse(self, text: str, parser: OutputParser, delta: Delta) -> None:
        parts = parser.push(text)
        if self.finish_reason == "length":
            parts += parser.finish("length")
        elif self.finish_reason:
            parts += parser.finish("stop_string" if self.detokenizer.stopped else "complete")
        if self.finish_reason == "stop" and parser.has_calls:
            self.finish_reason = "tool_calls"
        if parts:
            delta.parts += parts
            self._is_reasoning = isinstance(parts[-1], OutputReasoning)
        self.num_reasoning_tokens += self._is_reasoning


def _echoed_logprobs(
    scored: list[tuple[int, TokenLogprobs | None]], num_top: int, vocabulary: Vocabulary
) -> list[ScoredToken]:
    entries, offset = [], 0
    for token_id, logprobs in scored:
        shortened = logprobs and logprobs._replace(top=logprobs.top[:num_top])
        entries.append(ScoredToken(token_id, shortened, offset))
        offset += 0 if vocabulary.is_special(token_id) else len(vocabulary.text(token_id))
    return entries


def prompt_logprob_json(
    token_id: int, logprobs: TokenLogprobs | None, num_top: int, vocabulary: Vocabulary
) -> dict[str, Any] | None:
    """vLLM's entry for one token of a prompt: the token, perhaps without a rank, and the most likely ones."""
    if logprobs is None:
        return None
    entries: dict[int, tuple[int | None, float]] = {token_id: (None, logprobs.chosen)}
    entries |= {other: (rank, value) for rank, (other, value) in enumerate(logprobs.top[:num_top], 1)}
    return {
        str(other): {"logprob": value, "rank": rank, "decoded_token": vocabulary.text(other)}
        for other, (rank, value) in entries.items()
    }


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # tokens of the prompts that were in the prefix cache

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def total_usage(choices: list[Choice], num_prompts: int) -> Usage:
    """A prompt counts once, regardless of its number of choices: cached tokens are those of its first choice."""
    first_choices = choices[:: len(choices) // num_prompts]
    return Usage(
        prompt_tokens=sum(choice.num_prompt_tokens for choice in first_choices),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        cached_tokens=sum(choice.num_cached_tokens for choice in first_choices),
    )
