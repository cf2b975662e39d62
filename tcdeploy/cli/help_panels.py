"""The help of a command: its options in panels, the less common ones only with --help-all.

typer's own panels need rich, whose import would double the time of `--help`; these are sections of plain text. Options
that are derived from fields (options.py) name their panels. Those of others follow from the parameter's name, so that
all commands show the same option in the same panel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from typing import Annotated, Any

import typer
from typer.main import get_command

PANELS = {
    "Model": ("model", "recipe", "revision", "to", "skip"),
    "Plan": ("missed_shapes", "target_gpu", "winners"),
    "Text": ("chat",),
    "Server": ("port",),
    "Ray": ("ray", "address", "timeout"),
    "Measurement": ("trace", "measure", "kernels"),
    "Cache": (
        "cache_dir", "cache_from", "cache_to", "require_hit", "trust_cache_dir", "older_than", "max_size", "unlisted",
        "any_environment", "plan", "run",
    ),
    "Signatures": ("key", "require_signed", "allow_unsigned", "allow_rollback", "trusted_keys"),
    "Output": ("out", "dry_run", "offline", "report", "describe_gpu", "budget", "json", "help", "help_all"),
}  # fmt: skip
OTHER = "Options"
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
ADVANCED = "advanced"  # in the annotation of a parameter: shown by --help-all only
# Of the options of a recipe (options.py), and those that typer writes, alone or before the default.
ENVIRONMENT_NOTE = re.compile(r" +\[env(?: var)?: TCDEPLOY_\w+\]|(?<=\[)env var: TCDEPLOY_\w+; ")
MIN_ADVANCED = 6  # of a command with fewer, all options are shown
ALL_KEY = "tcdeploy.help_all"  # in the context's meta


def help_all_option() -> Any:
    """The parameter --help-all. typer builds it from a function; the class for it differs between typer's versions."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(_help_all)
    (parameter,) = get_command(app).params
    parameter.expose_value = False
    parameter.is_eager = True

    def process_value(ctx: Any, value: Any) -> bool:
        if value and not ctx.resilient_parsing:
            ctx.meta[ALL_KEY] = True
            print(ctx.get_help())
            ctx.exit()
        return False

    parameter.process_value = process_value  # type: ignore[method-assign]
    return parameter


def _help_all(
    help_all: Annotated[bool, typer.Option("--help-all", help="Show all options and their variables")] = False,
) -> None:
    """Only its parameter is used."""


def write_panels(parameters: Iterable[Any], advanced: Set[str], ctx: Any, formatter: Any) -> None:
    """Write a section for the arguments and for each panel. Without --help-all, common options and a note."""
    hidden = set() if ctx.meta.get(ALL_KEY) or len(advanced) < MIN_ADVANCED else advanced
    sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *PANELS, OTHER)}
    for parameter in parameters:
        record = None if parameter.name in hidden else parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            sections["Arguments"].append(record)
        else:
            flags, text = record
            panel = getattr(parameter, "rich_help_panel", None) or PANEL_OF.get(parameter.name, OTHER)
            sections[panel].append((flags, ENVIRONMENT_NOTE.sub("", text) if hidden else text))
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)
    if hidden:
        formatter.write_paragraph()
        formatter.write_text(f"--help-all shows {len(hidden)} more options, and the environment variables of options.")
