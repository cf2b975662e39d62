"""Ends a process when the one that started it ends, however that ends. Linux only; elsewhere it goes on.

    python -m tcdeploy.host.die_with_parent PARENT MODULE ARGUMENTS...

runs a module as `python -m` does, after `die_with_parent`. The kernel's signal is for the end of the thread that
started the process.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the parent ends. Exits if the parent, a process id, has ended already."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(1)


def command(module: str, *arguments: str) -> list[str]:
    """Runs a module in a child of this process that ends with the thread which starts it."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
