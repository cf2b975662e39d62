"""Options that several `tcdeploy bench` commands share, their parsers, and the output of a report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from tcdeploy.bench.settings import BASELINES
from tcdeploy.errors import UsageError

if TYPE_CHECKING:
    from tcdeploy.bench.report import Report

Baseline = Annotated[
    list[str] | None,
    typer.Option(
        metavar="|".join(BASELINES),
        help="Also measure transformers' model with its own attention (eager: in a plain loop; generate: by its "
        "`generate`), or attention and MLP as regions with CUDA graphs of their own; may be repeated",
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


def publish(report: Report, plot: str | None, output: str | None, as_json: bool) -> None:
    """Print and write the report, then plot it: an error while plotting must not lose the measurements."""
    publish_document(report, output, as_json)
    if plot is not None:
        from tcdeploy.bench.plot import draw

        draw(report, plot)


def publish_document(report: Report, output: str | None, as_json: bool) -> None:
    """Print the report, and write its document to `output`. If that fails, the document is printed."""
    from tcdeploy.cli import bench_display, display

    document = display.json_document(f"bench {report.command}", **report.document())
    is_printed = display.show_bench(bench_display.tables(report), bench_display.remarks(report), document, as_json)
    if output is None:
        return
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(document + "\n")
    except OSError as error:
        if not is_printed:
            print(document)
        raise UsageError(f"{output} cannot be written: {error.strerror}", "the document is on stdout") from error


def parse_ints(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"{option} is {text!r}, expected a list of integers", f"{option} 128,512") from None


def parse_floats(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"{option} is {text!r}, expected a list of numbers", f"{option} 4,8") from None


def parse_rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--request-rate is {text!r}, expected a number", f"--request-rate 4, or {math.inf}") from None
