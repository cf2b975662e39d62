"""Imports transformers without packages that only other models and uses of it need.

If they are installed, transformers imports scikit-learn for assisted generation (up to 5.17), scipy for the losses of
object detectors, and torchvision for images, with whatever these import. On an H100 machine, scipy and pandas took
0.8 of 17.8 s of a start with compiled programs. While the modules that import them are loaded, transformers finds them
not installed, and remembers that for the life of the process. So this is done only in processes of the command line,
which need none of these uses. Other code may import the packages afterwards. Does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

PACKAGES = ("sklearn", "scipy", "pandas", "torchvision")
IMPORTERS = ("transformers.loss.loss_utils", "transformers.generation.candidate_generator")
_skips = False


def skip_unused_packages() -> None:
    """Let `import_transformers` hide the packages. For processes that run only this package."""
    global _skips
    _skips = True


def import_transformers() -> None:
    """Import the modules of transformers that import PACKAGES, without those that are not imported yet.

    Does nothing in other programs, such as users of the library.
    """
    if not _skips:
        return
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
