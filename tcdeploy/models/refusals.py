"""Collects the reasons for which a model cannot be served, and raises all of them in one error.

A model may be quantised, have recurrent layers and exceed the memory. If only the first reason were raised, its hint
would lead to the next refusal: a quantised Mamba has no unquantised original that can be served. The combined hint is
therefore that of the architecture, if the architecture is a reason. Otherwise it has the hint of each reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tcdeploy.errors import (
    ModelError,
    SpaceError,
    TcdeployError,
    UnsupportedArchitectureError,
    UnsupportedModelError,
    UsageError,
)


class SeveralReasonsError(UnsupportedModelError):
    """A refusal for more than one reason."""

    def __init__(self, model: str, reasons: list[TcdeployError]) -> None:
        lines = "".join(f"\n  - {reason.message}" for reason in reasons)
        final = [reason for reason in reasons if isinstance(reason, UnsupportedArchitectureError)]
        hints = dict.fromkeys(reason.hint for reason in final or reasons if reason.hint)
        super().__init__(f"{model} cannot be served, for {len(reasons)} reasons:{lines}", "; and ".join(hints))
        self.reasons = reasons


def has_final_reason(error: TcdeployError) -> bool:
    """Whether the architecture is a reason, so that no other checkpoint, and no change of the model's code, helps."""
    reasons = error.reasons if isinstance(error, SeveralReasonsError) else [error]
    return any(isinstance(reason, UnsupportedArchitectureError) for reason in reasons)


class Refusals:
    """The reasons found so far. `model`: its name in the error."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.reasons: list[TcdeployError] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect an error of the block about the model, the memory or the request, instead of raising it."""
        try:
            yield
        except (ModelError, SpaceError, UsageError) as error:
            self.add(error)

    def add(self, error: TcdeployError) -> None:
        known = {reason.message for reason in self.reasons}
        reasons = error.reasons if isinstance(error, SeveralReasonsError) else [error]
        self.reasons += [reason for reason in reasons if reason.message not in known]

    def raise_all(self) -> None:
        """Raise the reason, or one error for several, whose cause is the first cause among the reasons."""
        if len(self.reasons) == 1:
            raise self.reasons[0]
        if self.reasons:
            cause = next((reason.__cause__ for reason in self.reasons if reason.__cause__), None)
            raise SeveralReasonsError(self.model, self.reasons) from cause
