"""Lets the kernel kill a child process when its parent ends, also if the parent is killed.

    python -m tcdeploy.host.die_with_parent PARENT MODULE ARGUMENTS...

calls `die_with_parent`, and then runs MODULE as `python -m` does. The kernel sends the signal when the thread that
started the child ends, so start it in a thread that lives long enough. On systems other than Linux the child survives.
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
    """The command line of a child of this process that runs a module and is killed as described above."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
