"""`tcdeploy bench`: measurements beside the hardware's floor.

On a terminal, or with --json, stdout has the tables or one JSON document. If stdout is not a terminal, it has the
document, and stderr the tables. The options of each command are the fields of its settings, which are validated before
torch is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tcdeploy.bench.quality_settings import QualitySettings
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.settings import CommonSettings, DecodeSettings, PrefillSettings, StartupSettings, ThroughputSettings
from tcdeploy.cli.bench_display import publish, publish_document
from tcdeploy.cli.commands import LazyGroup
from tcdeploy.cli.options import options_command
from tcdeploy.cli.remote_cache import AllowUnsigned
from tcdeploy.cli.report_options import Json, enforce_budget, parse_budget, warn_if_busy
from tcdeploy.planning.extras import require_compile_extra, require_extra
from tcdeploy.planning.recipe import Recipe


class _Commands(LazyGroup):
    sources = {
        name: f"{__name__}:{name}" for name in ("decode", "prefill", "throughput", "quality", "startup", "serve")
    }


app = typer.Typer(
    cls=_Commands, name="bench", no_args_is_help=True, rich_markup_mode=None,
    help="Measure MODEL against the limits of this machine and against baselines, or any server.",
)  # fmt: skip


@options_command
def decode(recipe: Recipe, settings: DecodeSettings, json: Json = False) -> None:
    """Time a decode step of each bucket: on the device alone, and in the running engine."""
    _measure("decode", recipe, settings, json)


@options_command
def prefill(recipe: Recipe, settings: PrefillSettings, json: Json = False) -> None:
    """Measure the time to first token of single prompts by their length."""
    _measure("prefill", recipe, settings, json)


@options_command
def throughput(recipe: Recipe, settings: ThroughputSettings, json: Json = False) -> None:
    """Measure throughput and latencies of many requests on one engine, without HTTP."""
    _measure("throughput", recipe, settings, json)


@options_command
def quality(recipe: Recipe, settings: QualitySettings, json: Json = False) -> None:
    """Measure perplexity on a text, and KL divergence and top-1 agreement against the 16-bit model."""
    from tcdeploy.bench.token_windows import read_text
    from tcdeploy.cli import display

    assert settings.text is not None
    text = read_text(settings.text, settings.tokens)
    with display.show_progress() as progress:
        require_compile_extra()
        from tcdeploy.bench.quality import run

        report = run(recipe, settings, text, progress)
    publish_document(report, settings.output, json)


def _measure(name: str, recipe: Recipe, settings: CommonSettings, as_json: bool) -> None:
    """Run tcdeploy/bench/NAME.py, which is imported while the progress is shown: it imports torch."""
    from tcdeploy.cli import display

    warn_if_busy()
    with display.show_progress() as progress:
        require_compile_extra()
        report = importlib.import_module(f"tcdeploy.bench.{name}").run(recipe, settings, progress)
    publish(report, settings.plot, settings.output, as_json)


@options_command
def startup(
    recipe: Recipe,
    settings: StartupSettings,
    allow_unsigned: AllowUnsigned = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Exit with code 6 if a start of `serve` took longer until its first token", metavar="SECONDS"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Time `tcdeploy warm MODEL`, then `tcdeploy serve MODEL` from process start to the first streamed token."""
    budget_seconds = parse_budget(budget)
    from tcdeploy.bench import startup
    from tcdeploy.host.plain_progress import PlainProgress

    warn_if_busy()
    with _unpacked(settings.bundle, allow_unsigned) as folder:
        measured = recipe if folder is None else dataclasses.replace(recipe, cache_dir=folder)
        progress = PlainProgress("")  # not entered: the measured processes print their own lines while they run
        report = startup.run(measured, settings, progress)
        progress.finish()
    publish(report, settings.plot, settings.output, json)
    for row in report.rows:
        if isinstance(row, startup.StartupRow) and row.start == "warm":
            enforce_budget(row.stage_seconds, budget_seconds)


@contextlib.contextmanager
def _unpacked(bundle: str | None, allow_unsigned: bool) -> Iterator[str | None]:
    """A temporary cache folder with the content of `bundle`; None without one."""
    if bundle is None:
        yield None
        return
    from tcdeploy.bundle.unpack import unpack
    from tcdeploy.cache.trust.signing import default_trusted_keys_folder
    from tcdeploy.host.temporary_files import temporary_folder

    with temporary_folder("bundle") as folder:
        unpack(Path(bundle), folder, default_trusted_keys_folder(), allow_unsigned)
        yield str(folder)


@options_command
def serve(settings: ServeSettings, json: Json = False) -> None:
    """Measure throughput and latencies of any OpenAI-compatible server."""
    require_extra("serve", "send requests to a server")
    from tcdeploy.server.settings import check_api_keys

    check_api_keys(() if settings.api_key is None else (settings.api_key,))
    warn_if_busy()
    from tcdeploy.bench import serving
    from tcdeploy.host.plain_progress import PlainProgress

    compared = {path: serving.read_rows(path) for path in settings.compare}  # finds an error in them before the run
    with PlainProgress("") as progress:
        report = serving.run(settings, lambda rate: progress.stage(f"{rate:g} requests/s"))
    publish_document(report, settings.output, json)
    if settings.plot is not None:
        from tcdeploy.bench.plot import draw_rates

        measured = serving.plotted_rows(report.document()["rows"])
        draw_rates(serving.merge_rows(measured, compared), (settings.ttft_limit, settings.tpot_limit), settings.plot)
