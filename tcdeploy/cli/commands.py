"""typer's classes of commands and groups: with less to import, values converted without pydantic, and help in panels.

Only the module of the called command is imported: importing all commands and building their parsers takes 0.25 s. The
help of a group still loads every command, because its summaries are the first lines of their docstrings.

typer 0.29 converts every value, defaults included, with pydantic. Importing it takes 0.07 s, and the adapters for the
45 options of `serve` take 0.04 s. Simple values are converted here. Others, among them all invalid ones, are left to
typer, which writes the error messages.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import sys
import typing
from collections import UserDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command, get_group

from tcdeploy.cli.foreign_errors import PARSER_ERROR
from tcdeploy.cli.help_panels import ADVANCED, help_all_option, write_panels
from tcdeploy.errors import UsageError
from tcdeploy.host.python_source import parse_source
from tcdeploy.planning.extras import WITHOUT_DOCSTRINGS
from tcdeploy.planning.option import OF_VLLM, REMOVED, RENAMED, field_type
from tcdeploy.planning.recipe import recipe_names

NUMBER_PATTERNS = {int: re.compile("-?[0-9]{1,18}"), float: re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")}


class _HelpWithoutConversion:
    """The default of a switch is False. typer's default of --help and --show-completion is None, which it converts."""

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.callback is not None and parameter.default is None:
                parameter.default = False
        return parameters


class Command(_HelpWithoutConversion, TyperCommand):
    """A command that converts each value by the annotation of its function's parameter."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        hints = typing.get_type_hints(attributes["callback"], include_extras=True)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument | TyperOption) and parameter.callback is None:
                hint = hints[str(parameter.name)]
                kind = field_type(hint.__origin__ if hasattr(hint, "__metadata__") else hint)
                _replace_conversion(parameter, kind)
                _complete_values(parameter, kind)
        self.params.append(help_all_option())
        self.advanced = {name for name, hint in hints.items() if ADVANCED in getattr(hint, "__metadata__", ())}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except PARSER_ERROR as error:
            flag = getattr(error, "option_name", None)
            if new := RENAMED.get(f"{flag}"):
                raise UsageError(f"{flag} is now {new}", f"use {new}") from None
            if instead := REMOVED.get(f"{flag}") or REMOVED.get(f"{ctx.info_name} {flag}"):
                raise UsageError(f"{flag} was removed", instead) from None
            if here := OF_VLLM.get(f"{flag}"):
                raise UsageError(f"{flag} is an option of vLLM", here) from None
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_panels(self.get_params(ctx), self.advanced, ctx, formatter)


def _replace_conversion(parameter: TyperArgument | TyperOption, kind: Any) -> None:
    convert_with_typer = parameter.process_value

    def process_value(ctx: Any, value: Any) -> Any:
        if value is None and not parameter.required:
            return None
        if type(value) is kind or (typing.get_origin(kind) is Literal and value in typing.get_args(kind)):
            return value
        if kind in NUMBER_PATTERNS and isinstance(value, str) and NUMBER_PATTERNS[kind].fullmatch(value):
            return kind(value)
        if kind == list[str] and isinstance(value, list | tuple) and all(type(item) is str for item in value):
            return list(value)
        return convert_with_typer(ctx, value)

    parameter.process_value = process_value  # type: ignore[method-assign]


class _Completion(NamedTuple):
    """The attributes that click reads from its own class, which typer moved between versions."""

    value: str
    type: str = "plain"
    help: str | None = None


def _complete_values(parameter: Any, kind: Any) -> None:
    """Make the shell complete choices, recipes and models.

    typer's scripts offer the files of the current folder if a command suggests nothing. So an option that takes a file
    suggests nothing, and MODEL and --recipe suggest names until one of them no longer matches.
    """
    metavar = parameter.metavar or ""
    if parameter.name in ("recipe", "model"):
        values = recipe_names() if parameter.name == "recipe" else ["builtin:tiny"]
    elif typing.get_origin(kind) is Literal:
        values = list(typing.get_args(kind))
    elif "|" in metavar:
        values = metavar.split("|")
    elif kind is Path:
        values = []
    else:
        return
    parameter.shell_complete = lambda ctx, incomplete: [
        _Completion(value) for value in values if value.startswith(incomplete)
    ]


class LazyGroup(_HelpWithoutConversion, TyperGroup):
    """Base class of command groups. A subclass sets `sources`, and is passed as `cls` to `typer.Typer`."""

    sources: ClassVar[Mapping[str, str]] = {}  # command: `module:name` of its function, or of the Typer of a group

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _LazyCommands({**self.sources, **self.commands})

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in order. typer's method would load the commands."""
        return list(self.commands)


class _LazyCommands(UserDict[str, Any]):
    """click's commands by name. The value of a command that is not loaded yet is its source."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(source := self.data[name], str):
            self.data[name] = _load(name, source)
        return self.data[name]


def _load(name: str, source: str) -> Any:
    module, _, attribute = source.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return get_group(target)
    restore_docstring(target)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=Command)(target)
    return get_command(app)


def restore_docstring(function: Callable[..., Any]) -> None:
    """Under `python -OO`, set the help text of a command to the docstring in the source of its module.

    The function is found by its name: `inspect.getsource(function)` would return a wrapper of options.py.
    """
    if sys.flags.optimize < WITHOUT_DOCSTRINGS:
        return
    with contextlib.suppress(OSError, SyntaxError):  # installed without sources
        for node in ast.walk(parse_source(inspect.getsource(sys.modules[function.__module__]))):
            if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
                function.__doc__ = ast.get_docstring(node)
