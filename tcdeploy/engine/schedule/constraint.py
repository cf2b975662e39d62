"""Interface of structured output to the engine: which tokens may come next. Does not import torch.

The engine knows no grammar. It starts one `Matcher` per sequence, passes it every token that the host reads, and has a
`Masker` write the masks of the next tokens. So a matcher survives preemption and failed steps, which lose cached keys
or unread tokens only.

Rejected: matchers that read logits, which would have to be on the host; a mask is a 16 KB upload per constrained row
and step (vocabulary of 128,256). Also rejected: one mask call per matcher. A grammar library releases the GIL in each
call, and may wait 5 ms to reacquire it while an event loop is busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

MatchStatus: TypeAlias = Literal["", "stop", "error"]  # open; complete; the constraint cannot be met any more


class Masker(Protocol):
    """Computes the masks of several matchers in one call. Must not raise, since the step serves other requests too."""

    def fill(self, matcher_rows: Sequence[tuple[Any, int]], masks: NDArray[numpy.int32]) -> None:
        """Write the rows of `masks` [n, words] int32 that `matcher_rows` names. All words are 0 on entry.

        Bit t % 32 of word t // 32 is set if token t may come next. Ids beyond the tokenizer's vocabulary stay 0 for a
        grammar. Other rows are left unchanged.
        """


class Matcher(Protocol):
    """The state of one sequence's constraint."""

    @property
    def masker(self) -> Masker: ...

    def accept(self, token_id: int) -> MatchStatus:
        """Advance by one token. Any status but "" ends the sequence, as its finish reason. Must not raise, as above."""


def fill_masks(matchers: Sequence[Matcher | None], masks: NDArray[numpy.int32]) -> None:
    """Write the masks of all matchers, in one call per masker. Row i of `masks` [n, words] belongs to matcher i.

    None allows every token.
    """
    masks.fill(0)
    matcher_rows: dict[Masker, list[tuple[Matcher, int]]] = {}
    for row, matcher in enumerate(matchers):
        if matcher is None:
            masks[row] = -1
        else:
            matcher_rows.setdefault(matcher.masker, []).append((matcher, row))
    for masker, rows in matcher_rows.items():
        masker.fill(rows, masks)


class Constraint(Protocol):
    """The output format of a request, shared by its choices."""

    def start(self) -> Matcher:
        """A matcher before the first token. Must be cheap: the engine calls it between two steps."""
