"""When to launch the next step: shortly before the device completes the step in flight. Does not import torch.

The host launches one step ahead, so that the device never waits for it. Launched at once, the next step would stay in
the device's queue for the whole step in flight, and a request that arrives meanwhile would wait for both. Instead, the
server's engine thread waits until the launch is due, and takes requests in until then. In a simulation of an 8B shape
this shortens the median first token by 5 ms (scripts/simulate-traffic).

The launch is due before the predicted end of the step in flight, by the sum of the time that recent launches took and
of a margin for the error of the prediction. If a launch comes too late, the device had nothing to do, and the margin
grows at once; otherwise it shrinks slowly.

With many rows, steps are launched at once: sending their tokens then takes the process as long as a step, and a launch
would have to wait for it. 256 requests at once were served 15% slower with late launches (8B model, H100).
"""

from __future__ import annotations

MIN_MARGIN_MS, MAX_MARGIN_MS = 0.7, 8.0
MARGIN_SHARE = 0.05  # of the predicted time
# The same for the first step after the device was idle. Its clocks are higher than in the timed steps, and the
# correction of predictions does not include such steps.
FIRST_STEP_MARGIN_SHARE = 0.25
GROWTH, SHRINKAGE = 1.5, 0.99
LAUNCH_TIME_DECAY = 0.95  # per launch, of the longest launch
MAX_ROWS = 64  # of the sequences that decode


class LaunchTimer:
    """Arguments in seconds of time.perf_counter. Another thread may read `late_launches` while it is updated."""

    def __init__(self) -> None:
        self.late_launches = 0  # the device had completed the previous step
        self.margin_ms = MIN_MARGIN_MS
        self.launch_ms = 0.0  # the longest recent launch
        self._due: float | None = None

    @property
    def due(self) -> float | None:
        """When to launch the next step. None: at once."""
        return self._due

    def step_started(
        self, start: float | None, predicted_ms: float | None, rows: int = 0, is_first: bool = False
    ) -> None:
        """The device began a step at `start`. None if that is not known, or if there is no step or no prediction.

        `rows`: sequences that decode. `is_first`: the device was idle before.
        """
        if start is None or predicted_ms is None or rows > MAX_ROWS:
            self._due = None
            return
        share = FIRST_STEP_MARGIN_SHARE if is_first else MARGIN_SHARE
        self._due = start + (predicted_ms * (1 - share) - self.margin_ms - self.launch_ms) / 1e3

    def launched(self, seconds: float, was_late: bool) -> None:
        """A step was launched behind one in flight, which took the host so long.

        `was_late`: the step in flight was complete by then.
        """
        self.launch_ms = max(self.launch_ms * LAUNCH_TIME_DECAY, seconds * 1e3)
        if self._due is None:  # it was launched at once, which says nothing about the margin
            return
        if was_late:
            self.late_launches += 1
            self.margin_ms = min(MAX_MARGIN_MS, self.margin_ms * GROWTH)
        else:
            self.margin_ms = max(MIN_MARGIN_MS, self.margin_ms * SHRINKAGE)
