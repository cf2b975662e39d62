"""One request on its way: its tokens, its blocks, and how far its keys are in the cache. No torch.

The host runs one step ahead of the device: a step is scheduled and launched while the tokens of the step before are
still unread. So a sequence has two ends. `token_ids` is what the host knows; `length` adds the tokens that launched
steps have sampled and nobody has read. Who waited for each token before the next launch would need only one end, and
would leave the GPU idle while Python thinks.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from tcdeploy.engine.constraint import Constraint, Matcher
from tcdeploy.errors import UsageError

MAX_FLOAT = sys.float_info.max  # a comparison with it refuses inf and NaN, and whole numbers that no float can hold
MAX_TOP_K = 2**31 - 1  # it goes into an int32 tensor
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 512  # tokens of one request, or decode row; OpenAI's API takes 300
MAX_POSITION = 2**62  # a position that no sequence reaches


class ParamCheck(NamedTuple):
    """The values that a parameter may have, and what to say of any other."""

    label: str
    type_: type
    is_valid: Callable[[Any], bool]
    expected: str
    hint: str

    def check(self, value: Any) -> None:
        """A whole number is a float too; True is neither, though Python counts with it."""
        kinds = (int, float) if self.type_ is float else self.type_
        if isinstance(value, bool) or not isinstance(value, kinds) or not self.is_valid(value):
            raise UsageError(f"{self.label} is {value!r}, and must be {self.expected}", self.hint)


INTEGER, NUMBER = "a whole number", "a number"
STOP_TOKEN_ID = ParamCheck("a stop token id", int, lambda i: i >= 0, f"{INTEGER}, 0 or more", "ids, not words")
BIASED_TOKEN_ID = ParamCheck("a biased token id", int, lambda i: i >= 0, f"{INTEGER}, 0 or more", "ids, not words")
PARAM_CHECKS = {
    "max_new_tokens": ParamCheck(
        "max new tokens", int, lambda n: n >= 1, f"{INTEGER}, 1 or more", "--max-new-tokens 128"
    ),
    "temperature": ParamCheck(
        "temperature", float, lambda t: 0 <= t <= MAX_FLOAT, f"{NUMBER}, 0 or more", "0 is greedy"
    ),
    "top_k": ParamCheck("top-k", int, lambda k: 0 <= k <= MAX_TOP_K, f"{INTEGER}, 0 to {MAX_TOP_K}", "0 keeps all"),
    "top_p": ParamCheck("top-p", float, lambda p: 0 < p <= 1, f"{NUMBER} above 0 and at most 1", "1 keeps all"),
    "min_p": ParamCheck("min-p", float, lambda p: 0 <= p < 1, f"{NUMBER} from 0 to below 1", "0 keeps all"),
    "repetition_penalty": ParamCheck(
        "repetition penalty", float, lambda p: 0 < p <= MAX_FLOAT, f"{NUMBER} above 0", "1 changes nothing"
    ),
    "presence_penalty": ParamCheck(
        "presence penalty", float, lambda p: -2 <= p <= 2, f"{NUMBER} from -2 to 2", "0 changes nothing"
    ),
    "frequency_penalty": ParamCheck(
        "frequency penalty", float, lambda p: -2 <= p <= 2, f"{NUMBER} from -2 to 2", "0 changes nothing"
    ),
    "min_new_tokens": ParamCheck("min new tokens", int, lambda n: n >= 0, f"{INTEGER}, 0 or more", "0 asks none"),
    "seed": ParamCheck("seed", int, lambda seed: -(2**63) <= seed < 2**64, f"{INTEGER} of 64 bits", "--seed 0"),
    "logprobs": ParamCheck(
        "logprobs", int, lambda n: 0 <= n <= MAX_LOGPROBS, f"{INTEGER} from 0 to {MAX_LOGPROBS}", "None reports none"
    ),
    "prompt_logprobs": ParamCheck(
        "prompt logprobs", int, lambda n: 0 <= n <= MAX_LOGPROBS, f"{INTEGER} from 0 to {MAX_LOGPROBS}", "None: none"
    ),
}
LOGIT_BIAS = ParamCheck(
    "a logit bias", float, lambda b: -100 <= b <= 100, f"{NUMBER} from -100 to 100", "-100 forbids a token"
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. temperature 0 is greedy; the other defaults leave the distribution as it is.

    `logprobs` is how many alternatives are reported beside the chosen token; None reports nothing. `prompt_logprobs`
    is the same of the prompt's tokens after the first. A stop token is not chosen before `min_new_tokens` others.
    `logit_bias` is (token id, what is added to its logit) of some tokens. `constraint` is the form of the answer; two
    are equal when they are one.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name, param_check in PARAM_CHECKS.items():
            value, default = getattr(self, name), DEFAULTS[name]
            if type(value) is not type(default) or value != default:  # most are as they were; True equals 1
                param_check.check(value)
        if not isinstance(self.stop_token_ids, tuple):
            raise UsageError(f"stop token ids are {self.stop_token_ids!r}, and must be a tuple", "() stops at none")
        for token_id in self.stop_token_ids:
            STOP_TOKEN_ID.check(token_id)
        if len(self.logit_bias) + len(self.stop_token_ids) > MAX_LOGIT_BIASES:
            raise UsageError(f"logit biases and stop token ids are more than {MAX_LOGIT_BIASES} together")
        for token_id, value in self.logit_bias:
            BIASED_TOKEN_ID.check(token_id)
            LOGIT_BIAS.check(value)

    def biases(self, prompt_length: int) -> list[tuple[int, float, int]]:
        """(token id, value, first position without it): what is added to logits."""
        stop_biases = [(token_id, -math.inf, prompt_length + self.min_new_tokens) for token_id in self.stop_token_ids]
        logit_biases = [(token_id, value, MAX_POSITION) for token_id, value in self.logit_bias]
        return logit_biases + (stop_biases if self.min_new_tokens else [])

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_unmodified_greedy(self) -> bool:
        """The most likely token of the model itself."""
        return self.is_greedy and not self.has_penalties and not self.has_biases and self.constraint is None

    @property
    def has_biases(self) -> bool:
        return bool(self.logit_bias or (self.min_new_tokens and self.stop_token_ids))

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}


@dataclass(eq=False)  # two requests may hold the same tokens and be two
class Sequence:
    """`token_ids` is the prompt, then what the host has read back; steps in flight may have sampled more.

    The keys of the first `num_computed_tokens` tokens are written by steps launched so far, in stream order. A sequence whose
    `finish_reason` is set takes no more tokens: what is in flight for it then is dropped by whoever reads it.
    """

    request_id: int
    token_ids: list[int]
    prompt_length: int
    params: SamplingParams
    blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    in_flight: int = 0  # sampled on the device, not read by the host
    preemptions: int = 0
    prefix_hit_tokens: int = 0  # tokens taken from the prefix cache, over all admissions
    submitted_at: float = field(default_factory=time.perf_counter)
    admitted_at: float = 0.0  # the first time; 0: not yet
    prompt_logprobs: list[Any] = field(default_factory=list)  # where the request asks for them, as they arrive
    finish_reason: str = ""  # "stop", "length", "abort" or "error" (of its constraint) once finished
    matcher: Matcher | None = field(init=False)  # knows the new tokens of `token_ids`, and no others

    def __post_init__(self) -> None:
        self.matcher = self.params.constraint.start() if self.params.constraint else None

    @property
    def num_output_tokens(self) -> int:
        """New tokens that the host knows."""
        return len(self.token_ids) - self.prompt_length

    @property
    def length(self) -> int:
        """Tokens on the device: a decode step feeds the one at position length - 1."""
        return len(self.token_ids) + self.in_flight

    @property
    def has_sampled_last_token(self) -> bool:
        """Its last token is sampled, though perhaps not read."""
        return self.num_output_tokens + self.in_flight >= self.params.max_new_tokens

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.matcher and (verdict := self.matcher.accept(token_id)):
            self.finish_reason = verdict
        elif token_id in self.params.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_output_tokens >= self.params.max_new_tokens:
            self.finish_reason = "length"

    def receive(self, token_id: int) -> None:
        """A token in flight has arrived on the host."""
        assert self.in_flight > 0 and not self.finish_reason, "tokens after the end are dropped"
        self.in_flight -= 1
        self.append(token_id)


class Chunk(NamedTuple):
    """The tokens [start, stop) of a sequence: what one prefill step takes of it."""

    sequence: Sequence
    start: int
    stop: int


class TokenLogprobs(NamedTuple):
    """Of the model's own distribution, in nats: the chosen token's, and the most likely tokens with theirs."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class NewToken(NamedTuple):
    """A token of request `request_id`; `finish_reason` is "" until its last one."""

    request_id: int
    token_id: int
    finish_reason: str
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the prompt after its first token, with the first one
    queue_seconds: float | None = None  # until some of the prompt was taken, with the first one
