"""The output of a report of `tcdeploy bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tcdeploy.errors import UsageError

if TYPE_CHECKING:
    from tcdeploy.bench.report import Report


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
