"""`tcdeploy quantize`: save a quantised copy of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcdeploy.cli.report_options import Json
from tcdeploy.planning.quantize_request import CHOICES, parse_quantize
from tcdeploy.planning.recipe import Recipe


def quantize(
    model: Annotated[str, typer.Argument(help="Hub id, local folder or builtin:tiny", metavar="MODEL")],
    out: Annotated[Path, typer.Argument(help="New folder", metavar="OUT")],
    to: Annotated[
        str,
        typer.Option(help="Numbers of the weights; int4 has groups of 128 columns, int4:GROUP others", metavar=CHOICES),
    ],
    skip: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers to leave as they are, beside routers of experts, the head, and others outside of the "
            "decoder layers: a name, a path, a wildcard or re:EXPRESSION; may be repeated",
            metavar="NAME",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model", metavar="TEXT")] = None,
    json: Json = False,
) -> None:
    """Save a copy of MODEL whose linear layers and experts are quantised, in the format of compressed-tensors.

    Weights are rounded to nearest, without calibration. tcdeploy, transformers and vLLM load the new folder (vLLM: int4
    with groups of 32, 64 or 128 columns). Serving it gives the tokens of MODEL with --quantize.
    """
    from tcdeploy.cli import display

    parse_quantize(to, "--to")
    with display.show_progress() as progress:
        from tcdeploy.start.quantize import save_quantised

        recipe = Recipe(model=model, revision=revision, quantize=to, quantize_skip=tuple(skip or ()) or None)
        saved = save_quantised(recipe, out, progress)
    dense = "".join(f"; {decision.value} stay dense: {decision.reason}" for decision in saved.dense)
    rate = saved.read_bytes / saved.seconds / 1e9
    text = (
        f"{saved.path}: {saved.quantised} linear layers in {saved.format}{dense}\n"
        f"weights: {saved.read_bytes / 1e9:.2f} GB read and {saved.written_bytes / 1e9:.2f} GB written in "
        f"{saved.seconds:.2f} s ({rate:.1f} GB/s)\n"
        f"next: tcdeploy serve {saved.path}"
    )
    display.report("quantize", json, text, saved=saved)
