"""Admission control: accepts or rejects a request before the tokenizer or the engine. Does not import torch."""

from __future__ import annotations

from collections import Counter

from tcdeploy.server.protocol import ApiError, bad_request

RETRY_AFTER_S = 1
REJECTION_REASONS = ("loading", "queue_full", "draining", "dead")


class Admission:
    """Counts the admitted choices: at most `max_running` that run and `max_queued` that wait."""

    def __init__(self, max_queued: int) -> None:
        self.limit = self._max_queued = max_queued
        self.num_admitted = 0
        self.rejections = Counter(dict.fromkeys(REJECTION_REASONS, 0))
        self.closed_reason = "loading"  # "" once requests are admitted

    def open(self, max_running: int) -> None:
        """Admit requests. `max_running` is the engine's largest decode batch. No effect after `close`."""
        self.limit = max_running + self._max_queued
        if self.closed_reason == "loading":
            self.closed_reason = ""

    def close(self, reason: str) -> None:
        self.closed_reason = reason

    def check_open(self) -> None:
        """Raises ApiError 503 while the server is loading, draining or dead."""
        if self.closed_reason:
            self._reject(self.closed_reason, f"the server is {self.closed_reason}")

    def acquire(self, count: int) -> None:
        """Admit `count` choices; `release` undoes it. Raises ApiError: 503 if full now, 400 if over the limit alone."""
        self.check_open()
        if count > self.limit:
            raise bad_request(f"the request has {count} choices (prompts times n); the limit is {self.limit}", "n")
        if self.num_admitted + count > self.limit:
            message = f"{self.num_admitted} choices are running or queued, and this request adds {count}"
            self._reject("queue_full", f"{message}; the limit is {self.limit}")
        self.num_admitted += count

    def release(self, count: int) -> None:
        self.num_admitted -= count

    def _reject(self, reason: str, message: str) -> None:
        self.rejections[reason] += 1
        raise ApiError(503, message, code=reason, retry_after=RETRY_AFTER_S)
