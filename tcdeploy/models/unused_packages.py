"""Imports transformers without packages that only other models and uses of it need.

If they are installed, transformers imports scikit-learn for assisted generation (up to 5.17), scipy for the losses of
object detectors, torchvision for images and torchaudio for sound (up to 5.17), with whatever these import. On an H100
machine, scipy and pandas took 0.8 of 17.8 s of a start with compiled programs. transformers then takes them for not
installed for the life of the process, so this is done only in processes of the command line. Other code may import the
packages afterwards. transformers itself is imported with fewer reads of files
(torch_compat/transformers/fast_import.py). Does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

PACKAGES = ("sklearn", "scipy", "pandas", "torchvision", "torchaudio")
IMPORTERS = (
    "transformers.loss.loss_utils", "transformers.generation.candidate_generator", "transformers.audio_utils",
)  # fmt: skip
_is_fast_import_enabled = False


def enable_fast_transformers_import() -> None:
    """Make `import_transformers` hide PACKAGES and read fewer files. For processes that run only this package."""
    global _is_fast_import_enabled
    _is_fast_import_enabled = True


def import_transformers() -> None:
    """Import transformers and IMPORTERS with fewer file reads, while PACKAGES that are not imported yet are hidden.

    Does nothing unless `enable_fast_transformers_import` was called, so users of the library are not affected.
    """
    if not _is_fast_import_enabled:
        return
    # Not imported above, because this takes 17 ms, and commands without a model import this module too.
    from tcdeploy.torch_compat.transformers.fast_import import import_with_fewer_reads

    hidden = [name for name in PACKAGES if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # None is a missing module
    try:
        import_with_fewer_reads()
        for name in IMPORTERS:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
    finally:
        for name in hidden:
            del sys.modules[name]
