"""The recipe's fields as command-line options: names, defaults and help come from the dataclass, so they stand once.

A command decorated with `recipe_command` takes a finished `Recipe` as its first argument; MODEL, --recipe and one
option per field are added to its signature here.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal

import typer

from tcdeploy.errors import Interrupted
from tcdeploy.recipe import ENVIRONMENT_PREFIX, Recipe, build_recipe, field_kind


def recipe_command(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first parameter, `recipe: Recipe`, by the options that a recipe is built from."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    added = [_model_argument(), _recipe_option(), *(_option(item) for item in fields(Recipe) if item.name != "model")]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        name = given.pop("recipe")
        flags = {item.name: given.pop(item.name) for item in fields(Recipe)}
        if name is not None and "prompt" in given and given["prompt"] is None:
            given["prompt"], flags["model"] = flags["model"], None  # the recipe named the model: one argument is left
        try:
            command(build_recipe(flags, name), **given)
        except KeyboardInterrupt:  # typer would turn it into an exit without a word
            raise Interrupted("interrupted", "run it again: what was compiled is in the cache") from None

    keyword_only = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in [*added[:1], *own, *added[1:]]]
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
    kind = field_kind(typing.get_type_hints(Recipe)[item.name])
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
