"""`tcdeploy recipes`: list the recipes that ship with the package."""

from __future__ import annotations

from tcdeploy.planning.recipe import find_recipe, read_recipe, recipe_names


def recipes() -> None:
    """List the recipes that --recipe accepts by name, with the model of each."""
    names = recipe_names()
    for name in names:
        print(f"{name:<{max(map(len, names))}}  {read_recipe(find_recipe(name)).get('model', '')}")
