"""`tcdeploy generate`: stream text through the warmed programs, with compiling switched off."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import typer

from tcdeploy.cli.options import recipe_command
from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import Recipe


@recipe_command
def generate(
    recipe: Recipe,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - reads stdin", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens of this total probability")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template")] = False,
) -> None:
    """Continue PROMPT with MODEL."""
    from tcdeploy.cli import display
    from tcdeploy.engine.sequence import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if prompt is None:
        raise UsageError("no prompt was given", 'tcdeploy generate MODEL "Once upon a time"')
    text = sys.stdin.read() if prompt == "-" else prompt
    with display.show_progress() as progress:
        from tcdeploy import pipeline

        deployment = pipeline.prepare(recipe, progress)
    from tcdeploy.engine.detokenizer import IncrementalDetokenizer, chat_prompt, stop_token_ids

    tokenizer = deployment.tokenizer
    if chat and not tokenizer.chat_template:
        raise UsageError(f"{recipe.model} has no chat template", "leave --chat out")
    stops = stop_token_ids(deployment.engine.runner.model.generation_config)
    params = dataclasses.replace(params, stop_token_ids=stops)
    ids = chat_prompt(tokenizer, text) if chat else tokenizer(text).input_ids
    stream = IncrementalDetokenizer(tokenizer)
    for token in deployment.engine.stream([ids], params):
        print(stream.push(token.token_id), end="", flush=True)
    print(stream.finish())
