"""Garbage collection thresholds during start-up, and their restoration afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tcdeploy.host.gc_policy import STARTUP_THRESHOLD, freeze_gc_after_startup, relax_gc_for_startup
from tcdeploy.host.stages import ImportStage


@pytest.fixture(autouse=True)
def restored_thresholds() -> Iterator[None]:
    gc.freeze()  # otherwise most collections of these tests would visit the objects of earlier tests, for 0.5 s each
    freeze_gc_after_startup()  # conftest.py has raised the thresholds
    saved = gc.get_threshold()
    yield
    gc.set_threshold(*saved)
    gc.unfreeze()


def test_thresholds_are_restored_after_start_up() -> None:
    gc.set_threshold(900, 9, 8)
    relax_gc_for_startup()
    relax_gc_for_startup()
    assert gc.get_threshold() == (STARTUP_THRESHOLD, 9, 8)
    freeze_gc_after_startup()
    assert gc.get_threshold() == (900, 9, 8) and gc.get_freeze_count() > 0


def test_without_relaxing_the_thresholds_stay() -> None:
    """As in a program that calls `prepare` as a library."""
    gc.set_threshold(800, 7, 6)
    freeze_gc_after_startup()
    assert gc.get_threshold() == (800, 7, 6)


class Cycle:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_imported_objects_are_frozen_and_later_ones_are_collected() -> None:
    relax_gc_for_startup()
    gc.unfreeze()
    imports, imported = ImportStage(), Cycle()
    imports.end()
    later = Cycle()
    references = weakref.ref(imported), weakref.ref(later)
    del imported, later
    freeze_gc_after_startup()
    assert references[0]() is not None and references[1]() is None
    gc.unfreeze()  # as `release_memory` does
    gc.collect()
    assert references[0]() is None


def test_imports_of_a_library_are_not_frozen() -> None:
    gc.unfreeze()
    ImportStage().end()
    assert gc.get_freeze_count() == 0
