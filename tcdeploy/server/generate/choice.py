"""State of one choice while its tokens arrive: text, tool calls, log-probabilities, finish reason; and token usage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tcdeploy.engine.schedule.sequence import NewToken, TokenLogprobs
from tcdeploy.server.generate.stop_strings import StopStringDetokenizer
from tcdeploy.server.generate.vocabulary import Vocabulary
from tcdeploy.server.output.parsed_output import OutputEnd, OutputParser, ParsedDelta, ParsedToolCall


class ScoredToken(NamedTuple):
    """A token with its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None  # None for the first token of a prompt
    offset: int  # characters from the start of the text


@dataclass
class Choice:
    """One choice of a request. The `unsent` fields are cleared when a response builder takes them."""

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
    finish_reason: str = ""
    num_chars: int = 0
    output_parser: OutputParser | None = None  # set if the output may contain tool calls or reasoning
    num_prompt_logprobs: int | None = None  # alternatives per token in vLLM's field `prompt_logprobs`
    scored_prompt: list[tuple[int, TokenLogprobs | None]] = field(default_factory=list)  # if that field is wanted
    has_started: bool = False  # whether the first token has arrived
    has_sent_prompt: bool = False  # whether the ids of the prompt were taken
    unsent_token_ids: list[int] = field(default_factory=list)
    unsent_logprobs: list[ScoredToken] = field(default_factory=list)
    unsent_calls: list[ParsedToolCall] = field(default_factory=list)
    unsent_reasoning: list[str] = field(default_factory=list)

    @property
    def wants_logprobs(self) -> bool:
        return self.num_top_logprobs is not None

    @property
    def has_unsent_output(self) -> bool:
        return bool(
            self.finish_reason
            or self.unsent_token_ids
            or self.unsent_logprobs
            or self.unsent_calls
            or self.unsent_reasoning
        )

    def receive(self, token: NewToken, vocabulary: Vocabulary) -> str:
        """The content that a token adds, without tool calls. Sets `finish_reason` at the end of the choice."""
        delta = "" if self.has_started else self._start(token, vocabulary)
        if self.drops_output:
            self.finish_reason = "length"
            return delta
        self.num_tokens += 1
        if self.returns_token_ids:
            self.unsent_token_ids.append(token.token_id)
        if self.wants_logprobs and token.logprobs is not None:
            self.unsent_logprobs.append(ScoredToken(token.token_id, token.logprobs, self.num_chars + len(delta)))
        delta += self.detokenizer.push(token.token_id)
        if self.detokenizer.stopped:
            self.finish_reason = "stop"
        elif token.finish_reason:
            delta += self.detokenizer.finish()
            self.finish_reason = "stop" if self.detokenizer.stopped else token.finish_reason
        if self.output_parser is not None:
            delta = self._parse(delta, self.output_parser)
        self.num_chars += len(delta)
        return delta

    def _start(self, token: NewToken, vocabulary: Vocabulary) -> str:
        """The text of the prompt, if it is returned. The first token brings what the engine knows about the prompt."""
        self.has_started, self.num_cached_tokens = True, token.cached_tokens
        if token.prompt_logprobs is not None:
            scored = list(zip(self.prompt_token_ids, (None, *token.prompt_logprobs), strict=True))
            if self.echo is not None and self.num_top_logprobs is not None:
                self._echo_logprobs(scored, self.num_top_logprobs, vocabulary)
            if self.num_prompt_logprobs is not None:
                self.scored_prompt = scored
        return self.echo or ""

    def _parse(self, delta: str, parser: OutputParser) -> str:
        content = self._store_parsed(parser.push(delta))
        if self.finish_reason:
            end: OutputEnd = "stop_string" if self.detokenizer.stopped else "complete"
            content += self._store_parsed(parser.finish("length" if self.finish_reason == "length" else end))
        if self.finish_reason == "stop" and parser.has_calls:
            self.finish_reason = "tool_calls"
        return content

    def _store_parsed(self, parsed: ParsedDelta) -> str:
        self.unsent_calls += parsed.calls
        if parsed.reasoning:
            self.unsent_reasoning.append(parsed.reasoning)
        return parsed.content

    def take_calls(self) -> list[ParsedToolCall]:
        calls, self.unsent_calls = self.unsent_calls, []
        return calls

    def take_reasoning(self) -> str:
        reasoning, self.unsent_reasoning = "".join(self.unsent_reasoning), []
        return reasoning

    def take_token_ids(self) -> dict[str, list[int]]:
        """vLLM's field `token_ids` if the request asks for it."""
        if not self.returns_token_ids:
            return {}
        token_ids, self.unsent_token_ids = self.unsent_token_ids, []
        return {"token_ids": token_ids}

    def take_prompt_token_ids(self) -> dict[str, list[int]]:
        """vLLM's field `prompt_token_ids` of completions, once."""
        if not self.returns_token_ids or self.has_sent_prompt:
            return {}
        self.has_sent_prompt = True
        return {"prompt_token_ids": list(self.prompt_token_ids)}

    def take_logprobs(self) -> list[ScoredToken]:
        scored, self.unsent_logprobs = self.unsent_logprobs, []
        return scored

    def _echo_logprobs(
        self, scored: list[tuple[int, TokenLogprobs | None]], num_top: int, vocabulary: Vocabulary
    ) -> None:
        offset = 0
        for token_id, logprobs in scored:
            shortened = logprobs and logprobs._replace(top=logprobs.top[:num_top])
            self.unsent_logprobs.append(ScoredToken(token_id, shortened, offset))
            offset += 0 if vocabulary.is_special(token_id) else len(vocabulary.text(token_id))


def prompt_logprob_json(
    token_id: int, logprobs: TokenLogprobs | None, num_top: int, vocabulary: Vocabulary
) -> dict[str, Any] | None:
    """vLLM's entry for one token of a prompt: the token and the most likely ones by id. None for the first token.

    The rank of a token that is not among the most likely ones is not known.
    """
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
