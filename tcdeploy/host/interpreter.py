"""Checks that this operating system and Python interpreter can run a model. Does not import torch."""

from __future__ import annotations

import sys

from tcdeploy.errors import UsageError

WITHOUT_DOCSTRINGS = 2  # sys.flags.optimize of `python -OO`


def check_interpreter() -> None:
    """Raise UsageError on another system than Linux, and under `python -OO`.

    transformers 5 reads docstrings when it imports a model's classes.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"tcdeploy runs models on Linux only, and this system is {sys.platform}",
            "run it on a Linux machine, in a container or in WSL 2",
        )
    if sys.flags.optimize >= WITHOUT_DOCSTRINGS:
        raise UsageError(
            f"Python runs with optimization level {sys.flags.optimize} (-OO or PYTHONOPTIMIZE), which removes the "
            "docstrings that transformers needs to build a model",
            "use PYTHONOPTIMIZE=1 or -O, which removes only assertions",
        )
