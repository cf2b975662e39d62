"""Requests, and the steps that compute them: sampling parameters, tokens, KV blocks, progress. Does not import torch.

The host launches a step while the tokens of the previous step are still unread, so a sequence has two lengths.
`token_ids` holds the tokens that the host has read; `length` also counts the tokens that launched steps sample. One
length would suffice if each token were read before the next launch, but the GPU would be idle while Python schedules.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.constraint import Constraint, Matcher
from tcdeploy.engine.schedule.slots import SCRATCH_SLOT
from tcdeploy.errors import SpaceError, UsageError

MAX_FLOAT = sys.float_info.max  # comparing with it rejects inf, NaN and integers beyond the range of a float
MAX_TOP_K = 2**31 - 1  # int32
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 512  # per request and decode row; OpenAI's API accepts 300
MAX_POSITION = 2**62  # beyond any sequence


class ParamCheck(NamedTuple):
    """The type and bounds of a parameter, and the error for any other value. The HTTP API has the same bounds."""

    label: str
    type_: type
    hint: str
    ge: int | None = None
    le: int | None = None
    gt: int | None = None
    lt: int | None = None

    def accepts(self, value: Any) -> bool:
        """Whether a value is in range. An int passes as a float; a bool passes as neither."""
        types: Any = (int, float) if self.type_ is float else self.type_
        return bool(
            not isinstance(value, bool) and isinstance(value, types)
            and (self.ge is None or value >= self.ge) and (self.le is None or value <= self.le)
            and (self.gt is None or value > self.gt) and (self.lt is None or value < self.lt)
            and (self.type_ is int or abs(value) <= MAX_FLOAT)
        )  # fmt: skip

    @property
    def expected(self) -> str:
        noun = "a whole number" if self.type_ is int else "a number"
        start = f"above {self.gt}" if self.ge is None else f"from {self.ge}"
        if self.le is None and self.lt is None:
            return f"{noun} {start}" if self.ge is None else f"{noun}, {self.ge} or more"
        return f"{noun} {start} to {f'below {self.lt}' if self.le is None else self.le}"

    def check(self, value: Any) -> None:
        """Raise UsageError for a value that is not accepted."""
        if not self.accepts(value):
            raise UsageError(f"{self.label} is {value!r}; it must be {self.expected}", self.hint)


STOP_TOKEN_ID = ParamCheck("a stop token id", int, "pass token ids", ge=0)
BIASED_TOKEN_ID = ParamCheck("a biased token id", int, "pass token ids", ge=0)
LOGIT_BIAS = ParamCheck("a logit bias", float, "-100 excludes a token", ge=-100, le=100)
PARAM_CHECKS = {
    "max_tokens": ParamCheck("max_tokens", int, "max_tokens=128, or --max-new-tokens 128", ge=1),
    "temperature": ParamCheck("temperature", float, "0 is greedy", ge=0),
    "top_k": ParamCheck("top-k", int, "0 keeps all", ge=0, le=MAX_TOP_K),
    "top_p": ParamCheck("top-p", float, "0 keeps one token, 1 keeps all", ge=0, le=1),
    "min_p": ParamCheck("min-p", float, "0 keeps all", ge=0, lt=1),
    "repetition_penalty": ParamCheck("repetition penalty", float, "1 changes nothing", gt=0),
    "presence_penalty": ParamCheck("presence penalty", float, "0 changes nothing", ge=-2, le=2),
    "frequency_penalty": ParamCheck("frequency penalty", float, "0 changes nothing", ge=-2, le=2),
    "min_tokens": ParamCheck("min_tokens", int, "0 sets no minimum", ge=0),
    "seed": ParamCheck("seed", int, "seed=0, or --seed 0", ge=-(2**63), le=2**64 - 1),
    "logprobs": ParamCheck("logprobs", int, "None reports none", ge=0, le=MAX_LOGPROBS),
    "prompt_logprobs": ParamCheck("prompt logprobs", int, "None reports none", ge=0, le=MAX_LOGPROBS),
}


def _pairs(logit_bias: Any) -> tuple[tuple[int, float], ...]:
    """(token id, value) of a mapping, or of a list or tuple of pairs. Raises UsageError."""
    pairs = list(logit_bias.items()) if isinstance(logit_bias, Mapping) else logit_bias
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(item, list | tuple) and len(item) == 2 for item in pairs
    ):
        raise UsageError(f"logit_bias is {logit_bias!r:.80}; it must map token ids to values", "logit_bias={50: -100}")
    return tuple((token_id, value) for token_id, value in pairs)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request samples its tokens, and where its text ends. Raises UsageError for a value out of range.

    The defaults are greedy, and leave the model's distribution unchanged. `stop` and `ignore_eos` are applied by `LLM`
    and `AsyncLLM`. The engine has no text, and ends a request at `stop_token_ids` alone: `Engine.submit` does not add
    the model's end-of-sequence ids.
    """

    max_tokens: int = 128  # maximum number of new tokens, the stop token included
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None  # number of most likely tokens reported with each new token; None reports nothing
    stop: str | list[str] | tuple[str, ...] = ()  # the text ends before the first of these strings; stored as a tuple
    stop_token_ids: (
        list[int] | tuple[int, ...]
    ) = ()  # in addition to the model's end-of-sequence ids; stored as a tuple
    ignore_eos: bool = False  # do not end at the model's end-of-sequence ids
    min_tokens: int = 0  # before that many, stop tokens are excluded
    # Values added to the logits of tokens: {token id: value}, or pairs of both; stored as a tuple of pairs.
    logit_bias: Mapping[int, float] | list[tuple[int, float]] | tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None  # as `logprobs`, for the prompt's tokens after the first
    constraint: Constraint | None = None  # restricts the tokens at each position; compared by identity

    def __post_init__(self) -> None:
        for name, param_check in PARAM_CHECKS.items():
            value, default = getattr(self, name), DEFAULTS[name]
            if type(value) is not type(default) or value != default:  # True == 1, so types are compared too
                param_check.check(value)
        if not isinstance(self.stop_token_ids, list | tuple):
            problem = f"stop_token_ids is {self.stop_token_ids!r}; it must be a list or a tuple of token ids"
            raise UsageError(problem, "pass () for none")
        for token_id in self.stop_token_ids:
            STOP_TOKEN_ID.check(token_id)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(
                f"stop is {self.stop!r}; it must be a text, or a list of texts that are not empty", "pass () for none"
            )
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False", "ignore_eos=True")
        object.__setattr__(self, "stop", tuple(stop))  # the class is frozen
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        logit_bias = _pairs(self.logit_bias)
        object.__setattr__(self, "logit_bias", logit_bias)
        if len(logit_bias) + len(self.stop_token_ids) > MAX_LOGIT_BIASES:
            counts = f"{len(logit_bias)} logit biases and {len(self.stop_token_ids)} stop token ids"
            raise UsageError(f"there are {counts}; the limit is {MAX_LOGIT_BIASES} together", "send fewer of them")
        for token_id, value in logit_bias:
            BIASED_TOKEN_ID.check(token_id)
            LOGIT_BIAS.check(value)

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with another seed. Only the seed is checked: checking 512 logit biases again would take 0.5 ms."""
        PARAM_CHECKS["seed"].check(seed)
        params = copy.copy(self)
        object.__setattr__(params, "seed", seed)
        return params

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias`, as it is stored."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    def biases(self, prompt_length: int) -> list[tuple[int, float, int]]:
        """Logit biases as (token id, added value, first position without it), excluded stop tokens included."""
        stop_biases = [(token_id, -math.inf, prompt_length + self.min_tokens) for token_id in self.stop_token_ids]
        logit_biases = [(token_id, value, MAX_POSITION) for token_id, value in self.bias_pairs]
        return logit_biases + (stop_biases if self.min_tokens else [])

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_unmodified_greedy(self) -> bool:
        """Whether the next token is the argmax of the model's logits."""
        return self.is_greedy and not self.has_penalties and not self.has_biases and self.constraint is None

    @property
    def has_biases(self) -> bool:
        return bool(self.logit_bias or (self.min_tokens and self.stop_token_ids))

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


DEFAULTS = {param.name: param.default for param in fields(SamplingParams)}


@dataclass(eq=False)  # compared by identity: two requests may have the same tokens
class Sequence:
    """State of one request. Once `finish_reason` is set it takes no more tokens; those in flight are dropped."""

    request_id: int
    token_ids: list[int]  # the prompt, and the new tokens that the host has read
    prompt_length: int
    params: SamplingParams
    group_id: int | None = None  # of the client request; the scheduler shares decode rows fairly between groups
    blocks: list[int] = field(default_factory=list)
    slot: int = SCRATCH_SLOT  # where layers keep state of the sequence, if any do; the scratch slot if not admitted
    adapter_id: int = 0  # of the weights that compute it; part of the prefix cache's keys. 0: the model's own
    snapshot_borders: tuple[int, ...] = ()  # prompt tokens after which its state is kept (prefix_reuse.py)
    num_computed_tokens: int = 0  # whose keys and values are written by the steps launched so far
    num_in_flight: int = 0  # tokens of launched steps that the host has not read
    preemptions: int = 0
    prefix_hit_tokens: int = 0  # tokens taken from the prefix cache, over all admissions
    cached_prompt_tokens: int = 0  # tokens of the prompt that were in the prefix cache at the first admission
    submitted_at: float = field(default_factory=time.perf_counter)
    admitted_at: float = 0.0  # the first admission; 0 before it
    prompt_logprobs: list[Any] = field(default_factory=list)  # TokenLogprobs, filled chunk by chunk if requested
    finish_reason: str = ""  # "stop", "length", "abort" or "error" (from the constraint); "" while open
    matcher: Matcher | None = field(init=False)  # has accepted exactly the new tokens in `token_ids`

    def __post_init__(self) -> None:
        self.matcher = self.params.constraint.start() if self.params.constraint else None

    @property
    def num_output_tokens(self) -> int:
        """New tokens that the host has read."""
        return len(self.token_ids) - self.prompt_length

    @property
    def length(self) -> int:
        """Tokens on the device, those in flight included. A decode step feeds the token at position length - 1."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def has_sampled_last_token(self) -> bool:
        """Whether the last allowed token is sampled, read by the host or not."""
        return self.num_output_tokens + self.num_in_flight >= self.params.max_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of a prompt that no step has computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens that the KV cache can hold: the last new token is never fed back."""
        return self.prompt_length + self.params.max_tokens - 1

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.matcher and (verdict := self.matcher.accept(token_id)):
            self.finish_reason = verdict
        elif token_id in self.params.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_output_tokens >= self.params.max_tokens:
            self.finish_reason = "length"

    def receive(self, token_id: int) -> None:
        """Take one token in flight, now read by the host."""
        assert self.num_in_flight > 0 and not self.finish_reason, "the engine drops tokens after the end"
        self.num_in_flight -= 1
        self.append(token_id)


class Chunk(NamedTuple):
    """Tokens [start, stop) of a sequence, computed by one prefill step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def ends_prompt(self) -> bool:
        """Whether the chunk samples a token."""
        return self.stop == len(self.sequence.token_ids)


class SchedulerOutput(NamedTuple):
    """The next step: prefill chunks, decode sequences in row order, or both in a mixed step."""

    chunks: tuple[Chunk, ...] = ()
    decode: tuple[Sequence, ...] = ()
    restores: tuple[tuple[int, int], ...] = ()  # (source, target) slots to copy before the step
    snapshots: tuple[tuple[int, int], ...] = ()  # slots to copy after it

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(stop - start for _, start, stop in self.chunks)

    @property
    def row_context(self) -> int:
        """Tokens in the KV cache, summed over the decode rows."""
        return sum(sequence.num_computed_tokens for sequence in self.decode)

    @property
    def prefix_pairs(self) -> int:
        """As in step_costs.py."""
        return sum((stop - start) * start for _, start, stop in self.chunks)

    @property
    def prefix(self) -> int:
        """As in step_costs.py."""
        return max((start for _, start, _ in self.chunks), default=0)


class TokenLogprobs(NamedTuple):
    """Log-probabilities in nats under the model's distribution, before sampling parameters apply."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most likely first


class NewToken(NamedTuple):
    """One new token of a request. `finish_reason` is "" except on the last token."""

    request_id: int
    token_id: int
    finish_reason: str
    logprobs: TokenLogprobs | None = None
    # With the first new token; covers the prompt after its first token.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    queue_seconds: float | None = None  # with the first new token; from submission to admission
    cached_tokens: int = 0  # with the first new token; tokens of the prompt that were in the prefix cache


def check_request(
    prompt: list[int], params: SamplingParams, vocab_size: int, context: int, allocator: BlockAllocator
) -> None:
    """Before a request is queued: raises UsageError or SpaceError if it can never be served."""
    if not prompt:
        raise UsageError("the prompt is empty", "pass at least one token; most tokenizers add one at the start")
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= vocab_size:
        raise UsageError(
            f"the prompt contains a value that is not a token id in 0..{vocab_size - 1}",
            "encode the prompt with the tokenizer of this model",
        )
    longest = len(prompt) + params.max_tokens
    if longest > context:
        counts = f"{len(prompt)} prompt tokens and {params.max_tokens} new tokens"
        hint = "shorten the prompt, or lower max_tokens (--max-new-tokens)"
        raise UsageError(f"{counts} exceed the context of {context} tokens", hint)
    if allocator.blocks_for(longest) > allocator.capacity:
        needed = f"{longest} tokens need {allocator.blocks_for(longest)} KV blocks"
        raise SpaceError(f"{needed}; the cache has {allocator.capacity}", "raise --kv-blocks, or shorten the request")
    biased_ids = [*params.stop_token_ids, *(token_id for token_id, _ in params.bias_pairs)]
    if biased_ids and max(biased_ids) >= vocab_size and (params.logit_bias or params.min_tokens):
        message = f"token id {max(biased_ids)} is outside the vocabulary 0..{vocab_size - 1}"
        raise UsageError(message, "check stop_token_ids and logit_bias")
