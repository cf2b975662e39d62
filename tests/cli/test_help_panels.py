"""Help in panels, of at most two screens; --help-all shows the rest. --version, and completion in the shell."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tcdeploy import __version__
from tcdeploy.cli import app as cli
from tcdeploy.cli.help_panels import PANEL_OF, PANELS
from tcdeploy.cli.version import version_lines
from tcdeploy.planning.recipe import recipe_names
from tests.cli.test_cli_usage import run

TWO_SCREENS = 2 * 40  # lines


def leaves(command: Any, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    children = getattr(command, "commands", None)
    if children is None:
        return {words: command}
    return {path: leaf for child in children for path, leaf in leaves(children[child], (*words, child)).items()}


LEAVES = leaves(get_command(cli.app))


def test_every_option_has_a_panel_and_every_name_an_option() -> None:
    """Options that are derived from fields have their panels with them; the table has the others."""
    items = [item for command in LEAVES.values() for item in command.params if not getattr(item, "hidden", False)]
    options = [item for item in items if item.param_type_name == "option"]
    with_own_panel = [item for item in options if item.rich_help_panel]
    assert {item.rich_help_panel for item in with_own_panel} <= PANELS.keys()
    others = {item.name for item in items if item not in with_own_panel}
    assert {item.name for item in options if not item.rich_help_panel} - PANEL_OF.keys() == set()
    assert PANEL_OF.keys() - others == {"help"}, "get_params adds --help"
    assert len(PANEL_OF) == sum(map(len, PANELS.values())), "a name is in one panel"


def test_an_option_is_in_the_same_panel_in_all_commands() -> None:
    panels: dict[str, set[str]] = {}
    for command in LEAVES.values():
        for item in command.params:
            if item.param_type_name == "option" and not item.hidden:
                panels.setdefault(item.name, set()).add(item.rich_help_panel or PANEL_OF[item.name])
    assert [name for name, found in panels.items() if len(found) > 1] == ["seed"], "of sampling, or of measurements"


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_the_help_of_each_command_has_at_most_two_screens(words: tuple[str, ...]) -> None:
    completed = run(*words, "--help")
    lines = completed.stdout.splitlines()
    assert (completed.returncode, completed.stderr) == (0, "")
    assert len(lines) <= TWO_SCREENS and max(map(len, lines)) <= 100
    options = {
        flag
        for item in LEAVES[words].params
        if item.param_type_name == "option" and not item.hidden
        for flag in item.opts
        if flag.startswith("--")
    }
    assert listed(run(*words, "--help-all").stdout) >= options
    num_hidden = len(options - listed(completed.stdout))
    assert re.findall(r"--help-all shows (\d+) more", completed.stdout) == ([str(num_hidden)] if num_hidden else [])


def listed(help_text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", help_text, re.M))


def test_options_are_in_panels_in_the_same_order_for_all_commands() -> None:
    titles = re.findall(r"^(\w+):$", run("serve", "--help").stdout, re.M)
    assert titles == ["Arguments", "Model", "Plan", "Server", "Cache", "Signatures", "Output"]
    server = run("serve", "--help").stdout.partition("Server:")[2].partition("Cache:")[0]
    assert "--port" in server and "--cache-dir" not in server and "--canary-interval" not in server
    assert "--canary-interval" in run("serve", "--help-all").stdout.partition("Server:")[2]
    assert "Text:" in run("generate", "--help").stdout and "--seed" in run("generate", "--help").stdout


def test_help_is_as_wide_as_the_terminal() -> None:
    widths = [max(map(len, run("serve", "--help", COLUMNS=str(columns)).stdout.splitlines())) for columns in (90, 160)]
    assert widths[0] <= 90 < 140 < widths[1] <= 160


def test_help_all_works_without_required_values() -> None:
    completed = run("cache", "pack", "--help-all")
    assert completed.returncode == 0 and "--out" in completed.stdout


def test_the_version_has_a_line_per_component() -> None:
    lines = run("--version").stdout.splitlines()
    assert lines[0] == f"tcdeploy {__version__}" and [line.split()[0] for line in lines] == [
        "tcdeploy", "python", "torch", "triton", "transformers", "gpu"
    ]  # fmt: skip
    assert lines[2] == f"torch {importlib.metadata.version('torch')}"


def test_the_version_reads_gpus_from_the_files_of_the_driver(tmp_path: Path) -> None:
    assert version_lines(tmp_path)[-1] == "gpu none"
    for number in range(2):
        folder = tmp_path / "gpus" / f"0000:{number}b:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n")
    assert version_lines(tmp_path)[-1] == "gpu 2 x NVIDIA H100 80GB HBM3"
    driver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (x@y)"
    (tmp_path / "version").write_text(f"{driver}\nGCC version:  gcc 13\n")
    assert version_lines(tmp_path)[-1] == "gpu 2 x NVIDIA H100 80GB HBM3, driver 570.124.06"


def complete(shell: str, *words: str) -> list[str]:
    """What the shell's completion function receives for the last of these words."""
    line = " ".join(("tcdeploy", *words))
    bash = {"COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    other = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environ = {"_TCDEPLOY_COMPLETE": f"complete_{shell}", **(bash if shell == "bash" else other)}
    completed = run(**environ)
    assert (completed.returncode, completed.stderr) == (0, "")
    if shell == "zsh":  # "value", with escaped colons
        return re.findall(r'"([^"]+)"', completed.stdout.replace(r"\\:", ":"))
    return completed.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_choices_and_names(shell: str) -> None:
    assert complete(shell, "warm", "--mode", "re") == ["reduce-overhead"]
    assert complete(shell, "serve", "--device", "c") == ["cpu", "cuda"]
    assert complete(shell, "bench", "decode", "--baseline", "e") == ["eager"]
    assert complete(shell, "bench", "startup", "--from", "c") == ["cold", "cache"]
    assert complete(shell, "warm", "--recipe", "q") == [name for name in recipe_names() if name.startswith("q")]
    assert complete(shell, "compile", "bui") == ["builtin:tiny"]


def test_the_shell_completes_commands_and_options() -> None:
    assert complete("bash", "w") == ["warm"]
    assert complete("bash", "cache", "p") == ["pack", "push", "pull"]
    assert complete("bash", "serve", "--dev") == ["--device"]


def test_files_are_left_to_the_shell(tmp_path: Path) -> None:
    """bash and fish offer files if a command suggests nothing, and zsh if it is sent `_files`."""
    recipe = str(tmp_path / "mine")
    Path(f"{recipe}.yaml").write_text("model: builtin:tiny\n")
    for words in (("warm", "--recipe", recipe), ("cache", "verify", recipe), ("warm", recipe)):
        assert complete("bash", *words) == complete("fish", *words) == []
    environ = {"_TCDEPLOY_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": f"tcdeploy cache verify {recipe}"}
    assert run(**environ).stdout == "_files\n"


def test_the_script_for_each_shell_calls_this_command() -> None:
    for shell in ("bash", "zsh", "fish"):
        script = run(_TCDEPLOY_COMPLETE=f"source_{shell}").stdout
        assert f"_TCDEPLOY_COMPLETE=complete_{shell}" in script
    assert os.environ.get("_TCDEPLOY_COMPLETE") is None
