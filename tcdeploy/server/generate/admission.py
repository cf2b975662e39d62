"""Admission control: accepts or rejects a request before the tokenizer or the engine. Does not import torch.

Two quantities are limited: choices, from admission to their last token, and the bytes of large bodies, from their
arrival until the prompt is tokenized. The last eighth of the choices is reserved for requests with a single choice, so
that two requests with n = 128 do not fill a queue of 256.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Self

from tcdeploy.server.apis.openai.protocol import ApiError, bad_request
from tcdeploy.server.http.request_parsing import SMALL_BODY_BYTES

RETRY_AFTER_S = 1
REJECTION_REASONS = ("loading", "queue_full", "bodies_full", "draining", "dead")
RESERVED_DIVISOR = 8  # one eighth of the choices


class Admission:
    """Counts the admitted choices: at most `max_running` that run and `max_queued` that wait.

    Large bodies that are being received, parsed or tokenized may have `max_waiting_bytes` in total.
    """

    def __init__(self, max_queued: int, max_waiting_bytes: int = 32 << 20) -> None:
        self.limit = self._max_queued = max_queued
        self.max_waiting_bytes = max_waiting_bytes
        self.num_admitted = self.num_waiting_bytes = 0
        self.rejections = Counter(dict.fromkeys(REJECTION_REASONS, 0))
        self.closed_reason = "loading"  # "" once requests are admitted
        self._idle_since = float("inf")

    def open(self, max_running: int) -> None:
        """Admit requests. `max_running` is the engine's largest decode batch. No effect after `close`."""
        self.limit = max_running + self._max_queued
        self._idle_since = time.monotonic()
        if self.closed_reason == "loading":
            self.closed_reason = ""

    def close(self, reason: str) -> None:
        self.closed_reason = reason

    def check_open(self) -> None:
        """Raises ApiError 503 while the server is loading, draining or dead."""
        if self.closed_reason:
            self.reject(self.closed_reason, f"the server is {self.closed_reason}")

    def acquire(self, count: int) -> None:
        """Admit `count` choices; `release` undoes it. Raises ApiError: 503 if full now, 400 if over the limit alone."""
        self.check_open()
        if count > self.limit:
            raise bad_request(f"the request has {count} choices (prompts times n); the limit is {self.limit}", "n")
        limit = self.limit - self.limit // RESERVED_DIVISOR if count > 1 and self.num_admitted else self.limit
        if self.num_admitted + count > limit:
            message = f"{self.num_admitted} choices are running or queued, and this request adds {count}"
            self.reject("queue_full", f"{message}; the limit is {limit}")
        self.num_admitted += count

    def release(self, count: int) -> None:
        self.num_admitted -= count
        self._idle_since = time.monotonic()

    def idle_seconds(self) -> float:
        """Seconds since the later of `open` and the end of the last request; 0 before `open` and during requests."""
        return 0.0 if self.num_admitted else max(0.0, time.monotonic() - self._idle_since)

    def reject(self, reason: str, message: str) -> None:
        self.rejections[reason] += 1
        # The next request on this connection would be rejected too. Behind a load balancer, a new one may not.
        headers = {"connection": "close"} if reason in ("draining", "dead") else None
        raise ApiError(503, message, code=reason, retry_after=RETRY_AFTER_S, headers=headers)


class BodyReservation:
    """The bytes of one body that count as waiting, until `release` or the end of the `with` statement. Bodies of at
    most SMALL_BODY_BYTES are not counted, so that slow large bodies cannot block small ones.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission, self._num_reserved = admission, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def grow(self, size: int) -> None:
        """Reserve `size` bytes in total, because so many have arrived. Raises ApiError 503 if too many bytes wait."""
        if size <= SMALL_BODY_BYTES:
            return
        admission, added = self._admission, size - self._num_reserved
        if admission.num_waiting_bytes + added > admission.max_waiting_bytes:
            message = (
                f"{admission.num_waiting_bytes} bytes of large requests are waiting, and this request adds {added}"
            )
            admission.reject("bodies_full", f"{message}; the limit is {admission.max_waiting_bytes}")
        admission.num_waiting_bytes += added
        self._num_reserved = size

    def release(self) -> None:
        self._admission.num_waiting_bytes -= self._num_reserved
        self._num_reserved = 0
