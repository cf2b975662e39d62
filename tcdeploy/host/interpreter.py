"""Checks that the Python interpreter can run transformers. Does not import torch."""

from __future__ import annotations

import sys

from tcdeploy.errors import UsageError

WITHOUT_DOCSTRINGS = 2  # sys.flags.optimize of `python -OO`


def check_docstrings_exist() -> None:
    """Raise UsageError under `python -OO`: transformers 5 reads docstrings when it imports a model's classes."""
    if sys.flags.optimize >= WITHOUT_DOCSTRINGS:
        raise UsageError(
            f"Python runs with optimization level {sys.flags.optimize} (-OO or PYTHONOPTIMIZE), which removes the "
            "docstrings that transformers needs to build a model",
            "use PYTHONOPTIMIZE=1 or -O, which removes only assertions",
        )
