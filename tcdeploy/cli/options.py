"""The recipe's fields as command-line options: names, defaults and help come from the dataclass, so they stand once.

A command decorated with `recipe_command` takes a finished `Recipe` as its first argument; MODEL, --recipe and one
option per field are added to its signature here. One decorated with `recipe_options_command` takes what was `RecipeOptions`, so that it
can put something else below it (the recipe of a bundle), and its own arguments stand before MODEL.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, Literal

import typer

from tcdeploy.errors import Interrupted
from tcdeploy.planning.recipe import ENVIRONMENT_PREFIX, Recipe, build_recipe, field_type


@dataclass(frozen=True)
class RecipeOptions:
    """The flags that were given, by field, and the recipe's name."""

    flags: dict[str, Any]
    recipe: str | None

    def build(self, defaults: Mapping[str, Any] | None = None) -> Recipe:
        """The recipe, with `defaults` standing for what nothing else gives. Raises RecipeError."""
        return build_recipe(self.flags, self.recipe, defaults=defaults)


def recipe_command(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first parameter, `recipe: Recipe`, by the options that a recipe is built from."""

    def build(options: RecipeOptions, **kwargs: Any) -> None:
        if options.recipe is not None and "prompt" in kwargs and kwargs["prompt"] is None:
            kwargs["prompt"] = options.flags["model"]  # the recipe named the model: one argument is left
            options = RecipeOptions({**options.flags, "model": None}, options.recipe)
        command(options.build(), **kwargs)

    return _with_recipe_options(command, build, model_first=True)


def recipe_options_command(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first parameter, `options: RecipeOptions`, by the options that a recipe is built from."""
    return _with_recipe_options(command, command, model_first=False)


def _with_recipe_options(
    command: Callable[..., None], call: Callable[..., None], model_first: bool
) -> Callable[..., None]:
    command_parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    added = [_recipe_option(), *(_option(item) for item in fields(Recipe) if item.name != "model")]

    @functools.wraps(command)
    def run(**kwargs: Any) -> None:
        name = kwargs.pop("recipe")
        flags = {item.name: kwargs.pop(item.name) for item in fields(Recipe)}
        try:
            call(RecipeOptions(flags, name), **kwargs)
        except KeyboardInterrupt:  # typer would turn it into an exit without a word
            raise Interrupted("interrupted", "run it again: what was compiled is in the cache") from None

    model = [_model_argument()]
    ordered = [*model, *command_parameters, *added] if model_first else [*command_parameters, *model, *added]
    keyword_only = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in ordered]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    del run.__wrapped__  # typer would look through it at the original signature
    run.__annotations__ = {item.name: item.annotation for item in keyword_only}
    return run


def _model_argument() -> inspect.Parameter:
    annotation = Annotated[str | None, typer.Argument(help="Hub id, local folder, or builtin:tiny", show_default=False)]
    return inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _recipe_option() -> inspect.Parameter:
    annotation = Annotated[str | None, typer.Option(help="Recipe by name or path; `tcdeploy recipes` lists them")]
    return inspect.Parameter("recipe", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(item: Field[Any]) -> inspect.Parameter:
    kind = field_type(typing.get_type_hints(Recipe)[item.name])
    names = [f"--{item.name.replace('_', '-')}"]
    if kind is bool:
        names = [f"{names[0]}/--no-{names[0][2:]}"]
    option = typer.Option(*names, help=_help(item), metavar=_metavar(kind), show_default=False)
    plain = kind if kind in (int, float, bool) else str
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, option]
    )


def _help(item: Field[Any]) -> str:
    default = "" if item.default in (None, MISSING, False) else f" [default: {item.default}]"
    return f"{item.metadata['help']}{default} [env: {ENVIRONMENT_PREFIX}{item.name.upper()}]"


def _metavar(kind: Any) -> str | None:
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    return {bool: None, int: "INTEGER", float: "FLOAT", str: "TEXT"}.get(kind, "LIST")
