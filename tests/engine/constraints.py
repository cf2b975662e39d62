"""A form without a grammar, for tests of the engine: what may come next hangs on every token before it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from tcdeploy.engine.constraint import MatchStatus

MODULUS = 5


@dataclass(eq=False)
class SumConstraint:
    """The sum of all new tokens decides which token may follow; an answer is complete at `length` tokens."""

    length: int
    vocab_size: int
    matchers: list[SumMatcher] = field(default_factory=list)

    def start(self) -> SumMatcher:
        self.matchers.append(SumMatcher(self))
        return self.matchers[-1]

    def allows(self, before: list[int], token_id: int) -> bool:
        return token_id < self.vocab_size and token_id % MODULUS == sum(before) % MODULUS


class SumMasker:
    def fill(self, matcher_rows: list[tuple[SumMatcher, int]], masks: NDArray[numpy.int32]) -> None:
        for matcher, row in matcher_rows:
            mask = masks[row].view(numpy.uint32)
            matcher.mask_positions.append(len(matcher.accepted))
            for token_id in range(matcher.chain.vocab_size):
                if matcher.chain.allows(matcher.accepted, token_id):
                    mask[token_id // 32] |= numpy.uint32(1 << token_id % 32)


MASKER = SumMasker()


@dataclass(eq=False)
class SumMatcher:
    masker = MASKER
    chain: SumConstraint
    accepted: list[int] = field(default_factory=list)
    mask_positions: list[int] = field(default_factory=list)  # how many tokens it knew when it was asked for a mask

    def accept(self, token_id: int) -> MatchStatus:
        if not self.chain.allows(self.accepted, token_id):
            return "error"
        self.accepted.append(token_id)
        return "stop" if len(self.accepted) == self.chain.length else ""
