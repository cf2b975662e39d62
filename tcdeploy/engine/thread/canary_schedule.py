"""Records the canary (engine/check/canary.py) and runs it while the engine is idle, one step at a time.

Recording takes about 1 s (8B, H100), so it follows /ready instead of delaying it, except with `--canary-strict`. A
round then runs every case once; it is due `interval` seconds after the previous one ended. A step runs only if the
engine has had no request for IDLE_S, so the short gaps between one client's requests are not used. In the first minute,
recording waits for FIRST_MINUTE_IDLE_S, because a request that arrives during a step waits for the step. An interrupted
case restarts from its first step when the engine is idle again. A server that is never idle runs no canaries; the
timestamp of the last success then stops advancing.

A case whose first two runs differ is left out and counted. With `--canary-strict`, a server without a case does not
start, because nothing would check the health that it reports.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple

from tcdeploy.errors import CompileError

if TYPE_CHECKING:  # importing torch takes seconds; a server's socket answers before
    from tcdeploy.engine.check.canary import Canary, CanaryDifference

IDLE_S = 0.1
FIRST_MINUTE_S, FIRST_MINUTE_IDLE_S = 60.0, 1.0  # the second is CAPTURE_AFTER_IDLE_S of engine_thread.py
log = logging.getLogger("tcdeploy.engine")


class CanaryStats(NamedTuple):
    """Counts for metrics, since the start."""

    rounds: int = 0  # completed
    failures: int = 0  # cases with a difference
    steps: int = 0  # recording included
    last_success: float = 0.0  # Unix time of the last round without a difference, or of the recording; 0: not recorded
    cases_used: int = 0
    cases_not_repeatable: int = 0  # left out, because their first two runs differed


class CanarySchedule:
    """Used by the engine thread. Other threads may read `stats`, which is replaced at each change.

    `interval`: seconds from the end of a round until the next one is due.
    """

    def __init__(self, canary: Canary, interval: float) -> None:
        self.stats = CanaryStats()
        self._canary, self._interval = canary, interval
        self._started_at = time.monotonic()
        self._busy_at = self._started_at  # when the engine last had work
        self._due_at = 0.0  # of the round
        self._case = 0  # index of the next case of the round
        self._round_failures = 0
        self._check: Generator[None, None, CanaryDifference | None] | None = None  # the case that is running

    @property
    def is_running(self) -> bool:
        """Whether a case is running, which holds blocks and rows."""
        return self._check is not None

    def record(self) -> None:
        """Record all cases at once, while the engine is idle. Raises CompileError if none is repeatable."""
        while self._canary.unrecorded:
            self._run_step()
        if not self._canary.cases:
            raise CompileError(
                f"--canary-strict has nothing to check: the two runs of each case differ. The first difference: "
                f"{self._canary.unrepeatable[0]}",
                "find the operation that is not deterministic, or start without --canary-strict",
            )

    def seconds_until_due(self) -> float:
        """Seconds until the next step may run if the engine stays idle; infinity if there is nothing to run."""
        now = time.monotonic()
        if self._canary.unrecorded:
            is_first_minute = now < self._started_at + FIRST_MINUTE_S
            return max(0.0, self._busy_at + (FIRST_MINUTE_IDLE_S if is_first_minute else IDLE_S) - now)
        if not self._canary.cases:
            return float("inf")
        return max(0.0, max(self._due_at, self._busy_at + IDLE_S) - now)

    def interrupt(self) -> None:
        """The engine has work: drop the running case, so that its blocks and rows are free. Called before each step."""
        self._busy_at = time.monotonic()
        if self._check is not None:
            self._check.close()
            self._check = None

    def run_step_if_due(self) -> None:
        """Run one step of the canary, or end a case. Call it only while the engine has no work."""
        if self.seconds_until_due() <= 0:
            self._run_step()

    def _run_step(self) -> None:
        canary, is_recording = self._canary, bool(self._canary.unrecorded)
        if self._check is None:
            self._due_at = 0.0  # an interrupted round continues as soon as the engine is idle
            self._check = canary.record_next() if is_recording else canary.check(self._case)
        try:
            next(self._check)
        except StopIteration as end:
            self._check = None
            (self._finish_recording if is_recording else self._finish_case)(end.value)
        self.stats = self.stats._replace(steps=canary.num_steps)

    def _finish_recording(self, difference: CanaryDifference | None) -> None:
        if difference is not None:
            log.warning("a canary case is not used, because its first two runs differ: %s", difference)
        used, unused = len(self._canary.cases), len(self._canary.unrepeatable)
        self.stats = self.stats._replace(cases_used=used, cases_not_repeatable=unused)
        if used and not self._canary.unrecorded:
            self.stats = self.stats._replace(last_success=time.time())
            self._due_at = time.monotonic() + self._interval

    def _finish_case(self, difference: CanaryDifference | None) -> None:
        if difference is not None:
            log.error("canary failed: %s", difference)
            self._round_failures += 1
            self.stats = self.stats._replace(failures=self.stats.failures + 1)
        self._case += 1
        if self._case < len(self._canary.cases):
            return
        last_success = self.stats.last_success if self._round_failures else time.time()
        self.stats = self.stats._replace(rounds=self.stats.rounds + 1, last_success=last_success)
        self._case = self._round_failures = 0
        self._due_at = time.monotonic() + self._interval
