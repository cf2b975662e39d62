"""Makes Ctrl-C end a command also if Python ignores the exception that it raises.

Python raises KeyboardInterrupt wherever the main thread is. In a callback of a weak reference, of which torch's
compiler has many, and in `__del__`, it only reports exceptions (`sys.unraisablehook`) and goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

DELAY_S = 0.05  # so that the callback has ended


@contextlib.contextmanager
def repeating_ignored_interrupts() -> Iterator[None]:
    """In the block, send SIGINT to this process again when a KeyboardInterrupt was ignored."""
    report = sys.unraisablehook

    def repeat(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            timer = threading.Timer(DELAY_S, os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True
            timer.start()
        else:
            report(unraisable)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = report
