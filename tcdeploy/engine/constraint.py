"""What a request may demand of its answer's form: at each position, which tokens may come. No torch.

The engine knows no grammar. It starts one `Matcher` per sequence, tells it every token that the host reads, and has a
`Masker` say which may come next. So a matcher always stands where the sequence's `token_ids` end: pre-emption and a
step that did not run lose keys or tokens nobody read, and neither was ever told to it.

Rejected: a matcher that looks into logits. It would need them on the host; a mask is 16 KB up per constrained row and
step (128,256 tokens), and nothing down. And a mask of each matcher's own: a library gives Python's lock away for each,
and gets it back up to 5 ms later where an event loop is busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

MatchStatus: TypeAlias = Literal["", "stop", "error"]  # open; complete; it cannot be kept to its form any more


class Masker(Protocol):
    """Computes the masks of several matchers in one call. May not raise: a step serves others too."""

    def fill(self, matcher_rows: Sequence[tuple[Any, int]], masks: NDArray[numpy.int32]) -> None:
        """For each (matcher, row), which have this masker: that row of masks [n, words], whose words are 0 so far.

        A token t that may come next sets bit t % 32 of word t // 32. The rest stays 0, also for tokens that the model
        has and this knows nothing of; and so do the other rows.
        """


class Matcher(Protocol):
    """One sequence's place in its form."""

    @property
    def masker(self) -> Masker: ...

    def accept(self, token_id: int) -> MatchStatus:
        """The next token; what the answer is with it. Anything but "" ends the sequence, with this as its reason.

        May not raise: a step serves others too.
        """


class Constraint(Protocol):
    """The form that a request demands, shared by its choices."""

    def start(self) -> Matcher:
        """At the first token. Cheap: the engine calls it between two steps."""
