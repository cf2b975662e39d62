"""Options: fields of dataclasses from which flags, environment variables, help texts and docs/reference.md are derived.

`Recipe`, the settings of the server and those of benchmarks declare their fields with `option`, and cli/options.py
makes flags of them. So a name, a default and a help text are written once. Does not import typer.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from dataclasses import Field
from typing import Any, NamedTuple

from tcdeploy.errors import UsageError

ENVIRONMENT_PREFIX = "TCDEPLOY_"
# Flags with new names. If the new one is of a recipe, its key and variable were renamed too.
RENAMED = {
    "--explain-breaks": "tcdeploy explain MODEL --no-measure",
    "--prefill-burst": "--max-consecutive-prefills",
    "--served-name": "--served-model-name",
}
# Flags without a successor, and what to do instead. A flag that other commands still have is preceded by its command.
REMOVED = {
    "--burstiness": "put the arrival times into a trace: --trace FILE",
    "--prefix-groups": "use --shared-prefix for a prefix that all prompts share",
    "--price-per-hour": "divide the price per hour by 3600 and by the tokens per second",
    "--think-time": "use a trace whose lines share a session: --trace FILE",
    "--turns": "use a trace whose lines share a session: --trace FILE",
    "serve --lengths": "use --length-spread, or put the lengths into a trace: --trace FILE",
}

# Flags of vLLM, and what to use here.
OF_VLLM = {
    "--gpu-memory-utilization": "use --memory-fraction",
    "--kv-cache-dtype": "use --kv-dtype",
    "--max-model-len": "use --context",
    "--max-num-batched-tokens": "use --buckets; the largest is the limit of a step",
    "--max-num-seqs": "use --batch-sizes; the largest is the limit",
    "--pipeline-parallel-size": "a model runs on one GPU",
    "--quantization": "omit it for a quantised checkpoint; use --quantize to quantise one while it is loaded",
    "--tensor-parallel-size": "a model runs on one GPU",
}


class Option(NamedTuple):
    """What the type and the default of a field do not say."""

    help: str
    panel: str  # section of the help
    is_advanced: bool = False  # whether only --help-all shows it
    name: str = ""  # of the flag and of the variable, if not that of the field
    metavar: str | None = None  # placeholder of the value in the help
    choices: tuple[str, ...] = ()  # allowed texts; those of a Literal follow from its type
    parse: Callable[[str], Any] | None = None  # the field's value from text; raises UsageError. Recipes keep the text
    has_variable: bool = False  # whether an environment variable sets it
    minimum: float | None = None  # of a number; `check_ranges` checks it
    maximum: float = math.inf
    unit: str = ""  # of the number
    valid: str = ""  # an example of a value, and what it does; by default the default


def option(default: Any, help: str, panel: str, **attributes: Any) -> Any:
    """A field of a dataclass that is an option. `attributes`: further ones of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, panel, **attributes)})


def options_of(kind: Any) -> dict[str, tuple[Field[Any], Option]]:
    """The options of a dataclass by the names of their flags: its own, then the inherited ones."""
    bases = [base for base in kind.__bases__ if dataclasses.is_dataclass(base)]
    inherited = {item.name for base in bases for item in dataclasses.fields(base)}
    ordered = sorted(dataclasses.fields(kind), key=lambda item: item.name in inherited)
    found = [(item, item.metadata["option"]) for item in ordered if "option" in item.metadata]
    return {form.name or item.name: (item, form) for item, form in found}


def check_ranges(settings: Any) -> None:
    """Raises UsageError for a number outside the range of its option. NaN is outside of every range."""
    for name, (item, form) in options_of(type(settings)).items():
        value, flag = getattr(settings, item.name), flag_name(name)
        if form.minimum is not None and not form.minimum <= value <= form.maximum:
            limits = f"{form.minimum} or more" if form.maximum == math.inf else f"{form.minimum} to {form.maximum}"
            problem = f"{flag} is {value}; it must be {limits}{form.unit and f' {form.unit}'}"
            raise UsageError(problem, f"{flag} {form.valid or item.default}")


def variables_of(kind: Any) -> dict[str, str]:
    """The environment variables of a dataclass of options, each with the flag that it replaces."""
    return {variable_name(name): flag_name(name) for name, (_, form) in options_of(kind).items() if form.has_variable}


def variable_name(name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


def flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def field_type(hint: Any) -> Any:
    """The type of a field without None: `int` for `int | None`."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    return next(member for member in typing.get_args(hint) if member is not type(None))
