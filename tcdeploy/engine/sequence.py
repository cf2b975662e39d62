"""One request on its way: its tokens, its blocks, and how far its keys are in the cache. No torch.

The host runs one step ahead of the device: a step is scheduled and launched while the tokens of the step before are
still unread. So a sequence has two ends. `token_ids` is what the host knows; `length` adds the tokens that launched
steps have sampled and nobody has read. Who waited for each token before the next launch would need only one end, and
would leave the GPU idle while Python thinks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tcdeploy.errors import UsageError

LARGEST = sys.float_info.max  # a comparison with it refuses inf and NaN, and whole numbers that no float can hold
LARGEST_TOP_K = 2**31 - 1  # it goes into an int32 tensor
MOST_LOGPROBS = 20


class Accepted(NamedTuple):
    """The values that a parameter may have, and what to say of any other."""

    label: str
    kind: type
    accepts: Callable[[Any], bool]
    wanted: str
    hint: str

    def check(self, value: Any) -> None:
        """A whole number is a float too; True is neither, though Python counts with it."""
        kinds = (int, float) if self.kind is float else self.kind
        if isinstance(value, bool) or not isinstance(value, kinds) or not self.accepts(value):
            raise UsageError(f"{self.label} is {value!r}, and must be {self.wanted}", self.hint)


WHOLE, NUMBER = "a whole number", "a number"
STOP_TOKEN_ID = Accepted("a stop token id", int, lambda i: i >= 0, f"{WHOLE}, 0 or more", "ids, not words")
ACCEPTED = {
    "max_new_tokens": Accepted("max new tokens", int, lambda n: n >= 1, f"{WHOLE}, 1 or more", "--max-new-tokens 128"),
    "temperature": Accepted("temperature", float, lambda t: 0 <= t <= LARGEST, f"{NUMBER}, 0 or more", "0 is greedy"),
    "top_k": Accepted("top-k", int, lambda k: 0 <= k <= LARGEST_TOP_K, f"{WHOLE}, 0 to {LARGEST_TOP_K}", "0 keeps all"),
    "top_p": Accepted("top-p", float, lambda p: 0 < p <= 1, f"{NUMBER} above 0 and at most 1", "1 keeps all"),
    "min_p": Accepted("min-p", float, lambda p: 0 <= p < 1, f"{NUMBER} from 0 to below 1", "0 keeps all"),
    "repetition_penalty": Accepted(
        "repetition penalty", float, lambda p: 0 < p <= LARGEST, f"{NUMBER} above 0", "1 changes nothing"
    ),
    "presence_penalty": Accepted(
        "presence penalty", float, lambda p: -2 <= p <= 2, f"{NUMBER} from -2 to 2", "0 changes nothing"
    ),
    "frequency_penalty": Accepted(
        "frequency penalty", float, lambda p: -2 <= p <= 2, f"{NUMBER} from -2 to 2", "0 changes nothing"
    ),
    "seed": Accepted("seed", int, lambda seed: -(2**63) <= seed < 2**64, f"{WHOLE} of 64 bits", "--seed 0"),
    "logprobs": Accepted(
        "logprobs", int, lambda n: 0 <= n <= MOST_LOGPROBS, f"{WHOLE} from 0 to {MOST_LOGPROBS}", "None reports none"
    ),
}
MAY_BE_NONE = ("seed", "logprobs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. temperature 0 is greedy; the other defaults leave the distribution as it is.

    `logprobs` is how many alternatives are reported beside the chosen token; None reports nothing.
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

    def __post_init__(self) -> None:
        for name, accepted in ACCEPTED.items():
            value = getattr(self, name)
            if value is not None or name not in MAY_BE_NONE:
                accepted.check(value)
        if not isinstance(self.stop_token_ids, tuple):
            raise UsageError(f"stop token ids are {self.stop_token_ids!r}, and must be a tuple", "() stops at none")
        for token_id in self.stop_token_ids:
            STOP_TOKEN_ID.check(token_id)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(eq=False)  # two requests may hold the same tokens and be two
class Sequence:
    """`token_ids` is the prompt, then what the host has read back; steps in flight may have sampled more.

    The keys of the first `cached` tokens are written by steps launched so far, in stream order. A sequence whose
    `finish_reason` is set takes no more tokens: what is in flight for it then is dropped by whoever reads it.
    """

    request_id: int
    token_ids: list[int]
    prompt_length: int
    params: SamplingParams
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    in_flight: int = 0  # sampled on the device, not read by the host
    preemptions: int = 0
    prefix_hits: int = 0  # tokens taken from the prefix cache, over all admissions
    finish_reason: str = ""  # "stop", "length" or "abort" once finished

    @property
    def generated(self) -> int:
        """New tokens that the host knows."""
        return len(self.token_ids) - self.prompt_length

    @property
    def length(self) -> int:
        """Tokens on the device: a decode step feeds the one at position length - 1."""
        return len(self.token_ids) + self.in_flight

    @property
    def is_exhausted(self) -> bool:
        """Its last token is sampled, though perhaps not read."""
        return self.generated + self.in_flight >= self.params.max_new_tokens

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if token_id in self.params.stop_token_ids:
            self.finish_reason = "stop"
        elif self.generated >= self.params.max_new_tokens:
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
