"""The collector looks seldom while a start is expected, and afterwards as the process had it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tcdeploy.gc_policy import STARTING, expect_a_start, spare_what_stands


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    spare_what_stands()  # the tests themselves expect a start
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_after_a_start_it_looks_as_before() -> None:
    gc.set_threshold(900, 9, 8)
    expect_a_start()
    expect_a_start()
    assert gc.get_threshold() == (STARTING, 9, 8)
    spare_what_stands()
    assert gc.get_threshold() == (900, 9, 8) and gc.get_freeze_count() > 0


def test_who_expected_no_start_keeps_what_was_set() -> None:
    """A program that uses `prepare` as a library."""
    gc.set_threshold(800, 7, 6)
    spare_what_stands()
    assert gc.get_threshold() == (800, 7, 6)
