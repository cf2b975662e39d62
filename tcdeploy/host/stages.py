"""The time of a start by stage, and that of its imports by package. Does not import torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tcdeploy.host.gc_policy import freeze_imported_objects
from tcdeploy.host.import_times import ImportTimer
from tcdeploy.host.progress import Progress

import_timer = ImportTimer()  # of this process
_import_seconds = 0.0


class ImportStage:
    """Counts the time from its creation until `end` as the stage `import` of starts that begin afterwards.

    For the top of a module, whose imports no `with` block can hold.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        import_timer.start()

    def end(self) -> None:
        global _import_seconds
        import_timer.stop()
        freeze_imported_objects()
        _import_seconds += time.perf_counter() - self._start


@dataclass
class StageTimer:
    """Seconds of each stage, in order. A stage may run several times."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=lambda: {"import": _import_seconds})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.progress.stage(name)
        start = time.perf_counter()
        try:
            with import_timer.measure():
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
