"""Restores the help texts of commands under `python -OO`, which removes docstrings."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import typer


def restore_docstrings(app: typer.Typer) -> None:
    """Set missing docstrings of the app's commands to those in the source files."""
    functions = [command.callback for command in app.registered_commands]
    if app.registered_callback is not None:
        functions.append(app.registered_callback.callback)
    for function in functions:
        if function is not None and function.__doc__ is None:
            function.__doc__ = _docstring_in_source(function)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            restore_docstrings(group.typer_instance)


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
