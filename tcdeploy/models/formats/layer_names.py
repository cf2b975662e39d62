"""Lists of layers in the configs of quantised checkpoints: names, wildcards and regular expressions.

The names are those of modules in the class that was quantised, which may have other prefixes than the class that is
served: `model.language_model.layers.0.mlp` instead of `model.layers.0.mlp`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

PREFIX = re.compile(r"^(model\.|language_model\.)+")
REGULAR_EXPRESSION = "re:"


def is_listed(path: str, names: Iterable[str]) -> bool:
    """Whether a list has the layer, or a module that contains it."""
    return any(_is_match(path, name) for name in names)


def _is_match(path: str, name: str) -> bool:
    if name.startswith(REGULAR_EXPRESSION):
        try:
            expression = re.compile(name.removeprefix(REGULAR_EXPRESSION))
        except re.error:
            return False
        return any(expression.match(f"{prefix}{core_name(path)}") for prefix in ("", "model.", "model.language_model."))
    if "*" in name:
        return fnmatch.fnmatchcase(core_name(path), f"{core_name(name)}") or fnmatch.fnmatchcase(
            core_name(path), f"{core_name(name)}.*"
        )
    return f".{core_name(name)}." in f".{core_name(path)}."


def core_name(name: str) -> str:
    """A name without the prefixes in which classes of one model differ."""
    return PREFIX.sub("", name)
