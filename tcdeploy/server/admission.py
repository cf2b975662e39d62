"""Whether a request may come in at all: decided before the engine or a tokenizer sees it."""

from __future__ import annotations

from collections import Counter

from tcdeploy.server.protocol import ApiError, bad_request

RETRY_AFTER_S = 1
REJECTION_REASONS = ("loading", "queue_full", "draining", "dead")


class Admission:
    """Counts the answers that are inside: those that run, and `max_queued` that may wait."""

    def __init__(self, max_queued: int) -> None:
        self.limit = self._max_queued = max_queued
        self.num_admitted = 0
        self.rejections = Counter(dict.fromkeys(REJECTION_REASONS, 0))
        self.closed_reason = "loading"

    def open(self, max_running: int) -> None:
        """`max_running`: how many answers the engine works on at once. What has closed meanwhile stays closed."""
        self.limit = max_running + self._max_queued
        if self.closed_reason == "loading":
            self.closed_reason = ""

    def close(self, reason: str) -> None:
        self.closed_reason = reason

    def acquire(self, count: int) -> None:
        """Raises ApiError: 503 where there is no room now, 400 where there never is. `release` undoes it."""
        if self.closed_reason:
            self._reject(self.closed_reason, f"the server is {self.closed_reason}")
        if count > self.limit:
            raise bad_request(f"it asks for {count} answers, and {self.limit} is the most at a time", "n")
        if self.num_admitted + count > self.limit:
            self._reject("queue_full", f"{self.num_admitted} answers are inside, and {self.limit} is the most")
        self.num_admitted += count

    def release(self, count: int) -> None:
        self.num_admitted -= count

    def _reject(self, reason: str, message: str) -> None:
        self.rejections[reason] += 1
        raise ApiError(503, message, code=reason, retry_after=RETRY_AFTER_S)
