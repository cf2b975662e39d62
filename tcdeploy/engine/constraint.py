"""What a request may demand of its answer's form: at each position, which tokens may come. No torch.

The engine knows no grammar. It starts one `Matcher` per sequence, tells it every token that the host reads, and asks
it which may come next. So a matcher always stands where the sequence's `token_ids` end: pre-emption and a step that
did not run lose keys or tokens nobody read, and neither was ever told to it.

Rejected: a matcher that looks into logits. It would need them on the host; a mask is 16 KB up per constrained row and
step (128,256 tokens), and nothing down. And masks one by one: a library gives Python's lock away for each, and where an
event loop is busy, gets it back 5 ms later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy
from numpy.typing import NDArray

Verdict: TypeAlias = Literal["", "stop", "error"]  # open; complete; it cannot be kept to its form any more
Mask: TypeAlias = NDArray[numpy.int32]  # [words]: token t may come next where bit t % 32 of word t // 32 is set


class Matcher(Protocol):
    """One sequence's place in its form. Neither method may raise: a step serves others too."""

    @staticmethod
    def fill(places: Sequence[tuple[Any, Mask]]) -> None:
        """For each of these matchers, all of this class, the tokens that may come next: its mask, zeros so far."""

    def accept(self, token_id: int) -> Verdict:
        """The next token; what the answer is with it. Anything but "" ends the sequence, with this as its reason."""


class Constraint(Protocol):
    """The form that a request demands, shared by its choices."""

    def start(self) -> Matcher:
        """At the first token. Cheap: the engine calls it between two steps."""


def fill_masks(places: Iterable[tuple[Matcher, Mask]]) -> None:
    """As `Matcher.fill` says, whatever their classes."""
    by_kind: dict[type[Matcher], list[tuple[Matcher, Mask]]] = {}
    for place in places:
        by_kind.setdefault(type(place[0]), []).append(place)
    for kind, of_kind in by_kind.items():
        kind.fill(of_kind)
