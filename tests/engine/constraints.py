"""A constraint for engine tests: the allowed next tokens depend on every token before them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from tcdeploy.engine.schedule.constraint import MatchStatus

MODULUS = 5


@dataclass(eq=False)
class SumConstraint:
    """Allows tokens congruent to the sum of the tokens so far, modulo 5; complete after `length` tokens."""

    length: int
    vocab_size: int
    matchers: list[SumMatcher] = field(default_factory=list)

    def start(self) -> SumMatcher:
        self.matchers.append(SumMatcher(self))
        return self.matchers[-1]

    def allows(self, previous: list[int], token_id: int) -> bool:
        return token_id < self.vocab_size and token_id % MODULUS == sum(previous) % MODULUS


class SumMasker:
    def fill(self, matcher_rows: list[tuple[SumMatcher, int]], masks: NDArray[numpy.int32]) -> None:
        for matcher, row in matcher_rows:
            mask = masks[row].view(numpy.uint32)
            matcher.mask_positions.append(len(matcher.accepted))
            for token_id in range(matcher.constraint.vocab_size):
                if matcher.constraint.allows(matcher.accepted, token_id):
                    mask[token_id // 32] |= numpy.uint32(1 << token_id % 32)


MASKER = SumMasker()


@dataclass(eq=False)
class SumMatcher:
    masker = MASKER
    constraint: SumConstraint
    accepted: list[int] = field(default_factory=list)
    mask_positions: list[int] = field(default_factory=list)  # for each mask, the number of tokens accepted before it

    def accept(self, token_id: int) -> MatchStatus:
        if not self.constraint.allows(self.accepted, token_id):
            return "error"
        self.accepted.append(token_id)
        return "stop" if len(self.accepted) == self.constraint.length else ""
