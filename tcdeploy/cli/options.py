"""Makes the options of a command from dataclasses of options (planning/option.py).

`options_command` replaces each parameter of a command that is such a dataclass by one flag per field. The command
receives the finished object, whose class checks the values. For a `Recipe`, or `RecipeOptions`, it adds MODEL in the
place of the parameter, and --recipe and one flag per field after all others.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass
from typing import Annotated, Any, Literal, NamedTuple

import typer

from tcdeploy.cli.help_panels import ADVANCED
from tcdeploy.cli.interrupts import repeating_ignored_interrupts
from tcdeploy.errors import Interrupted, UsageError
from tcdeploy.planning.extras import check_interpreter
from tcdeploy.planning.option import Option, field_type, flag_name, options_of, variable_name
from tcdeploy.planning.recipe import Recipe, build_recipe

MODEL_HELP = "Hub id, local folder or builtin:tiny; optional if the recipe names a model"
INTERRUPT_HINT = "run the command again: finished buckets are reused"
METAVARS = {bool: None, int: "INTEGER", float: "FLOAT", str: "TEXT"}  # of a recipe's options
Values = dict[str, Any]  # of options, by the names of their parameters


@dataclass(frozen=True)
class RecipeOptions:
    """Values of the flags by field name (None: flag not present), and the name or path of the recipe."""

    flags: Values
    recipe: str | None = None

    def build(self, bundle_recipe: Mapping[str, Any] | None = None) -> Recipe:
        """Merge flags, environment, recipe file and `bundle_recipe`; the first has precedence. Raises UsageError."""
        from tcdeploy.server.settings import SERVER_VARIABLES

        check_interpreter()
        return build_recipe(self.flags, self.recipe, bundle_recipe=bundle_recipe, other_variables=SERVER_VARIABLES)


def options_command(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameters that are dataclasses of options by these options."""
    parameters: list[inspect.Parameter] = []
    recipe_parameters: tuple[inspect.Parameter, ...] = ()
    takers: dict[str, Callable[[Values], Any]] = {}
    for item in inspect.signature(command, eval_str=True).parameters.values():
        kind = item.annotation
        if kind is Recipe or kind is RecipeOptions:
            argument = typer.Argument(help=MODEL_HELP, metavar="MODEL", show_default=False)
            parameters.append(_parameter("model", None, str | None, argument))
            recipe_parameters = _recipe_parameters()
            takers[item.name] = _take_recipe_options
            if kind is Recipe:
                takers[item.name] = lambda values: _take_recipe_options(values).build()
        elif dataclasses.is_dataclass(kind):
            parameters += map(_setting_flag, _flags(item.annotation))
            takers[item.name] = functools.partial(_take_settings, kind)
        else:
            parameters.append(item.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    parameters += recipe_parameters

    def take_arguments(values: Values) -> dict[str, Any]:
        return {name: take(values) for name, take in takers.items()} | values

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        try:
            with repeating_ignored_interrupts():
                return command(**take_arguments(values))
        except KeyboardInterrupt:  # typer would exit without a message
            raise Interrupted("interrupted", INTERRUPT_HINT if recipe_parameters else "") from None

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    del run.__wrapped__  # typer would follow it to the original signature
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    run.take_arguments = take_arguments  # type: ignore[attr-defined]
    return run


def arguments_of(command: Any, values: Values) -> dict[str, Any]:
    """The arguments that a command with `options_command` gets for these values of its options."""
    return command.take_arguments(values)


def _take_recipe_options(values: Values) -> RecipeOptions:
    """Removes the values from `values`, as `_take_settings`."""
    flags = {flag.field.name: values.pop(flag.field.name) for flag in _flags(Recipe)}
    return RecipeOptions(flags, values.pop("recipe"))


def _take_settings(kind: Any, values: Values) -> Any:
    """An option that is not given and has no default is left to the class."""
    settings = {}
    for flag in _flags(kind):
        if (value := values.pop(flag.field.name)) is not None:
            settings[flag.field.name] = _field_value(flag, value)
    return kind(**settings)


def _field_value(flag: _Flag, value: Any) -> Any:
    choices, parse = flag.option.choices, flag.option.parse
    if isinstance(value, list | tuple):
        return tuple(value)
    if choices and value not in choices:
        text = f"{flag.name} is {value!r}; it must be {', '.join(choices[:-1])} or {choices[-1]}"
        raise UsageError(text, f"{flag.name} {choices[0]}")
    return value if parse is None else parse(value)


class _Flag(NamedTuple):
    """An option, with what follows from the name and the type of its field."""

    name: str
    variable: str
    field: Field[Any]
    type: Any  # without None
    option: Option  # with the choices and the metavar of a Literal


@functools.cache
def _flags(kind: Any) -> tuple[_Flag, ...]:
    hints, flags = typing.get_type_hints(kind), []
    for name, (item, option) in options_of(kind).items():
        of_type = field_type(hints[item.name])
        if typing.get_origin(of_type) is Literal:
            choices = typing.get_args(of_type)
            option = option._replace(choices=choices, metavar="|".join(choices))
        flags.append(_Flag(flag_name(name), variable_name(name), item, of_type, option))
    return tuple(flags)


def _setting_flag(flag: _Flag) -> inspect.Parameter:
    """Choices are checked by `_field_value`, so typer gets text."""
    given_type, default = flag.type, None if flag.field.default in ((), MISSING) else flag.field.default
    if flag.type == tuple[str, ...]:
        given_type = list[str]
    elif flag.option.choices or flag.option.parse:
        given_type, default = str, None if default is None else f"{default}"
    variable = flag.variable if flag.option.has_variable else None
    option = typer.Option(
        flag.name, help=flag.option.help, metavar=flag.option.metavar, envvar=variable,
        rich_help_panel=flag.option.panel,
    )  # fmt: skip
    given_type = given_type if default is not None else given_type | None
    return _parameter(flag.field.name, default, given_type, option, flag.option.is_advanced)


@functools.cache
def _recipe_parameters() -> tuple[inspect.Parameter, ...]:
    option = typer.Option(help="Recipe name (see `tcdeploy recipes`) or path of a YAML file", metavar="NAME")
    return _parameter("recipe", None, str | None, option), *map(_recipe_flag, _flags(Recipe)[1:])  # without the model


def _recipe_flag(flag: _Flag) -> inspect.Parameter:
    """Its default is None: a variable or a recipe file may set the field. `build_recipe` parses choices and lists."""
    default = flag.field.default
    default_note = "" if default in (None, MISSING, False) else f" [default: {default}]"
    option = typer.Option(
        f"{flag.name}/--no-{flag.name[2:]}" if flag.type is bool else flag.name,
        help=f"{flag.option.help}{default_note} [env: {flag.variable}]",
        metavar=flag.option.metavar or METAVARS.get(flag.type, "LIST"), rich_help_panel=flag.option.panel,
    )  # fmt: skip
    given_type = flag.type if flag.type in (int, float, bool) else str
    return _parameter(flag.field.name, None, given_type | None, option, flag.option.is_advanced)


def _parameter(name: str, default: Any, given_type: Any, info: Any, is_advanced: bool = False) -> inspect.Parameter:
    annotation = Annotated[given_type, info, *((ADVANCED,) if is_advanced else ())]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
