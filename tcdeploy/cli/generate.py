"""`tcdeploy generate`: stream one completion from the warmed programs. Nothing compiles after warm-up."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcdeploy.cli.options import RecipeOptions, options_command
from tcdeploy.cli.process import read_text
from tcdeploy.cli.report_options import Budget, Json, enforce_budget, parse_budget
from tcdeploy.engine.schedule.sequence import DEFAULTS, SamplingParams
from tcdeploy.errors import UsageError
from tcdeploy.host.gc_policy import freeze_gc_after_startup
from tcdeploy.planning.option import option
from tcdeploy.text.chat_template import start_renderer

if TYPE_CHECKING:
    from tcdeploy.llm.outputs import AnswerPiece
    from tcdeploy.start.deployment import Deployment


def _text_option(help: str, param: str, **attributes: Any) -> Any:
    default = f"[default: the model's (see --generation-config), else {DEFAULTS[param]}]"
    return option(None, f"{help} {default}", "Text", **attributes)


@dataclass(frozen=True)
class SamplingFlags:
    """None: not given."""

    max_tokens: int | None = _text_option("Maximum number of tokens to generate", "max_tokens", name="max_new_tokens")
    temperature: float | None = _text_option("Sampling temperature; 0 is greedy", "temperature")
    top_k: int | None = _text_option("Sample from the k most likely tokens; 0: from all", "top_k")
    top_p: float | None = _text_option("Sample from the most likely tokens whose probabilities add up to this", "top_p")
    seed: int | None = option(None, "Random seed for sampling", "Text")


@options_command
def generate(
    options: RecipeOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from stdin", metavar="PROMPT", show_default=False)
    ] = None,
    *,
    sampling: SamplingFlags,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to PROMPT")] = False,
    budget: Budget = None,
    json: Json = False,
) -> None:
    """Generate a continuation of PROMPT with MODEL."""
    from tcdeploy.cli import display

    if options.recipe is not None and prompt is None:  # the recipe names the model, so the only argument is the prompt
        prompt = options.flags["model"]
        options = RecipeOptions({**options.flags, "model": None}, options.recipe)
    recipe = options.build()
    flags = {name: value for name, value in vars(sampling).items() if value is not None}
    budget_seconds = parse_budget(budget)
    SamplingParams(**flags)  # an invalid value is an error before the model is loaded
    if prompt is None:
        raise UsageError("no prompt was given", 'tcdeploy generate MODEL "Once upon a time"')
    if prompt == "-" and sys.stdin is None:
        raise UsageError("the prompt is read from stdin, which is closed", 'tcdeploy generate MODEL "Once upon a time"')
    text = read_text(sys.stdin) if prompt == "-" else prompt
    if chat:
        start_renderer()
    with display.show_progress() as progress:
        from tcdeploy.start.prepare import prepare

        deployment = prepare(recipe, progress, needs_tokenizer=True)
    enforce_budget(deployment.stage_seconds, budget_seconds)
    freeze_gc_after_startup()
    _stream(deployment, text, flags, chat, json)


def _stream(deployment: Deployment, text: str, flags: dict[str, Any], chat: bool, json: bool) -> None:
    """Print the completion while it is generated, or all of it as JSON."""
    from tcdeploy.cli import display
    from tcdeploy.llm.batch import run_batch
    from tcdeploy.llm.loaded_model import LoadedModel
    from tcdeploy.llm.outputs import TextOutput

    model = LoadedModel(deployment)
    prompt = model.encode_chat([{"role": "user", "content": text}], {}) if chat else model.encode(text)
    output = TextOutput(model.tokenizer, model.request(prompt, None, flags))

    def show(_: int, piece: AnswerPiece) -> None:
        if not json:
            print(piece.text, end="", flush=True)

    run_batch(deployment.engine, [output], show)
    answer = output.answer()
    if json:
        display.print_report(
            "generate", deployment, text=answer.text, finish_reason=answer.finish_reason,
            prompt_tokens=len(answer.prompt_token_ids), output_tokens=len(answer.token_ids), token_ids=answer.token_ids,
        )  # fmt: skip
    else:
        print()
