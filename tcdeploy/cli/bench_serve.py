"""`tcdeploy bench serve`: its options, grouped by what they decide about the load."""

from __future__ import annotations

from typing import Annotated

import typer

from tcdeploy.bench.goodput import SLO_METRICS, parse_slo
from tcdeploy.bench.lengths import DISTRIBUTIONS
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.cli.bench_options import (
    Concurrency,
    InputLength,
    Output,
    OutputLength,
    RequestRate,
    Seed,
    parse_floats,
    parse_rate,
    publish_document,
)
from tcdeploy.cli.report_options import Json, warn_if_busy
from tcdeploy.planning.extras import require_extra
from tcdeploy.server.settings import check_api_keys


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
    label: Annotated[
        str | None,
        typer.Option(
            help="Name of the server in table and plot [default: the model name]", metavar="NAME", show_default=False
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Number of requests; with --turns, of sessions")
    ] = ServeSettings.requests,
    duration: Annotated[
        float | None,
        typer.Option(help="Seconds during which requests arrive at the request rate, instead of --requests"),
    ] = None,
    request_rate: RequestRate = f"{ServeSettings.request_rate}",
    burstiness: Annotated[
        float,
        typer.Option(help="Shape of the gamma-distributed intervals; 1: Poisson arrivals, below 1: bursts"),
    ] = ServeSettings.burstiness,
    concurrency: Concurrency = ServeSettings.concurrency,
    input_length: InputLength = ServeSettings.input_length,
    output_length: OutputLength = ServeSettings.output_length,
    length_spread: Annotated[
        float, typer.Option(help="Lengths are uniform within this share of both lengths; 0.5: +-50%")
    ] = ServeSettings.length_spread,
    lengths: Annotated[
        str,
        typer.Option(
            help="Distribution of lengths; sharegpt: log-normal, means of 217 in and 198 out, at most 1,024",
            metavar="|".join(DISTRIBUTIONS),
        ),
    ] = ServeSettings.lengths,
    shared_prefix: Annotated[
        int, typer.Option(help="Tokens that the prompts of a group share, before those of --input-length")
    ] = ServeSettings.shared_prefix,
    prefix_groups: Annotated[int, typer.Option(help="Number of different shared prefixes")] = (
        ServeSettings.prefix_groups
    ),
    turns: Annotated[
        int,
        typer.Option(
            help="Requests of a session, each of which continues the previous prompt; the request rate counts sessions"
        ),
    ] = ServeSettings.turns,
    think_time: Annotated[
        float, typer.Option(help="Seconds between a response and the next request of its session")
    ] = ServeSettings.think_time,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Send the requests of a JSONL file with timestamp (s), input_length and output_length per line",
            metavar="FILE",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help=f"Report the requests that meet these limits in ms, of {', '.join(SLO_METRICS)}: ttft=200,itl=50",
            metavar="LIST",
        ),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Run the load at each of these request rates: 4,8,12", metavar="LIST")
    ] = None,
    ttft_limit: Annotated[
        float, typer.Option(help="With --sweep: limit of the 99th percentile of the first token, ms")
    ] = ServeSettings.ttft_limit,
    tpot_limit: Annotated[
        float, typer.Option(help="With --sweep: limit of the mean time per token, ms")
    ] = ServeSettings.tpot_limit,
    plot: Annotated[
        str | None,
        typer.Option(help="With --sweep: plot latency over rate to this .png, .svg or .pdf file", metavar="FILE"),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Add the JSON document of an earlier sweep to the plot; may be repeated", metavar="FILE"),
    ] = None,
    output: Output = None,
    seed: Seed = ServeSettings.seed,
    json: Json = False,
) -> None:
    """Measure throughput and latencies of any OpenAI-compatible server."""
    require_extra("serve", "send requests to a server")
    first_key = next(iter((api_key or "").split()), None)  # `serve` accepts several keys in this variable
    check_api_keys(() if first_key is None else (first_key,))
    settings = ServeSettings(
        url=url.rstrip("/"), label=label, served_model=served_model, api_key=first_key, requests=requests,
        duration=duration, request_rate=parse_rate(request_rate), burstiness=burstiness, concurrency=concurrency,
        input_length=input_length, output_length=output_length, length_spread=length_spread, lengths=lengths,
        shared_prefix=shared_prefix, prefix_groups=prefix_groups, turns=turns, think_time=think_time, trace=trace,
        slo={} if slo is None else parse_slo(slo), sweep=() if sweep is None else parse_floats("--sweep", sweep),
        ttft_limit=ttft_limit, tpot_limit=tpot_limit, plot=plot, compare=tuple(compare or ()), output=output, seed=seed,
    )  # fmt: skip
    warn_if_busy()
    if settings.sweep:
        _sweep(settings, json)
        return
    from tcdeploy.bench import serving

    publish_document(serving.run(settings), output, json)


def _sweep(settings: ServeSettings, as_json: bool) -> None:
    """Documents to compare are read first, so that an error in them is found before the run."""
    from tcdeploy.bench import sweep
    from tcdeploy.cli import display

    progress = display.PlainProgress()
    compared = {path: sweep.read_points(path) for path in settings.compare}
    report = sweep.run(settings, lambda rate: progress.stage(f"{rate:g} requests/s"))
    publish_document(report, settings.output, as_json)
    if settings.plot is not None:
        from tcdeploy.bench.plot import draw_rates

        limits = (settings.ttft_limit, settings.tpot_limit)
        draw_rates(sweep.merge_points(sweep.points_of(report), compared), limits, settings.plot)
