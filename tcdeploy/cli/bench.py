"""`tcdeploy bench`: measurements beside the hardware's floor. Tables on stderr, one JSON document on stdout.

stdout is always JSON, so there is no --json option. Each command builds a settings object, which validates its
options before torch is imported.
"""

from __future__ import annotations

import json
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

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure MODEL against the limits of this machine and against baselines, or any server.",
)

Baseline = Annotated[
    list[str] | None,
    typer.Option(
        metavar="|".join(BASELINES),
        help="Also measure transformers (eager, generate) or region graphs; may be repeated",
    ),
]
Plot = Annotated[str | None, typer.Option(help="Write a plot to this .png, .svg or .pdf file", metavar="FILE")]
Output = Annotated[str | None, typer.Option(help="Also write the JSON document to this file", metavar="FILE")]
Price = Annotated[
    float | None, typer.Option(help="Price of the machine per hour; adds the cost of a million output tokens")
]
Seed = Annotated[int, typer.Option(help="Seed of the random prompts and arrival times")]
InputLength = Annotated[int, typer.Option(help="Tokens per prompt")]
OutputLength = Annotated[int, typer.Option(help="Output tokens per request")]
Requests = Annotated[int, typer.Option(help="Number of requests")]
RequestRate = Annotated[
    str, typer.Option(help="Requests per second, with Poisson arrivals; inf: all at once", metavar="FLOAT")
]
Concurrency = Annotated[
    int,
    typer.Option(help="Clients that each send the next request after a response; 0: use --request-rate"),
]


@app.command("decode")
@recipe_command
def decode(
    recipe: Recipe,
    context_length: Annotated[
        int | None,
        typer.Option(
            help=f"Context tokens per sequence [default: {DecodeSettings.DEFAULT_CONTEXT}, or less if the KV cache "
            "is smaller]",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Isolated steps per bucket")] = DecodeSettings.repeats,
    steps: Annotated[int, typer.Option(help="Engine steps per bucket")] = DecodeSettings.steps,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Add GPU time by kind of kernel and between kernels; needs a GPU")
    ] = False,
    baseline: Baseline = None,
    plot: Plot = None,
    output: Output = None,
    price_per_hour: Price = None,
    seed: Seed = DecodeSettings.seed,
) -> None:
    """Time a decode step of each bucket: on the device alone, and in the running engine."""
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
            help="Prompt lengths in tokens "
            f"[default: {','.join(map(str, PrefillSettings.DEFAULT_LENGTHS))}, up to the context]",
            metavar="LIST",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Prompts per length")] = PrefillSettings.repeats,
    baseline: Baseline = None,
    plot: Plot = None,
    output: Output = None,
    seed: Seed = PrefillSettings.seed,
) -> None:
    """Measure the time to first token of single prompts by their length."""
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
    requests: Requests = ThroughputSettings.requests,
    input_length: InputLength = ThroughputSettings.input_length,
    output_length: OutputLength = ThroughputSettings.output_length,
    request_rate: RequestRate = f"{ThroughputSettings.request_rate}",
    concurrency: Concurrency = ThroughputSettings.concurrency,
    baseline: Baseline = None,
    plot: Plot = None,
    output: Output = None,
    price_per_hour: Price = None,
    seed: Seed = ThroughputSettings.seed,
) -> None:
    """Measure throughput and latencies of many requests on one engine, without HTTP."""
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
    warm_runs: Annotated[int, typer.Option(help="Number of warm starts")] = StartupSettings.warm_runs,
    prompt_length: Annotated[int, typer.Option(help="Tokens of the first prompt")] = StartupSettings.prompt_length,
    plot: Plot = None,
    output: Output = None,
    seed: Seed = StartupSettings.seed,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="Run as the measured process")] = False,
) -> None:
    """Measure the time from process start to the first token, for cold and warm starts."""
    settings = StartupSettings(warm_runs=warm_runs, prompt_length=prompt_length, plot=plot, output=output, seed=seed)
    from tcdeploy.bench import startup
    from tcdeploy.cli import display

    if child:
        with display.show_progress() as progress:
            child_report = startup.measure_first_token(recipe, settings, progress)
        print(json.dumps(child_report))
        return
    report = startup.run(recipe, settings, display.PlainProgress())
    _publish(report, plot, output)


@app.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="Base URL of the server, without /v1")] = "http://127.0.0.1:8000",
    served_model: Annotated[
        str | None,
        typer.Option(
            help="Model name in the requests [default: the first that the server lists]",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key, sent as a bearer token", envvar="TCDEPLOY_API_KEY")
    ] = None,
    requests: Requests = ServeSettings.requests,
    input_length: InputLength = ServeSettings.input_length,
    output_length: OutputLength = ServeSettings.output_length,
    request_rate: RequestRate = f"{ServeSettings.request_rate}",
    concurrency: Concurrency = ServeSettings.concurrency,
    output: Output = None,
    seed: Seed = ServeSettings.seed,
) -> None:
    """Measure throughput and latencies of any OpenAI-compatible server."""
    settings = ServeSettings(
        url=url.rstrip("/"), served_model=served_model, api_key=api_key, requests=requests, input_length=input_length,
        output_length=output_length, request_rate=_parse_rate(request_rate), concurrency=concurrency, seed=seed,
    )  # fmt: skip
    from tcdeploy.bench import serving

    _publish(serving.run(settings), None, output)


def _publish(report: Report, plot: str | None, output: str | None) -> None:
    """Print and write the report, then plot it: an error while plotting must not lose the measurements."""
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
        raise UsageError(f"{path} cannot be written: {error.strerror}", "the document is on stdout") from error


def _parse_ints(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"{option} is {text!r}, expected a list of integers", f"{option} 128,512") from None


def _parse_rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--request-rate is {text!r}, expected a number", f"--request-rate 4, or {math.inf}") from None
