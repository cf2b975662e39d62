"""Decides when to launch the next step: shortly before the device completes the step in flight. Does not import torch.

The engine launches one step ahead, so that the device does not wait for the host. If the next step were launched at
once, a request that arrives meanwhile would wait for both. Instead, the server's engine thread delays the launch, and
accepts requests until it is due. In a simulation of an 8B shape this shortens the median time to the first token by 5
ms (scripts/simulate-traffic). The launch is due at

    predicted end of the step in flight - MARGIN_SHARE * its predicted time - margin - duration of a launch

The duration is the longest of recent launches of the same kind: with chunks of prompts a launch takes about 2 ms,
without them 0.5 ms (8B shape, H100). The next step has chunks if a prompt is pending. So a request that arrives makes
the launch due earlier; if that time has passed, the step is launched at once, and may be late.

The margin covers errors of the prediction. A launch is late if the device has completed the step in flight by then, and
is idle. A late launch multiplies the margin by GROWTH, and any other by SHRINKAGE. After a late launch, some steps are
launched at once: only they can be measured, which corrects a prediction that is too long. The number of these steps
doubles while launches remain late. Launches for a request that has just arrived change neither.

With more than MAX_ROWS decode rows, steps are launched at once: sending the tokens of so many rows keeps the process
busy for as long as a step takes. With delayed launches, 256 simultaneous requests were served 2% slower (8B model, one
run on one H100; docs/performance-log.md).
"""

from __future__ import annotations

import threading
import time

MIN_MARGIN_MS, MAX_MARGIN_MS = 0.7, 8.0
MARGIN_SHARE = 0.05  # of the predicted time
FIRST_STEP_MARGIN_SHARE = 0.25  # after the device was idle, whose clocks are then higher than while steps were timed
GROWTH, SHRINKAGE = 1.5, 0.99
MIN_PAUSE, MAX_PAUSE = 4, 256  # steps that are launched at once after a late launch
PAUSE_DECAY = 0.98  # factor on the length of the next pause, per launch in time
LAUNCH_TIME_DECAY = 0.95  # factor on the longest duration of a launch, per launch
MAX_ROWS = 64  # decode rows up to which launches are delayed


class LaunchTimer:
    """Points in time are seconds of time.perf_counter. Another thread may read `late_launches` while it is updated."""

    def __init__(self) -> None:
        self.late_launches = 0  # launches after the device had completed the previous step
        self.margin_ms = MIN_MARGIN_MS
        # The longest duration of a recent launch, by whether the step had chunks of prompts.
        self.launch_ms = {False: 0.0, True: 0.0}
        self._next_pause = float(MIN_PAUSE)
        self._pause_left = 0  # steps that are still launched at once
        self._complete: float | None = None  # time at which the next launch should be complete; None: at once
        self._had_prompts = False  # when the step in flight was launched

    def due(self, has_prompts: bool) -> float | None:
        """Time at which to launch the next step. None: at once. `has_prompts`: whether a prompt is pending."""
        return None if self._complete is None else self._complete - self.launch_ms[has_prompts] / 1e3

    def step_started(
        self, start: float | None, predicted_ms: float | None, rows: int = 0, is_first: bool = False,
        has_prompts: bool = False,
    ) -> None:  # fmt: skip
        """Set `due` from the step in flight, which has `rows` decode rows.

        `start`: time at which the device started it; None if that is not known, or no step is in flight. `is_first`:
        the device was idle before it. `has_prompts`: a prompt is pending now.
        """
        self._had_prompts = has_prompts
        if start is None or predicted_ms is None or rows > MAX_ROWS or self._pause_left:
            self._complete = None
            return
        share = FIRST_STEP_MARGIN_SHARE if is_first else MARGIN_SHARE
        self._complete = start + (predicted_ms * (1 - share) - self.margin_ms) / 1e3

    def launched(self, seconds: float, was_late: bool, has_prompts: bool) -> None:
        """Record a launch that took the host `seconds` while another step was in flight.

        `was_late`: the device had completed that step when the launch ended.
        """
        self.launch_ms[has_prompts] = max(self.launch_ms[has_prompts] * LAUNCH_TIME_DECAY, seconds * 1e3)
        if self._complete is None:  # a launch that was not delayed does not test the margin
            self._pause_left = max(0, self._pause_left - 1)
            return
        self.late_launches += was_late
        if has_prompts and not self._had_prompts:  # the launch became due earlier when the prompt arrived
            return
        if was_late:
            self.margin_ms = min(MAX_MARGIN_MS, self.margin_ms * GROWTH)
            self._pause_left = round(self._next_pause)
            self._next_pause = min(MAX_PAUSE, 2 * self._next_pause)
        else:
            self.margin_ms = max(MIN_MARGIN_MS, self.margin_ms * SHRINKAGE)
            self._next_pause = max(MIN_PAUSE, self._next_pause * PAUSE_DECAY)


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
