"""Ctrl-C whose exception is ignored by the code that it interrupts."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from tcdeploy.cli.interrupts import repeating_ignored_interrupts


class Target:
    pass


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_in_a_callback() -> None:
    target = Target()
    reference = weakref.ref(target, lambda _: interrupt())
    del target  # calls the callback, in which the signal arrives
    assert reference() is None


def interrupt_in_a_block_that_catches_everything() -> None:
    try:  # noqa: SIM105
        interrupt()
    except:  # noqa: E722, S110 - as in torch/_dynamo/guards.py
        pass


IGNORED = pytest.mark.parametrize(
    "interrupt_ignored", [interrupt_in_a_callback, interrupt_in_a_block_that_catches_everything]
)


@IGNORED
def test_an_interrupt_that_was_ignored_arrives_again(interrupt_ignored: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt), repeating_ignored_interrupts():
        interrupt_ignored()
        time.sleep(20)
        pytest.fail("the interrupt is lost")


def test_an_interrupt_that_is_ignored_twice_arrives_a_third_time() -> None:
    with pytest.raises(KeyboardInterrupt), repeating_ignored_interrupts():
        for _ in range(2):
            try:
                interrupt() if _ == 0 else time.sleep(20)
            except KeyboardInterrupt:
                continue
            pytest.fail("the interrupt is lost")
        time.sleep(20)
        pytest.fail("the interrupt is lost")


@IGNORED
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_the_context_an_ignored_interrupt_is_lost(interrupt_ignored: Callable[[], None]) -> None:
    """Otherwise the tests above prove nothing."""
    interrupt_ignored()
    time.sleep(0.2)


def test_an_interrupt_that_ends_the_block_is_not_repeated() -> None:
    with pytest.raises(KeyboardInterrupt), repeating_ignored_interrupts():
        interrupt()
    time.sleep(0.2)
    with repeating_ignored_interrupts():
        interrupt_in_a_block_that_catches_everything()  # the block ends before the repetition is due
    time.sleep(0.2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_is_kept() -> None:
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        with repeating_ignored_interrupts():
            interrupt()
            time.sleep(0.01)
        assert received == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_in_another_thread_signals_are_left_alone() -> None:
    entered: list[bool] = []

    def enter() -> None:
        with repeating_ignored_interrupts():
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered
