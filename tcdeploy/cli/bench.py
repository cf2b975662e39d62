"""`tcdeploy bench`: measurements beside the hardware's floor.

On a terminal, or with --json, stdout has the tables or one JSON document. If stdout is not a terminal, it has the
document, and stderr the tables. Each command builds a settings object, which validates its options before torch is
imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import typer

from tcdeploy.bench.settings import DecodeSettings, PrefillSettings, StartupSettings, ThroughputSettings
from tcdeploy.cli.bench_options import (
    Baseline,
    Concurrency,
    InputLength,
    Output,
    OutputLength,
    Plot,
    Price,
    RequestRate,
    Requests,
    Seed,
    parse_ints,
    parse_rate,
    publish,
)
from tcdeploy.cli.budget import enforce_budget, parse_budget
from tcdeploy.cli.lazy_group import LazyGroup
from tcdeploy.cli.options import recipe_command
from tcdeploy.cli.remote_cache import AllowUnsigned
from tcdeploy.cli.report_options import Json, warn_if_busy
from tcdeploy.planning.extras import require_compile_extra
from tcdeploy.planning.recipe import Recipe


class _Commands(LazyGroup):
    sources = {
        "decode": f"{__name__}:decode",
        "prefill": f"{__name__}:prefill",
        "throughput": f"{__name__}:throughput",
        "startup": f"{__name__}:startup",
        "serve": "tcdeploy.cli.bench_serve:serve",
    }


app = typer.Typer(
    cls=_Commands,
    name="bench",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure MODEL against the limits of this machine and against baselines, or any server.",
)


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
    json: Json = False,
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

    warn_if_busy()
    with display.show_progress() as progress:
        require_compile_extra()
        from tcdeploy.bench import decode

        report = decode.run(recipe, settings, progress)
    publish(report, plot, output, json)


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
    json: Json = False,
) -> None:
    """Measure the time to first token of single prompts by their length."""
    settings = PrefillSettings(
        lengths=None if lengths is None else parse_ints("--lengths", lengths),
        repeats=repeats,
        baselines=tuple(baseline or ()),
        plot=plot,
        output=output,
        seed=seed,
    )
    from tcdeploy.cli import display

    warn_if_busy()
    with display.show_progress() as progress:
        require_compile_extra()
        from tcdeploy.bench import prefill

        report = prefill.run(recipe, settings, progress)
    publish(report, plot, output, json)


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
    json: Json = False,
) -> None:
    """Measure throughput and latencies of many requests on one engine, without HTTP."""
    settings = ThroughputSettings(
        requests=requests,
        input_length=input_length,
        output_length=output_length,
        request_rate=parse_rate(request_rate),
        concurrency=concurrency,
        baselines=tuple(baseline or ()),
        plot=plot,
        output=output,
        price_per_hour=price_per_hour,
        seed=seed,
    )
    from tcdeploy.cli import display

    warn_if_busy()
    with display.show_progress() as progress:
        require_compile_extra()
        from tcdeploy.bench import throughput

        report = throughput.run(recipe, settings, progress)
    publish(report, plot, output, json)


@recipe_command
def startup(
    recipe: Recipe,
    source: Annotated[
        Literal["cold", "cache", "bundle"],
        typer.Option(
            "--from",
            help="cold: one start with an empty cache folder, and warm starts from it; cache: warm starts from the "
            "folder in --cache-dir; bundle: warm starts from the file in --bundle",
        ),
    ] = StartupSettings.source,
    bundle: Annotated[
        Path | None, typer.Option(help="With --from bundle: the file, which is unpacked into a temporary folder")
    ] = None,
    allow_unsigned: AllowUnsigned = False,
    warm_runs: Annotated[int, typer.Option(help="Number of warm starts")] = StartupSettings.warm_runs,
    prompt_length: Annotated[int, typer.Option(help="Tokens of the first prompt")] = StartupSettings.prompt_length,
    plot: Plot = None,
    output: Output = None,
    seed: Seed = StartupSettings.seed,
    budget: Annotated[
        str | None,
        typer.Option(help="Exit with code 6 if a warm start took longer until its first token", metavar="SECONDS"),
    ] = None,
    json: Json = False,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="Run as the measured process")] = False,
) -> None:
    """Measure the time from process start to the first token, for cold and warm starts."""
    budget_seconds = parse_budget(budget)
    settings = StartupSettings(
        source=source, bundle=None if bundle is None else str(bundle), warm_runs=warm_runs,
        prompt_length=prompt_length, plot=plot, output=output, seed=seed,
    )  # fmt: skip
    from tcdeploy.bench import startup
    from tcdeploy.cli import display

    if child:
        with display.show_progress() as progress:
            child_report = startup.measure_first_token(recipe, settings, progress)
        print(dumps(child_report))
        return
    warn_if_busy()
    with _unpacked(bundle, allow_unsigned) as folder:
        measured = recipe if folder is None else dataclasses.replace(recipe, cache_dir=folder)
        report = startup.run(measured, settings, display.PlainProgress())
    publish(report, plot, output, json)
    for row in report.rows:
        if isinstance(row, startup.StartupRow) and row.start == "warm":
            enforce_budget(row.stage_seconds, budget_seconds)


@contextlib.contextmanager
def _unpacked(bundle: Path | None, allow_unsigned: bool) -> Iterator[str | None]:
    """A temporary cache folder with the content of `bundle`; None without one."""
    if bundle is None:
        yield None
        return
    from tcdeploy.bundle.unpack import unpack
    from tcdeploy.cache.trust.signing import default_trusted_keys_folder

    with tempfile.TemporaryDirectory(prefix="tcdeploy-bundle-") as parent:
        folder = Path(parent, "cache")
        unpack(bundle, folder, default_trusted_keys_folder(), allow_unsigned)
        yield str(folder)
