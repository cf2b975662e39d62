"""`tcdeploy bench`: figures beside their floors. A table on stderr, one JSON document on stdout, a picture if asked.

Data on stdout is always JSON here, so there is no --json. Each command turns its options into settings, which refuse
what cannot be measured before torch is imported.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from tcdeploy.bench.settings import (
    BASELINES,
    DecodeSettings,
    PrefillSettings,
    ServeSettings,
    StartupSettings,
    ThroughputSettings,
)
from tcdeploy.cli.options import recipe_command
from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:
    from tcdeploy.bench.report import Report

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure MODEL on this machine, beside its floor.")

Baseline = Annotated[
    list[str] | None,
    typer.Option(metavar="|".join(BASELINES), help="Measure this as well, after us; may be given more than once"),
]
Plot = Annotated[str | None, typer.Option(help="Draw the figures into this file: .png, .svg or .pdf", metavar="FILE")]
Output = Annotated[str | None, typer.Option(help="Write the JSON document into this file as well", metavar="FILE")]
Price = Annotated[float | None, typer.Option(help="Of the machine: adds what a million output tokens cost")]
Seed = Annotated[int, typer.Option(help="Of the random prompts and arrivals")]
Concurrency = Annotated[int, typer.Option(help="Clients that each wait for their answer; 0: none waits")]


@app.command("decode")
@recipe_command
def decode(
    recipe: Recipe,
    context_length: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens that each sequence holds [default: {DecodeSettings.DEFAULT_CONTEXT}, or what fits]",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of a step alone, per bucket")] = DecodeSettings.repeats,
    steps: Annotated[int, typer.Option(help="Of the running engine, per bucket")] = DecodeSettings.steps,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="Where a step's time goes; needs a GPU")] = False,
    baseline: Baseline = None,
    plot: Plot = None,
    output: Output = None,
    price_per_hour: Price = None,
    seed: Seed = DecodeSettings.seed,
) -> None:
    """A decode step of each bucket: on the device alone, and in the running engine."""
    settings = DecodeSettings(
        context_length=context_length,
        repeats=repeats,
        steps=steps,
        breakdown=breakdown,
        baselines=tuple(baseline or ()),
        plot=plot,
        output=output,
        price_per_hour=price_per_hour,
        seed=seed,
    )
    from tcdeploy.cli import display

    with display.show_progress() as progress:
        from tcdeploy.bench import decode

        report = decode.run(recipe, settings, progress)
    _publish(report, plot, output)


@app.command("prefill")
@recipe_command
def prefill(
    recipe: Recipe,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Of prompts, in tokens "
            f"[default: {','.join(map(str, PrefillSettings.DEFAULT_LENGTHS))}, up to the context]",
            metavar="LIST",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Prompts of each length")] = PrefillSettings.repeats,
    baseline: Baseline = None,
    plot: Plot = None,
    output: Output = None,
    seed: Seed = PrefillSettings.seed,
) -> None:
    """The time to the first token of a prompt alone, by its length."""
    settings = PrefillSettings(
        lengths=None if lengths is None else _parse_ints("--lengths", lengths),
        repeats=repeats,
        baselines=tuple(baseline or ()),
        plot=plot,
        output=output,
        seed=seed,
    )
    from tcdeploy.cli import display

    with display.show_progress() as progress:
        from tcdeploy.bench import prefill

        report = prefill.run(recipe, settings, progress)
    _publish(report, plot, output)


@app.command("throughput")
@recipe_command
def throughput(
    recipe: Recipe,
    requests: Annotated[int, typer.Option(help="How many")] = ThroughputSettings.requests,
    input_length: Annotated[int, typer.Option(help="Tokens of each prompt")] = ThroughputSettings.input_length,
    output_length: Annotated[int, typer.Option(help="New tokens of each")] = ThroughputSettings.output_length,
    request_rate: Annotated[
        str, typer.Option(help="Requests a second, arriving at random; inf: all at once")
    ] = f"{ThroughputSettings.request_rate}",
    concurrency: Concurrency = ThroughputSettings.concurrency,
    baseline: Baseline = None,
    plot: Plot = None,
    output: Output = None,
    price_per_hour: Price = None,
    seed: Seed = ThroughputSettings.seed,
) -> None:
    """Many requests at once or over time: tokens a second, and what each request waited for."""
    settings = ThroughputSettings(
        requests=requests,
        input_length=input_length,
        output_length=output_length,
        request_rate=_parse_rate(request_rate),
        concurrency=concurrency,
        baselines=tuple(baseline or ()),
        plot=plot,
        output=output,
        price_per_hour=price_per_hour,
        seed=seed,
    )
    from tcdeploy.cli import display

    with display.show_progress() as progress:
        from tcdeploy.bench import throughput

        report = throughput.run(recipe, settings, progress)
    _publish(report, plot, output)


@app.command("startup")
@recipe_command
def startup(
    recipe: Recipe,
    warm_runs: Annotated[int, typer.Option(help="Starts on the cache that the cold one filled")] = (
        StartupSettings.warm_runs
    ),
    prompt_length: Annotated[int, typer.Option(help="Tokens of the first prompt")] = StartupSettings.prompt_length,
    plot: Plot = None,
    output: Output = None,
    seed: Seed = StartupSettings.seed,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="Be the process that is measured")] = False,
) -> None:
    """Seconds from nothing to the first token, with an empty compile cache and with a filled one."""
    settings = StartupSettings(warm_runs=warm_runs, prompt_length=prompt_length, plot=plot, output=output, seed=seed)
    import json

    from tcdeploy.bench import startup

    if child:
        from tcdeploy.cli import display

        with display.show_progress() as progress:
            child_report = startup.measure_first_token(recipe, settings, progress)
        print(json.dumps(child_report))
        return
    from tcdeploy.cli import display

    report = startup.run(recipe, settings, display.PlainProgress())
    _publish(report, plot, output)


@app.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="Of the server, without /v1")] = "http://127.0.0.1:8000",
    served_model: Annotated[str | None, typer.Option(help="Its name there; default: the first listed")] = None,
    api_key: Annotated[str | None, typer.Option(help="Where it asks for one", envvar="TCDEPLOY_API_KEY")] = None,
    requests: Annotated[int, typer.Option(help="How many in all")] = ServeSettings.requests,
    input_length: Annotated[int, typer.Option(help="Tokens of each prompt")] = ServeSettings.input_length,
    output_length: Annotated[int, typer.Option(help="Tokens of each answer")] = ServeSettings.output_length,
    request_rate: Annotated[str, typer.Option(help="Arrivals a second; inf: all at once")] = "inf",
    concurrency: Concurrency = ServeSettings.concurrency,
    output: Output = None,
    seed: Seed = ServeSettings.seed,
) -> None:
    """Load on a running OpenAI-compatible server, ours or another's."""
    settings = ServeSettings(
        url=url.rstrip("/"), served_model=served_model, api_key=api_key, requests=requests, input_length=input_length,
        output_length=output_length, request_rate=_parse_rate(request_rate), concurrency=concurrency, seed=seed,
    )  # fmt: skip
    from tcdeploy.bench import serving

    _publish(serving.run(settings), None, output)


def _publish(report: Report, plot: str | None, output: str | None) -> None:
    """The document first: a picture that fails must not cost the figures."""
    from tcdeploy.cli import bench_display, display

    document = display.json_document(f"bench {report.command}", **report.document())
    display.show_bench(bench_display.tables(report), bench_display.remarks(report), document)
    if output is not None:
        _write(output, document)
    if plot is not None:
        from tcdeploy.bench.plot import draw

        draw(report, plot)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "the document stands on stdout") from error


def _parse_ints(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"{option} is {text!r}, which is no list of whole numbers", f"{option} 128,512") from None


def _parse_rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"--request-rate is {text!r}, which is no number", f"--request-rate 4, or {math.inf}"
        ) from None
