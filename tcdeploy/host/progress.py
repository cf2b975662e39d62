"""Progress of a start: its stages, and the steps of a stage. Does not import torch.

All parts of a start report to one `Progress`. `StageProgress` keeps the latest reports, from which `/ready` answers
(server/api.py) and displays draw: lines (host/plain_progress.py), or a line that moves (cli/display.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from tcdeploy.planning.bucket_record import BucketRecord
    from tcdeploy.planning.plan import Plan


class Progress(Protocol):
    """Callbacks of a start. A stage ends when the next one starts.

    If a bucket differs from a stored reference, the stages `load`, `reference` and `compile` follow again, with all
    buckets.
    """

    def stage(self, name: str) -> None:
        """A stage starts."""
        return

    def step(self, number: int, total: int, name: str) -> None:
        """Step `number` of `total` of the stage starts: a bucket, a warm-up request, a part of the reference."""
        return

    def detail(self, text: str) -> None:
        """What the stage or the step does now, for example `package 3 of 7`."""
        return

    def planned(self, plan: Plan) -> None:
        """The plan, after the stage `decide`."""
        return

    def expect(self, stage_seconds: Mapping[str, float]) -> None:
        """The seconds of each stage in an earlier start that took the same steps, in order."""
        return

    def bucket_finished(self, record: BucketRecord) -> None:
        """The bucket of the latest `step` has run and was checked."""
        return

    def finish(self, is_complete: bool = True) -> None:
        """The start has ended, or was given up in this stage."""
        return

    def message(self, text: str) -> None:
        """A line about the process, such as the requests for which a server waits before it stops."""
        return


class NullProgress(Progress):
    """Ignores all reports."""


class Position(NamedTuple):
    """The present stage, step and detail of a start. A stage without steps has 0 of 0."""

    stage: str = ""  # "" before the first
    started_at: float = 0.0  # time.monotonic() at the start of the stage
    number: int = 0
    total: int = 0
    step: str = ""
    detail: str = ""

    @property
    def seconds(self) -> float:
        """Since the start of the stage."""
        return time.monotonic() - self.started_at


class StageProgress(Progress):
    """Keeps the position of a start. One thread reports at a time; others may read, because `position` is replaced."""

    def __init__(self) -> None:
        self._created_at = time.monotonic()
        self._expected: dict[str, float] = {}
        self._begun: set[str] = set()  # names of stages
        self.position = Position()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._created_at

    @property
    def seconds_left(self) -> float | None:
        """An estimate from an earlier start. None without one, and in stages that it does not have.

        Stages before the present one that this start did not report are not counted.
        """
        current, names = self.position, list(self._expected)
        if current.stage not in names:
            return None
        later = names[names.index(current.stage) + 1 :]
        left = max(0.0, self._expected[current.stage] - current.seconds)
        return left + sum(self._expected[name] for name in later if name not in self._begun)

    def stage(self, name: str) -> None:
        if name == self.position.stage:  # a second attempt, or a second part: it continues
            return
        self._begun = self._begun | {name}
        self.move(Position(name, time.monotonic()))

    def step(self, number: int, total: int, name: str) -> None:
        self.move(self.position._replace(number=number, total=total, step=name, detail=""))

    def detail(self, text: str) -> None:
        self.move(self.position._replace(detail=text))

    def move(self, position: Position) -> None:
        """Called for each change of the position until `finish`."""
        self.position = position

    def expect(self, stage_seconds: Mapping[str, float]) -> None:
        self._expected = dict(stage_seconds)

    def finish(self, is_complete: bool = True) -> None:
        self.position = Position()
