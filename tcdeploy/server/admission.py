"""Whether a request may come in at all: decided before the engine or a tokenizer sees it."""

from __future__ import annotations

from collections import Counter

from tcdeploy.server.protocol import ApiError, refusal

RETRY_SECONDS = 1
REASONS = ("loading", "queue_full", "draining", "dead")


class Admission:
    """Counts the answers that are inside: those that run, and `queued` that may wait."""

    def __init__(self, queued: int) -> None:
        self.limit = self._queued = queued
        self.inside = 0
        self.rejections = Counter(dict.fromkeys(REASONS, 0))
        self.closed_because = "loading"

    def open(self, running: int) -> None:
        """`running`: how many answers the engine works on at once. What has closed meanwhile stays closed."""
        self.limit = running + self._queued
        if self.closed_because == "loading":
            self.closed_because = ""

    def close(self, reason: str) -> None:
        self.closed_because = reason

    def enter(self, answers: int) -> None:
        """Raises ApiError: 503 where there is no room now, 400 where there never is. `leave` undoes it."""
        if self.closed_because:
            self._reject(self.closed_because, f"the server is {self.closed_because}")
        if answers > self.limit:
            raise refusal(f"it asks for {answers} answers, and {self.limit} is the most at a time", "n")
        if self.inside + answers > self.limit:
            self._reject("queue_full", f"{self.inside} answers are inside, and {self.limit} is the most")
        self.inside += answers

    def leave(self, answers: int) -> None:
        self.inside -= answers

    def _reject(self, reason: str, message: str) -> None:
        self.rejections[reason] += 1
        raise ApiError(503, message, code=reason, retry_after=RETRY_SECONDS)
