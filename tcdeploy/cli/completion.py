"""Completes option values in the shell: choices, recipes and models. Shells complete file names themselves.

typer's scripts offer the files of the current folder if a command suggests nothing. So an option that takes a file
suggests nothing, and MODEL and --recipe suggest names until one of them no longer matches.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tcdeploy.planning.recipe import recipe_names

EMBEDDED_MODEL = "builtin:tiny"


class Completion(NamedTuple):
    """The attributes that click reads from its own class, which typer moved between versions."""

    value: str
    type: str = "plain"
    help: str | None = None


def complete_values(parameter: Any, kind: Any) -> None:
    """Make a parameter of type `kind` complete its values, if they are known."""
    if parameter.name == "recipe":
        parameter.shell_complete = lambda ctx, incomplete: _matching(recipe_names(), incomplete)
    elif parameter.name == "model":
        parameter.shell_complete = lambda ctx, incomplete: _matching([EMBEDDED_MODEL], incomplete)
    elif choices := _choices(parameter, kind):
        parameter.shell_complete = lambda ctx, incomplete: _matching(choices, incomplete)
    elif kind is Path:
        parameter.shell_complete = lambda ctx, incomplete: []


def _choices(parameter: Any, kind: Any) -> list[str]:
    """The values of a Literal, or those that the metavar of a text option lists."""
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    metavar = parameter.metavar or ""
    return metavar.split("|") if "|" in metavar else []


def _matching(values: list[str], incomplete: str) -> list[Completion]:
    return [Completion(value) for value in values if value.startswith(incomplete)]
