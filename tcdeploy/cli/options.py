"""Command-line options for the fields of `Recipe`. Their names, defaults and help come from the dataclass.

`recipe_command` adds MODEL, --recipe and one option per field to a command, which receives the finished `Recipe` as
its first argument. `recipe_options_command` passes `RecipeOptions` instead, so that the command can supply defaults
of its own (those of a bundle's recipe); the command's arguments then come before MODEL.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, Literal

import typer

from tcdeploy.cli.interrupts import repeating_ignored_interrupts
from tcdeploy.errors import Interrupted
from tcdeploy.host.interpreter import check_interpreter
from tcdeploy.planning.recipe import ENVIRONMENT_PREFIX, Recipe, build_recipe, field_type

MODEL_HELP = "Hub id, local folder or builtin:tiny; optional if the recipe names a model"


@dataclass(frozen=True)
class RecipeOptions:
    """Values of the flags by field name (None: flag not present), and the name or path of the recipe."""

    flags: dict[str, Any]
    recipe: str | None

    def build(self, bundle_recipe: Mapping[str, Any] | None = None) -> Recipe:
        """Merge flags, environment, recipe file and `bundle_recipe`; the first has precedence. Raises UsageError."""
        check_interpreter()
        return build_recipe(self.flags, self.recipe, bundle_recipe=bundle_recipe)


def recipe_command(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first parameter, `recipe: Recipe`, by the options from which it is built."""

    def build(options: RecipeOptions, **kwargs: Any) -> None:
        if options.recipe is not None and "prompt" in kwargs and kwargs["prompt"] is None:
            kwargs["prompt"] = options.flags["model"]  # the recipe names the model, so the only argument is the prompt
            options = RecipeOptions({**options.flags, "model": None}, options.recipe)
        command(options.build(), **kwargs)

    return _with_recipe_options(command, build, model_first=True)


def recipe_options_command(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first parameter, `options: RecipeOptions`, by the options from which a recipe is built."""
    return _with_recipe_options(command, command, model_first=False)


def _with_recipe_options(
    command: Callable[..., None], call: Callable[..., None], model_first: bool
) -> Callable[..., None]:
    command_parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    recipe_options = [_recipe_option(), *_field_options()]

    @functools.wraps(command)
    def run(**kwargs: Any) -> None:
        recipe_name = kwargs.pop("recipe")
        flags = {item.name: kwargs.pop(item.name) for item in fields(Recipe)}
        try:
            with repeating_ignored_interrupts():
                call(RecipeOptions(flags, recipe_name), **kwargs)
        except KeyboardInterrupt:  # typer would exit without a message
            raise Interrupted("interrupted", "run the command again; finished programs are in the cache") from None

    model = [_model_argument()]
    ordered = [*model, *command_parameters] if model_first else [*command_parameters, *model]
    parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in (*ordered, *recipe_options)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    del run.__wrapped__  # typer would follow it to the original signature
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _model_argument() -> inspect.Parameter:
    annotation = Annotated[str | None, typer.Argument(help=MODEL_HELP, metavar="MODEL", show_default=False)]
    return inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _recipe_option() -> inspect.Parameter:
    annotation = Annotated[
        str | None,
        typer.Option(help="Recipe name (see `tcdeploy recipes`) or path of a YAML file", metavar="NAME"),
    ]
    return inspect.Parameter("recipe", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@functools.cache
def _field_options() -> tuple[inspect.Parameter, ...]:
    hints = typing.get_type_hints(Recipe)
    return tuple(_field_option(item, field_type(hints[item.name])) for item in fields(Recipe) if item.name != "model")


def _field_option(item: Field[Any], kind: Any) -> inspect.Parameter:
    """Choices and lists are parsed by the recipe, so that their errors read the same as in a YAML file."""
    flag = f"--{item.name.replace('_', '-')}"
    names = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    option = typer.Option(names, help=_help(item), metavar=_metavar(kind), show_default=False)
    parsed_type = kind if kind in (int, float, bool) else str
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[parsed_type | None, option]
    )


def _help(item: Field[Any]) -> str:
    default = "" if item.default in (None, MISSING, False) else f" [default: {item.default}]"
    return f"{item.metadata['help']}{default} [env: {ENVIRONMENT_PREFIX}{item.name.upper()}]"


def _metavar(kind: Any) -> str | None:
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    return {bool: None, int: "INTEGER", float: "FLOAT", str: "TEXT"}.get(kind, "LIST")
