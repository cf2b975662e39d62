"""Imports transformers without packages that only other models and uses of it need.

If they are installed, transformers imports scikit-learn for assisted generation (up to 5.17), scipy for the losses of
object detectors, and torchvision for images, with whatever these import. On an H100 machine, scipy and pandas took
1.2 of 17.8 s of a start with compiled programs. Here transformers finds them not installed, until the modules that
import them are loaded. Other code may import them afterwards. Does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

PACKAGES = ("sklearn", "scipy", "pandas", "torchvision")
IMPORTERS = ("transformers.loss.loss_utils", "transformers.generation.candidate_generator")


def import_transformers() -> None:
    """Import the modules of transformers that import PACKAGES, without those that are not imported yet."""
    hidden = [name for name in PACKAGES if name not in sys.modules]
    for name in hidden:
        # The import system takes None for a missing module.
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        for name in IMPORTERS:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
    finally:
        for name in hidden:
            del sys.modules[name]
