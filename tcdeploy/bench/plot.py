"""Plots of a benchmark report. Needs matplotlib (extra `plot`), which settings.py checks before the benchmark runs.

decode: throughput by batch size, beside its ceiling, which follows from the floor of a step's time. prefill: time to
first token by prompt length, which shows where prompts become compute-bound. throughput: the wait of each request, and
the number of running requests over time. startup: seconds per stage. serve: latencies over the request rate, one line
per server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tcdeploy.bench.report import TCDEPLOY, FailedRow, Report
from tcdeploy.bench.sweep import RatePoint

LIMIT_STYLE = {"linestyle": ":", "color": "gray", "label": "limit"}
BOUND_STYLE = {"linestyle": "--", "color": "gray"}


def draw(report: Report, path: str) -> None:
    """Write the plot in the format of the file's suffix. Needs no display."""
    draw_figure(report).savefig(path, dpi=150)


def draw_figure(report: Report) -> Any:
    """The plot as a figure of matplotlib."""
    from matplotlib.figure import Figure

    panels = 2 if report.command == "throughput" else 1
    figure = Figure(figsize=(6.4 * panels, 4.2), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _PLOTTERS[report.command](report, axes)
    model = str(report.plan["model"]).rstrip("/").rpartition("/")[2]  # the last part of a hub id or path
    figure.suptitle(f"{model} on {_device(report.environment)}", fontsize=10)
    return figure


def _device(environment: dict[str, Any]) -> str:
    """The GPU's name, or that of the CPU with its vector instructions."""
    cpu = f"{environment.get('cpu_name') or 'a CPU'} ({environment['cpu']})"
    return str(environment["gpu"]) or cpu


def draw_rates(points: Sequence[RatePoint], limits: tuple[float, float], path: str) -> None:
    """Latencies over the request rate, one line per server. `limits`: of the first token and per token, in ms."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    panels = (
        ("ttft_p99", "ms to the first token, p99", limits[0]),
        ("tpot_mean", "ms per token, mean", limits[1]),
        ("itl_p99", "ms between tokens, p99", None),
    )
    for axis, (name, label, limit) in zip(axes, panels, strict=True):
        for subject in dict.fromkeys(point.subject for point in points):
            line = sorted((point.request_rate, getattr(point, name)) for point in points if point.subject == subject)
            drawn = [(rate, latency) for rate, latency in line if latency is not None]
            axis.plot([rate for rate, _ in drawn], [latency for _, latency in drawn], "o-", label=subject)
        if limit is not None:
            axis.axhline(limit, **LIMIT_STYLE)
        axis.set_yscale("log")
        _set_plain_ticks(axis.yaxis)
        axis.set_xlim(left=0)
        _label_axis(axis, "requests per second", label)
    figure.savefig(path, dpi=150)


def _draw_decode(report: Report, axes: Any) -> None:
    """Output tokens per second over batch size."""
    for subject, rows in _by_subject(report).items():
        measured = [row for row in rows if row.tokens_per_second]
        axes[0].plot([row.batch for row in measured], [row.tokens_per_second for row in measured], "o-", label=subject)
    bounded = [row for row in _by_subject(report)[TCDEPLOY] if row.floor_ms]
    axes[0].plot(
        [row.batch for row in bounded],
        [row.batch / row.floor_ms * 1e3 for row in bounded],
        **BOUND_STYLE,
        label="ceiling",
    )
    _set_log_scale(axes[0], sorted({row.batch for rows in _by_subject(report).values() for row in rows}))
    _label_axis(axes[0], "sequences in the batch", "output tokens per second")


def _draw_prefill(report: Report, axes: Any) -> None:
    for subject, rows in _by_subject(report).items():
        axes[0].plot([row.tokens for row in rows], [row.first_token_ms.p50 for row in rows], "o-", label=subject)
    bounded = [row for row in _by_subject(report)[TCDEPLOY] if row.floor_ms]
    axes[0].plot([row.tokens for row in bounded], [row.floor_ms for row in bounded], **BOUND_STYLE, label="floor")
    _set_log_scale(axes[0], sorted({row.tokens for rows in _by_subject(report).values() for row in rows}))
    _label_axis(axes[0], "tokens in the prompt", "ms to the first token, median")


def _draw_throughput(report: Report, axes: Any) -> None:
    """Time to first token of each request, over the time of that token, and the number of running requests."""
    from matplotlib.ticker import MaxNLocator

    for subject, rows in _by_subject(report).items():
        for row in rows:
            first_tokens = [first_token for _, first_token, _ in row.request_timings]
            waits_ms = [(first_token - arrival) * 1e3 for arrival, first_token, _ in row.request_timings]
            axes[0].plot(first_tokens, waits_ms, ".", label=subject)
            if row.timeline:
                seconds, running, _ = zip(*row.timeline, strict=True)
                axes[1].step(seconds, running, where="post", label=subject)
    _label_axis(axes[0], "seconds", "ms to the first token")
    axes[1].yaxis.set_major_locator(MaxNLocator(integer=True))
    axes[1].set_ylim(bottom=0)
    _label_axis(axes[1], "seconds", "requests running")


def _draw_startup(report: Report, axes: Any) -> None:
    rows: list[Any] = list(report.rows)
    labels = [f"{number}: {row.start}" for number, row in enumerate(rows, 1)]
    bottoms = [0.0] * len(rows)
    for stage in dict.fromkeys(stage for row in rows for stage in row.stage_seconds):
        heights = [row.stage_seconds.get(stage, 0.0) for row in rows]
        axes[0].bar(labels, heights, bottom=bottoms, label=stage, width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    _label_axis(axes[0], "start", "seconds to the first token")


def _by_subject(report: Report) -> dict[str, list[Any]]:
    rows_by_subject: dict[str, list[Any]] = defaultdict(list)
    for row in report.rows:
        if not isinstance(row, FailedRow):
            rows_by_subject[row.subject].append(row)
    return rows_by_subject


def _set_log_scale(axis: Any, values: list[int]) -> None:
    """Logarithmic axes with plain numbers, and ticks at the measured values."""
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{value:,}" for value in values])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yscale("log")
    _set_plain_ticks(axis.yaxis)


def _set_plain_ticks(log_axis: Any) -> None:
    """Ticks at 1, 2 and 5 times the powers of ten, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    log_axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    log_axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    log_axis.set_minor_formatter(NullFormatter())


def _label_axis(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


_PLOTTERS = {"decode": _draw_decode, "prefill": _draw_prefill, "throughput": _draw_throughput, "startup": _draw_startup}
