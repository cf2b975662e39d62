"""Measures the time that steps take on the device, without an additional synchronisation. Does not import torch.

On a GPU, a step is measured if the host had launched all of it before the previous step completed, and was waiting when
each of the two completed. The device then ran the step from one completion to the other without a gap, and the host saw
both at once. The time includes sampling and the copy of the tokens. Other steps are not measured: the first after the
engine was idle, those that the host launched late, those that are launched in two parts because masks need the previous
token, and those with prompt log-probabilities.

On a CPU a step runs while it is launched, so the time of its launch is measured, scheduling included.
"""

from __future__ import annotations

from typing import NamedTuple

from tcdeploy.engine.schedule.step_costs import STEP_KINDS, StepEstimate, StepPredictor


class StepTotals(NamedTuple):
    """Sums over the measured steps of one kind."""

    steps: int = 0
    predicted_seconds: float = 0.0  # as predicted when each step was launched
    measured_seconds: float = 0.0


class StepClock:
    """Compares measured times with predicted ones. Another thread may read `totals` while it is updated."""

    def __init__(self, predictor: StepPredictor) -> None:
        self.predictor = predictor
        self.totals: dict[str, StepTotals] = dict.fromkeys(STEP_KINDS, StepTotals())
        self.started: float | None = None  # time at which the device started the step in flight; None: not observed

    def step_completed(
        self, estimate: StepEstimate | None, now: float, has_waited: bool, is_next_launched: bool
    ) -> None:
        """The host has seen a step of the device complete at `now` (time.perf_counter), after waiting for it or late.

        `is_next_launched`: the device runs the next step from `now` on, if the host has waited.
        """
        if estimate is not None and has_waited and self.started is not None:
            self.add(estimate, now - self.started)
        self.started = now if has_waited and is_next_launched else None

    def add(self, estimate: StepEstimate, seconds: float) -> None:
        """Count a measured step."""
        steps, predicted, measured = self.totals[estimate.kind]
        self.totals[estimate.kind] = StepTotals(steps + 1, predicted + estimate.predicted_ms / 1e3, measured + seconds)
        self.predictor.observe(estimate, seconds * 1e3)
