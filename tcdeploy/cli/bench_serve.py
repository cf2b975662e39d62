"""`tcdeploy bench serve`: its options are the fields of `ServeSettings`."""

from __future__ import annotations

from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.cli.bench_display import publish_document
from tcdeploy.cli.options import options_command
from tcdeploy.cli.report_options import Json, warn_if_busy
from tcdeploy.planning.extras import require_extra
from tcdeploy.server.settings import check_api_keys


@options_command
def serve(settings: ServeSettings, json: Json = False) -> None:
    """Measure throughput and latencies of any OpenAI-compatible server."""
    require_extra("serve", "send requests to a server")
    check_api_keys(() if settings.api_key is None else (settings.api_key,))
    warn_if_busy()
    from tcdeploy.bench import sweep
    from tcdeploy.cli import display

    progress = display.PlainProgress()
    compared = {path: sweep.read_rows(path) for path in settings.compare}  # finds an error in them before the run
    report = sweep.run(settings, lambda rate: progress.stage(f"{rate:g} requests/s"))
    publish_document(report, settings.output, json)
    if settings.plot is not None:
        from tcdeploy.bench.plot import draw_rates

        measured = sweep.plotted_rows(report.document()["rows"])
        draw_rates(sweep.merge_rows(measured, compared), (settings.ttft_limit, settings.tpot_limit), settings.plot)
