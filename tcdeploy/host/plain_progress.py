"""Prints the progress of a start as lines: the display of a log, and of `prepare()` in a terminal.

Each stage and each bucket gets one line when it ends:

    load                       0.4 s
    [1/4] prefill:128          9.3 s, miss, 6 programs, KL 1.2e-12

The seconds of the stages add up to the time since the start, because a stage ends when the next one starts. After
QUIET_S without a line, a thread prints the present stage and step:

    compile ...               16.0 s, [1/4] prefill:128, package 2 of 5

Rejected: a carriage return per second, which log collectors store as one long line. Imports neither torch nor rich.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self

from tcdeploy.host.progress import NullProgress, Position, Progress, StageProgress

if TYPE_CHECKING:
    from tcdeploy.planning.bucket_record import BucketRecord
    from tcdeploy.planning.plan import Plan

QUIET_S = 8.0  # a running stage prints a line at least this often, plus POLL_S and waits for the GIL
POLL_S = 0.5
NAME_WIDTH = 22


class PlainProgress(StageProgress):
    """A context manager whose first stage is `first_stage`. If the block raises, the open stage gets a line too."""

    def __init__(self, first_stage: str = "import") -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._printed_at = self._step_started_at = time.monotonic()
        self._has_finished = threading.Event()
        self.stage(first_stage)

    def __enter__(self) -> Self:
        threading.Thread(target=self._print_while_quiet, name="progress", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(is_complete=kind is None)

    def finish(self, is_complete: bool = True) -> None:
        """Print the line of the last stage. Later reports are still printed, without lines between them."""
        self._has_finished.set()
        self._end_stage(is_complete)
        super().finish()

    def stage(self, name: str) -> None:
        if name != self.position.stage:
            self._end_stage()
        super().stage(name)

    def _end_stage(self, is_complete: bool = True) -> None:
        ended = self.position
        if ended.stage and not is_complete:
            self._print(_line_of_running(ended))
        elif ended.stage:
            steps = f"{ended.number} of {ended.total}" if ended.total else ""
            self._print(_line(ended.stage, ended.seconds, steps))

    def planned(self, plan: Plan) -> None:
        for warning in fallback_warnings(plan):
            self._print(warning)

    def step(self, number: int, total: int, name: str) -> None:
        self._step_started_at = time.monotonic()
        super().step(number, total, name)

    def bucket_finished(self, record: BucketRecord) -> None:
        self._print(_line(_step_name(self.position), time.monotonic() - self._step_started_at, _outcome(record)))

    def message(self, text: str) -> None:
        self._print(text)

    def _print(self, line: str) -> None:
        with self._lock:
            self._printed_at = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def _print_while_quiet(self) -> None:
        while not self._has_finished.wait(POLL_S):
            with self._lock:
                if self.position.stage and time.monotonic() - self._printed_at >= QUIET_S:
                    self._print(_line_of_running(self.position))


def default_progress() -> AbstractContextManager[Progress]:
    """What a library caller sees: lines on stderr if it is a terminal, otherwise nothing."""
    return PlainProgress() if sys.stderr is not None and sys.stderr.isatty() else nullcontext(NullProgress())


def fallback_warnings(plan: Plan) -> Iterator[str]:
    """A warning for each decision of the plan that replaces what would be faster."""
    for decision in plan.decisions:
        if decision.is_fallback:
            yield f"warning: {decision.name} is {decision.value}: {decision.reason}"


def describe_position(position: Position) -> str:
    """The step and the detail; "" if the stage has reported none."""
    return ", ".join(filter(None, [_step_name(position) if position.total else "", position.detail]))


def _step_name(position: Position) -> str:
    return f"[{position.number}/{position.total}] {position.step}"


def _line_of_running(position: Position) -> str:
    return _line(f"{position.stage} ...", position.seconds, describe_position(position))


def _line(name: str, seconds: float, text: str) -> str:
    return f"{name:<{NAME_WIDTH}} {seconds:7.1f} s{text and f', {text}'}"


def _outcome(record: BucketRecord) -> str:
    captured = ", captured" if record.captured else ""
    programs = "1 program" if record.programs == 1 else f"{record.programs} programs"
    kernels = f", {record.kernels_compiled} kernels compiled" if record.kernels_compiled and record.cache_hits else ""
    return f"{record.outcome}, {programs}{kernels}{captured}, KL {record.parity.kl:.1e}"
