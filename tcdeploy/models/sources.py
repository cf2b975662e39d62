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
    """The sha256 of each file that defines a class of the model's modules, by Python module, in sorted order.

    Files of functions that these Python modules import are included, for example those for rotary frequencies. Files
    that these functions use in turn are not: the package's version in the plan's key covers them. Raises OSError if a
    file has been removed.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    names = {kind.__module__ for kind in classes} | _imported_modules({type(module) for module in model.modules()})
    files = {name: _file_of(name) for name in sorted(names) if _is_hashed(name)}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in files.items() if file}


def _imported_modules(classes: set[type]) -> set[str]:
    """The modules of the functions that the modules of these classes have imported."""
    names = {kind.__module__ for kind in classes}
    modules = [sys.modules[name] for name in names if name in sys.modules and _is_hashed(name)]
    values = [value for module in modules for value in list(vars(module).values())]  # an import may change the module
    return {value.__module__ for value in values if inspect.isfunction(value) and value.__module__}


def _file_of(module: str) -> str | None:
    """The source of an imported module; None if it has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if file and file.endswith(".py") else None


def source_file(kind: type) -> str | None:
    """The file that defines a class; None for a class of a C extension. Raises OSError if it has been removed."""
    try:
        return inspect.getsourcefile(kind)
    except TypeError:  # a class of a C extension
        return None


def _is_hashed(module: str) -> bool:
    return module.partition(".")[0] not in UNHASHED_PACKAGES
