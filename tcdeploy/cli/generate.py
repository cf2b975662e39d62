"""`tcdeploy generate`: stream one completion from the warmed programs. Nothing compiles after warm-up."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import typer

from tcdeploy.cli.options import recipe_command
from tcdeploy.errors import UsageError
from tcdeploy.gc_policy import freeze_gc_after_startup
from tcdeploy.models.chat_template import start_renderer
from tcdeploy.planning.recipe import Recipe


@recipe_command
def generate(
    recipe: Recipe,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from stdin", metavar="PROMPT", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens whose probabilities add up to this")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Random seed for sampling")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to PROMPT")] = False,
) -> None:
    """Generate a continuation of PROMPT with MODEL."""
    from tcdeploy.cli import display
    from tcdeploy.engine.sequence import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if prompt is None:
        raise UsageError("no prompt was given", 'tcdeploy generate MODEL "Once upon a time"')
    if prompt == "-" and sys.stdin is None:
        raise UsageError("the prompt is read from stdin, which is closed", 'tcdeploy generate MODEL "Once upon a time"')
    text = sys.stdin.read() if prompt == "-" else prompt
    if chat:
        start_renderer()
    with display.show_progress() as progress:
        from tcdeploy import pipeline

        deployment = pipeline.prepare(recipe, progress)
    freeze_gc_after_startup()
    from tcdeploy.engine.detokenizer import IncrementalDetokenizer, chat_prompt, stop_token_ids

    tokenizer = deployment.tokenizer
    if chat and not tokenizer.chat_template:
        raise UsageError(f"{recipe.model} has no chat template", "remove --chat")
    stop_ids = stop_token_ids(deployment.engine.runner.model.generation_config)
    params = dataclasses.replace(params, stop_token_ids=stop_ids)
    token_ids = chat_prompt(tokenizer, text) if chat else tokenizer(text).input_ids
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token in deployment.engine.stream([token_ids], params):
        print(detokenizer.push(token.token_id), end="", flush=True)
    print(detokenizer.finish())
