"""A group whose commands are imported, and whose parsers are built, when they are looked up.

Only the module of the called command is imported: importing all commands and building their parsers takes 0.25 s. The
help of a group still loads every command, because its summaries are the first lines of their docstrings.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from tcdeploy.cli.docstrings import restore_docstring
from tcdeploy.cli.option_values import Command, HelpWithoutConversion
from tcdeploy.planning.extras import WITHOUT_DOCSTRINGS


class LazyGroup(HelpWithoutConversion, TyperGroup):
    """Base class of command groups. A subclass sets `sources`, and is passed as `cls` to `typer.Typer`."""

    sources: ClassVar[Mapping[str, str]] = {}  # command: `module:name` of its function, or of the Typer of a group

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _LazyCommands(self.sources, self.commands)

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in order. typer's method would load the commands."""
        return list(self.commands)


class _LazyCommands(MutableMapping[str, Any]):
    """click's commands by name: those of `sources`, which are loaded on access, then `loaded`."""

    def __init__(self, sources: Mapping[str, str], loaded: Mapping[str, Any]) -> None:
        self._sources, self._loaded = dict(sources), dict(loaded)

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(name, self._sources[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources | self._loaded)

    def __len__(self) -> int:
        return len(self._sources | self._loaded)

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        self._sources.pop(name, None)
        del self._loaded[name]


def _load(name: str, source: str) -> Any:
    module, _, attribute = source.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return get_group(target)
    if sys.flags.optimize >= WITHOUT_DOCSTRINGS:
        restore_docstring(target)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=Command)(target)
    return get_command(app)
