"""One request on its way: its tokens, its blocks, and how far its keys are in the cache. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tcdeploy.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens in."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max new tokens is {self.max_new_tokens}, and must be 1 or more", "--max-new-tokens 128")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature is {self.temperature}, and must be 0 or more", "--temperature 0 is greedy")
        if self.top_k < 0:
            raise UsageError(f"top-k is {self.top_k}, and must be 0 or more", "--top-k 0 keeps all")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p is {self.top_p}, and must be above 0 and at most 1", "--top-p 0.95")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise UsageError(f"seed {self.seed} does not fit into 64 bits", "--seed 0")


@dataclass(eq=False)  # two requests may hold the same tokens and be two
class Sequence:
    """`token_ids` is the prompt, then what was generated; the first `cached` of them have keys in the cache."""

    index: int
    token_ids: list[int]
    prompt_length: int
    params: SamplingParams
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    finish_reason: str = ""  # "stop" or "length" once finished

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if token_id in self.params.stop_token_ids:
            self.finish_reason = "stop"
        elif self.generated >= self.params.max_new_tokens:
            self.finish_reason = "length"
