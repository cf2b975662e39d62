"""A command imports its own module only, and converts its values as typer does, but without pydantic."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.core import TyperCommand
from typer.main import get_command
from typer.testing import CliRunner

from tcdeploy.cli import app as cli
from tcdeploy.cli.commands import Command, LazyGroup
from tests.conftest import ROOT

REPORT_MODULES = """
import json, sys
from tcdeploy.cli import app as cli
sys.argv = ["tcdeploy", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as exit_:
    modules = [name for name in sys.modules if name.startswith("tcdeploy.cli.") or name in ("pydantic", "rich")]
    print(json.dumps([exit_.code, modules]), file=sys.stderr)
"""
COMMAND_MODULES = {
    f"tcdeploy.cli.{name}"
    for name in ("bench", "cache_bundle", "cache_inspect", "compile", "deploy", "doctor",
                 "explain", "generate", "quantize", "recipes", "serve", "warm")
}  # fmt: skip


def modules_after(*arguments: str) -> tuple[int, set[str]]:
    """(exit code, those of the modules of commands, pydantic and rich that were imported)."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT_MODULES, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    return code, {name for name in modules if name in COMMAND_MODULES or not name.startswith("tcdeploy")}


@pytest.mark.parametrize(
    ("arguments", "code", "imported"),
    [
        (("--version",), 0, set()),
        (("recipes",), 0, {"recipes"}),
        (("serve", "builtin:tiny", "--port", "0", "--memory-fraction", "0.5", "--canary-interval", "-1"), 2, {"serve"}),
        (("generate", "builtin:tiny", "x", "--top-p", "7", "--programs", "aot", "--context", "64"), 2, {"generate"}),
        (("bench", "startup", "builtin:tiny", "--from", "cache", "--warm-runs", "0"), 2, {"bench"}),
        (("bench", "serve", "--requests", "0"), 2, {"bench"}),
    ],
)
def test_a_command_imports_no_other_command_nor_pydantic_nor_rich(
    arguments: tuple[str, ...], code: int, imported: set[str]
) -> None:
    assert modules_after(*arguments) == (code, {f"tcdeploy.cli.{name}" for name in imported})


def test_every_command_of_a_group_can_be_loaded_under_its_name() -> None:
    group: Any = get_command(cli.app)
    assert list(group.commands) == [
        "compile", "warm", "generate", "serve", "deploy", "explain", "doctor", "quantize", "recipes", "bench", "cache"
    ]  # fmt: skip
    names = [(name, command.name) for name, command in group.commands.items()]
    for subgroup in ("bench", "cache"):
        names += [(name, command.name) for name, command in group.commands[subgroup].commands.items()]
    assert len(names) == 11 + 6 + 14 and all(name == own for name, own in names)


def test_a_group_lists_and_suggests_commands_without_loading_them() -> None:
    class Missing(LazyGroup):
        sources = {"decode": "tcdeploy.missing:decode"}

    app = typer.Typer(cls=Missing, add_completion=False)
    app.callback()(lambda: None)
    app.command("other")(lambda: None)
    group: Any = get_command(app)
    assert group.list_commands(None) == ["decode", "other"] and len(group.commands) == 2
    result = CliRunner().invoke(app, ["decoed"])
    assert result.exit_code == 2 and "Did you mean 'decode'?" in result.output
    with pytest.raises(ModuleNotFoundError):
        group.commands["decode"]


def convert(
    path: Annotated[Path | None, typer.Argument()],
    text: str,
    count: int = 3,
    fraction: float = 0.5,
    kind: Annotated[Literal["cold", "warm"], typer.Option()] = "cold",
    names: Annotated[list[str] | None, typer.Option()] = None,
    limit: int | None = None,
    switch: bool = False,
    secret: Annotated[str | None, typer.Option(envvar="SECRET")] = None,
) -> None:
    print([path, text, count, fraction, kind, names, limit, switch, secret])


def outcome(cls: type[TyperCommand], function: Callable[..., None], arguments: tuple[str, ...]) -> tuple[int, str]:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=cls)(function)
    result = CliRunner().invoke(app, list(arguments), env={"SECRET": "7", "COLUMNS": "100"})
    return result.exit_code, result.output


def entries(help_text: str) -> set[str]:
    """Arguments and options with their descriptions, each as one line."""
    paragraphs = re.split(r"\n  (?=\S)", re.sub(r"\n\n\w+:(?=\n)", "", help_text))
    return {" ".join(text.split()) for text in paragraphs[1:]}


def test_the_help_has_the_entries_of_typer_and_help_all() -> None:
    (code, ours), (_, expected) = (outcome(cls, convert, ("--help",)) for cls in (Command, TyperCommand))
    assert code == 0 and any(re.match(r"--count .*default: 3", entry) for entry in entries(expected))
    assert entries(ours) == entries(expected) | {"--help-all Show all options and their variables"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((".", "x"), 0),
        ((".",), 2),
        ((), 2),
        ((".", "x", "--count", "7", "--fraction", "2", "--kind", "warm", "--limit", "-1", "--switch"), 0),
        ((".", "x", "--count", "1.0", "--fraction", "1e-3", "--limit", " 4 "), 0),
        ((".", "x", "--names", "a", "--names", "b", "--no-switch"), 0),
        ((".", "x", "--fraction", "nan"), 0),
        ((".", "x", "--count", "1.5"), 2),
        ((".", "x", "--count", "many"), 2),
        ((".", "x", "--count", "٣"), 2),
        ((".", "x", "--limit", ""), 2),
        ((".", "x", "--fraction", "half"), 2),
        ((".", "x", "--kind", "Cold"), 2),
        ((".", "x", "--count", "123456789012345678901234567890"), 0),
    ],
)
def test_values_and_errors_are_those_of_typer(arguments: tuple[str, ...], code: int) -> None:
    assert outcome(Command, convert, arguments) == outcome(TyperCommand, convert, arguments)
    assert outcome(Command, convert, arguments)[0] == code
