"""The source files that define a model's modules."""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path

from torch import nn

# Top-level packages whose sources are not hashed file by file: the plan's key has torch's version.
UNHASHED_PACKAGES = {"torch", "tcdeploy", *sys.stdlib_module_names}


def model_sources(model: nn.Module) -> dict[str, str]:
    """The sha256 of each file that defines a class of the model's modules, by Python module.

    Files with functions that these classes call, such as transformers' activations, count only by the package's
    version, which is in the plan's key. Raises OSError if a file has been removed.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    modules = {kind.__module__: source_file(kind) for kind in classes if _is_hashed(kind.__module__)}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in modules.items() if file}


def source_file(kind: type) -> str | None:
    """The file that defines a class; None for a class of a C extension. Raises OSError if it has been removed."""
    try:
        return inspect.getsourcefile(kind)
    except TypeError:  # a class of a C extension
        return None


def _is_hashed(module: str) -> bool:
    return module.partition(".")[0] not in UNHASHED_PACKAGES
