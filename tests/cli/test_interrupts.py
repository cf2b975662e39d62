"""Ctrl-C that arrives in a callback whose exceptions Python ignores."""

from __future__ import annotations

import os
import signal
import time
import weakref

import pytest

from tcdeploy.cli.interrupts import repeating_ignored_interrupts


class Target:
    pass


def interrupt_in_a_callback() -> None:
    target = Target()
    reference = weakref.ref(target, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del target  # calls the callback, in which the signal arrives
    assert reference() is None


def test_an_interrupt_that_was_ignored_arrives_again() -> None:
    with pytest.raises(KeyboardInterrupt), repeating_ignored_interrupts():
        interrupt_in_a_callback()
        time.sleep(20)
        pytest.fail("the interrupt is lost")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_python_ignores_an_interrupt_in_a_callback() -> None:
    """Otherwise the test above proves nothing."""
    interrupt_in_a_callback()
    time.sleep(0.2)
