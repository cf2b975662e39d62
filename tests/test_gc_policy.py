"""The collector looks seldom while a start is expected, and afterwards as the process had it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tcdeploy.gc_policy import STARTUP_THRESHOLD, freeze_gc_after_startup, relax_gc_for_startup


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    freeze_gc_after_startup()  # the tests themselves expect a start
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_after_a_start_it_looks_as_before() -> None:
    gc.set_threshold(900, 9, 8)
    relax_gc_for_startup()
    relax_gc_for_startup()
    assert gc.get_threshold() == (STARTUP_THRESHOLD, 9, 8)
    freeze_gc_after_startup()
    assert gc.get_threshold() == (900, 9, 8) and gc.get_freeze_count() > 0


def test_who_expected_no_start_keeps_what_was_set() -> None:
    """A program that uses `prepare` as a library."""
    gc.set_threshold(800, 7, 6)
    freeze_gc_after_startup()
    assert gc.get_threshold() == (800, 7, 6)
