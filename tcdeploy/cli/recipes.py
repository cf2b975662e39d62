"""`tcdeploy recipes`: list the recipes that ship with the package."""

from __future__ import annotations

import sys

from tcdeploy.cli.report_options import Json
from tcdeploy.planning.recipe import find_recipe, read_recipe, recipe_names


def recipes(json: Json = False) -> None:
    """List the recipes that --recipe accepts by name, with the model of each."""
    from tcdeploy.cli import display

    paths = {name: find_recipe(name) for name in recipe_names()}
    models = {name: str(read_recipe(path).get("model", "")) for name, path in paths.items()}
    if json:
        entries = [{"name": name, "model": models[name], "path": str(path)} for name, path in paths.items()]
        print(display.json_document("recipes", recipes=entries))
    elif sys.stdout.isatty():
        from tcdeploy.cli.tables import Column, Table

        columns = (Column("recipe", "name"), Column("model", "name"))
        display.show_table(Table(columns, list(models.items())))
    else:  # without a header: one recipe per line, for scripts
        for name, model in models.items():
            print(f"{name:<{max(map(len, models))}}  {model}")
