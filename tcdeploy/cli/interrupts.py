"""Makes Ctrl-C end a command also if other code ignores the exception that it raises.

Python raises KeyboardInterrupt wherever the main thread is. Torch's compiler catches every exception in some places and
goes on, for example while it evaluates guards, and C code may clear errors. In a callback of a weak reference and in
`__del__`, Python itself only reports exceptions (`sys.unraisablehook`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

DELAY_S = 0.05  # so that the code that ignored the exception has ended


class _Interrupt(KeyboardInterrupt):
    """A KeyboardInterrupt that can have weak references."""


@contextlib.contextmanager
def repeating_ignored_interrupts() -> Iterator[None]:
    """In the block, send SIGINT to this process again if the exception of the last one is freed before the block ends.

    Does nothing if SIGINT has another handler than Python's own, or outside of the main thread.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    has_ended, report = False, sys.unraisablehook

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise make_exception()

    def make_exception() -> _Interrupt:  # a variable of `interrupt` would be a reference cycle, through the traceback
        exception = _Interrupt()
        weakref.finalize(exception, repeat).atexit = False
        return exception

    def repeat() -> None:
        if not has_ended:
            timer = threading.Timer(DELAY_S, send)
            timer.daemon = True
            timer.start()

    def send() -> None:
        if not has_ended:
            os.kill(os.getpid(), signal.SIGINT)

    def report_others(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, _Interrupt):
            report(unraisable)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = report_others
    try:
        yield
    finally:
        has_ended = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = report
