"""What a request may demand of its answer's form: at each position, which tokens may come. No torch.

The engine knows no grammar. It starts one `Matcher` per sequence, tells it every token that the host reads, and asks
it which may come next. So a matcher always stands where the sequence's `token_ids` end: pre-emption and a step that
did not run lose keys or tokens nobody read, and neither was ever told to it.

Rejected: a matcher that looks into logits. It would need them on the host; a mask is 16 KB up per constrained row and
step (128,256 tokens), and nothing down.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

Verdict: TypeAlias = Literal["", "stop", "error"]  # open; complete; it cannot be kept to its form any more


class Matcher(Protocol):
    """One sequence's place in its form. Neither method may raise: a step serves others too."""

    def mask(self) -> bytes:
        """The tokens that may come next: token t is bit t % 8 of byte t // 8. Tokens beyond its end may not."""

    def accept(self, token_id: int) -> Verdict:
        """The next token; what the answer is with it. Anything but "" ends the sequence, with this as its reason."""


class Constraint(Protocol):
    """The form that a request demands, shared by its choices."""

    def start(self) -> Matcher:
        """At the first token. Cheap: the engine calls it between two steps."""
