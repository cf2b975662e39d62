"""A lock that the engine holds while it launches a step. Does not import torch."""

from __future__ import annotations

import threading
import time


class LaunchLock:
    """Held (`with lock:`) by the engine thread during each launch. Other threads can wait for the end of the launch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = 0.0  # when the latest launch began, in seconds of time.perf_counter

    def __enter__(self) -> None:
        self._lock.acquire()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, max_seconds: float) -> None:
        """Return when no step is being launched, at the latest `max_seconds` after the launch began."""
        if self._lock.locked():
            seconds = self._started + max_seconds - time.perf_counter()
            if seconds > 0 and self._lock.acquire(timeout=seconds):
                self._lock.release()
