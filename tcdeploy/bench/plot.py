"""Plots of a benchmark report. Needs matplotlib (extra `plot`), which settings.py checks before the benchmark runs.

decode: throughput by batch size, beside its ceiling, which follows from the floor of a step's time. prefill: time to
first token by prompt length, which shows where prompts become compute-bound. throughput: the wait of each request, and
the number of running requests over time. startup: seconds per stage. serve: latencies over the request rate, one line
per server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tcdeploy.bench.report import TCDEPLOY, FailedRow, Report

RATE_PANELS = (  # population and statistic of the latencies
    ("first_token_ms", "p99", "ms to the first token, p99"),
    ("request_gap_ms", "mean", "ms per token, mean"),
    ("token_gap_ms", "p99", "ms between tokens, p99"),
)


def draw(report: Report, path: str) -> None:
    """Write the plot in the format of the file's suffix. Needs no display."""
    draw_figure(report).savefig(path, dpi=150)


def draw_figure(report: Report) -> Any:
    """The plot as a figure of matplotlib."""
    figure, axes = _figure(2 if report.command == "throughput" else 1, 6.4)
    rows = [row for row in report.rows if not isinstance(row, FailedRow)]
    _PLOTTERS[report.command](rows, axes)
    model = str(report.plan["model"]).rstrip("/").rpartition("/")[2]  # the last part of a hub id or path
    environment = report.environment
    cpu = f"{environment.get('cpu_name') or 'a CPU'} ({environment['cpu']})"
    figure.suptitle(f"{model} on {environment['gpu'] or cpu}", fontsize=10)
    return figure


def draw_rates(rows: Sequence[dict[str, Any]], limits: tuple[float, float], path: str) -> None:
    """Latencies over the request rate, one line per server. `rows`: of documents of sweeps, without failed rates.

    limits: of the first token and per token, in ms.
    """
    figure, axes = _figure(3, 4.7)
    for axis, (population, statistic, label), limit in zip(axes, RATE_PANELS, (*limits, None), strict=True):
        for subject in dict.fromkeys(row["subject"] for row in rows):
            latencies = {row["request_rate"]: row["latencies"][population] for row in rows if row["subject"] == subject}
            drawn = [(rate, summary[statistic]) for rate, summary in sorted(latencies.items()) if summary]
            axis.plot([rate for rate, _ in drawn], [latency for _, latency in drawn], "o-", label=subject)
        if limit is not None:
            axis.axhline(limit, linestyle=":", color="gray", label="limit")
        _set_log_y(axis)
        axis.set_xlim(left=0)
        _label_axis(axis, "requests per second", label)
    figure.savefig(path, dpi=150)


def _figure(panels: int, panel_width: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(panel_width * panels, 4.2), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _draw_decode(rows: list[Any], axes: Any) -> None:
    def ceiling(row: Any) -> float | None:
        return row.floor_ms and row.batch / row.floor_ms * 1e3

    _draw_lines(rows, axes[0], "batch", lambda row: row.tokens_per_second, "ceiling", ceiling)
    _label_axis(axes[0], "sequences in the batch", "output tokens per second")


def _draw_prefill(rows: list[Any], axes: Any) -> None:
    _draw_lines(rows, axes[0], "tokens", lambda row: row.first_token_ms.p50, "floor", lambda row: row.floor_ms)
    _label_axis(axes[0], "tokens in the prompt", "ms to the first token, median")


def _draw_lines(
    rows: list[Any], axis: Any, x: str, y: Callable[[Any], float | None], bound: str, y_bound: Callable[[Any], Any]
) -> None:
    """A line per subject, and the bound of the deployment's rows, on logarithmic axes with a tick per measured x."""
    from matplotlib.ticker import NullLocator

    lines = [(subject, y, {"marker": "o"}) for subject in dict.fromkeys(row.subject for row in rows)]
    for label, value, style in [*lines, (bound, y_bound, {"linestyle": "--", "color": "gray"})]:
        subject = TCDEPLOY if label == bound else label
        points = [(getattr(row, x), value(row)) for row in rows if row.subject == subject and value(row)]
        axis.plot([point[0] for point in points], [point[1] for point in points], label=label, **style)
    ticks = sorted({getattr(row, x) for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    _set_log_y(axis)


def _draw_throughput(rows: list[Any], axes: Any) -> None:
    """Time to first token of each request, over the time of that token, and the number of running requests."""
    from matplotlib.ticker import MaxNLocator

    for row in rows:
        first_tokens = [first_token for _, first_token, _ in row.request_timings]
        waits_ms = [(first_token - arrival) * 1e3 for arrival, first_token, _ in row.request_timings]
        axes[0].plot(first_tokens, waits_ms, ".", label=row.subject)
        if row.timeline:
            seconds, running, _ = zip(*row.timeline, strict=True)
            axes[1].step(seconds, running, where="post", label=row.subject)
    _label_axis(axes[0], "seconds", "ms to the first token")
    axes[1].yaxis.set_major_locator(MaxNLocator(integer=True))
    axes[1].set_ylim(bottom=0)
    _label_axis(axes[1], "seconds", "requests running")


def _draw_startup(rows: list[Any], axes: Any) -> None:
    labels = [f"{number}: {row.start}" for number, row in enumerate(rows, 1)]
    bottoms = [0.0] * len(rows)
    for stage in dict.fromkeys(stage for row in rows for stage in row.stage_seconds):
        heights = [row.stage_seconds.get(stage, 0.0) for row in rows]
        axes[0].bar(labels, heights, bottom=bottoms, label=stage, width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    _label_axis(axes[0], "start", "seconds")


def _set_log_y(axis: Any) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5 times the powers of ten, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _label_axis(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


_PLOTTERS = {"decode": _draw_decode, "prefill": _draw_prefill, "throughput": _draw_throughput, "startup": _draw_startup}
