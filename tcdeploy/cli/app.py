"""The CLI entry point: names the commands, and turns errors into two lines on stderr and an exit code.

Does not import torch, so that `--help` returns at once. A command is imported when it is called, and imports what it
needs when it runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Annotated

import typer

from tcdeploy.cli.commands import LazyGroup, restore_docstring
from tcdeploy.cli.foreign_errors import PARSER_ERROR, parser_error, variable_error
from tcdeploy.cli.process import check_encoding, configure_process
from tcdeploy.errors import BrokenPipe, TcdeployError

PROGRAM = "tcdeploy"  # also after `python -m tcdeploy`; the shell's completion is set up for this name


class _Commands(LazyGroup):
    sources = {
        "compile": "tcdeploy.cli.compile:compile_model",
        "warm": "tcdeploy.cli.warm:warm",
        "generate": "tcdeploy.cli.generate:generate",
        "serve": "tcdeploy.cli.serve:serve",
        "deploy": "tcdeploy.cli.deploy:deploy",
        "explain": "tcdeploy.cli.explain:explain",
        "doctor": "tcdeploy.cli.doctor:doctor",
        "quantize": "tcdeploy.cli.quantize:quantize",
        "recipes": "tcdeploy.cli.recipes:recipes",
        "bench": "tcdeploy.cli.bench:app",
        "cache": f"{__name__}:cache",
    }


class _CacheCommands(LazyGroup):
    """Only those that start a model or plan one import torch: `pack`, `why` and `verify --run`."""

    sources = {
        "pack": "tcdeploy.cli.cache_bundle:pack",
        "unpack": "tcdeploy.cli.cache_bundle:unpack",
        "verify": "tcdeploy.cli.cache_bundle:verify",
        "why": "tcdeploy.cli.cache_inspect:why",
        "ls": "tcdeploy.cli.cache_inspect:list_cache",
        "du": "tcdeploy.cli.cache_inspect:disk_usage",
        "gc": "tcdeploy.cli.cache_inspect:collect_garbage",
        "diff": "tcdeploy.cli.cache_inspect:diff",
        "push": "tcdeploy.cli.remote_cache:push",
        "pull": "tcdeploy.cli.remote_cache:pull",
        "find": "tcdeploy.cli.remote_cache:find",
        "keygen": "tcdeploy.cli.cache_bundle:generate_key",
        "sign": "tcdeploy.cli.cache_bundle:sign",
        "trust": "tcdeploy.cli.cache_bundle:trust",
    }


cache = typer.Typer(
    cls=_CacheCommands,
    name="cache",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Pack, verify, list, clean up and share compile caches, and predict their hits.",
)
app = typer.Typer(
    cls=_Commands,
    name=PROGRAM,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": sys.maxsize},  # as wide as the terminal; click's default is 80 columns
)


def _print_version(value: bool) -> None:
    if value:
        from tcdeploy.cli.version import version_lines

        print("\n".join(version_lines()))
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of tcdeploy, Python, torch, Triton and transformers, and the GPU",
        ),
    ] = False,
) -> None:
    """Take a Hugging Face causal LM to a compiled, warmed deployment in plain PyTorch.

    Reports are written to stdout, progress and messages to stderr.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 no matching cache, 4 untrusted signature, 5 integrity
    error, 6 threshold not met, 7 out of space or memory, 8 network error, 130 interrupted, 141 broken pipe on stdout.
    """


def main() -> None:
    """Run the CLI, and exit the process."""
    configure_process()
    restore_docstring(root)
    try:
        check_encoding(sys.argv[1:], os.environ)
        sys.exit(_run())
    except TcdeployError as error:
        if not isinstance(error, BrokenPipe):
            if os.environ.get("TCDEPLOY_DEBUG"):
                traceback.print_exc()
            print(f"error: {error.message}", file=sys.stderr)
            if error.hint:
                print(f"hint: {error.hint}", file=sys.stderr)
        with contextlib.suppress(TcdeployError):  # a flush that fails at exit would print a traceback
            sys.stdout.flush()
        sys.exit(error.exit_code)


def _run() -> int:
    """Run the command and return its exit code. Errors of the parser and of variables are raised as TcdeployError."""
    try:
        status = app(prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # of a command without arguments
            error.show()
            return int(error.exit_code)
        raise parser_error(error) from error
    except Exception as error:
        if translated := variable_error(error, os.environ):
            raise translated from error
        raise
    return status if isinstance(status, int) else 0
