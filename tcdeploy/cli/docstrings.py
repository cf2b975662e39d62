"""Restores docstrings of commands, which are their help texts, under `python -OO`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import typer


def restore_docstrings(app: typer.Typer) -> None:
    """Read docstrings that the interpreter has removed from the source files. Does nothing if there are any."""
    for registered in (*app.registered_commands, *([app.registered_callback] if app.registered_callback else [])):
        if registered.callback is not None and registered.callback.__doc__ is None:
            registered.callback.__doc__ = _docstring_in_source(registered.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            restore_docstrings(group.typer_instance)


def _docstring_in_source(function: Callable[..., Any]) -> str | None:
    """By module and name: options.py wraps commands in functions of another module."""
    module = inspect.getmodule(function)
    try:
        tree = ast.parse(inspect.getsource(module)) if module else ast.Module([], [])
    except (OSError, SyntaxError):  # installed without sources
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            return ast.get_docstring(node)
    return None
