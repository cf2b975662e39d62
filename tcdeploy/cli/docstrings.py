"""Restores the help texts of commands under `python -OO`, which removes docstrings."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any


def restore_docstring(function: Callable[..., Any]) -> None:
    """Set a missing docstring of a command to that in the source file."""
    if function.__doc__ is None:
        function.__doc__ = _docstring_in_source(function)


def _docstring_in_source(function: Callable[..., Any]) -> str | None:
    """The docstring in the source of the function's module, found by the function's name.

    `inspect.getsource(function)` would return a wrapper of options.py.
    """
    module = inspect.getmodule(function)
    try:
        tree = ast.parse(inspect.getsource(module)) if module else ast.Module([], [])
    except (OSError, SyntaxError):  # installed without sources
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            return ast.get_docstring(node)
    return None
