"""A sweep over request rates: where a server's latency exceeds its limits. Does not import torch.

The same load is run at each rate, one after another. The limits are on the 99th percentile of the first token and on
the mean time per token, which grow with the length of the run once requests arrive faster than they complete.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tcdeploy.bench.report import Report
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.serving import LOOP_FACTORY, ServeRow, make_report, run_load
from tcdeploy.errors import UsageError


class RatePoint(NamedTuple):
    """Latencies of a server at one rate, in ms; None if every response was one token."""

    subject: str
    request_rate: float
    ttft_p99: float
    tpot_mean: float | None
    itl_p99: float | None


def run(settings: ServeSettings, on_rate: Callable[[float], None]) -> Report:
    """`on_rate` is called before each rate. The report has a row per rate."""
    rows: list[ServeRow] = []
    for rate in settings.sweep:
        on_rate(rate)
        with asyncio.Runner(loop_factory=LOOP_FACTORY) as runner:
            rows += runner.run(run_load(settings.at_rate(rate)))
    return make_report(settings, rows, describe_limits(rows, settings.ttft_limit, settings.tpot_limit))


def describe_limits(rows: Sequence[ServeRow], ttft_limit: float, tpot_limit: float) -> dict[str, Any]:
    """Keys of the document: the lowest rate that exceeds each limit (ms), or None, and the same as notes.

    A rate at which no request succeeds exceeds both limits.
    """
    ttft_rate = _lowest_rate(rows, lambda row: not row.latencies or row.latencies.first_token_ms.p99 > ttft_limit)
    tpot_rate = _lowest_rate(rows, lambda row: not row.latencies or _tpot_mean_ms(row) > tpot_limit)
    failing_rate = _lowest_rate(rows, lambda row: bool(row.failures))
    limits = {
        "ttft_limit_ms": ttft_limit,
        "tpot_limit_ms": tpot_limit,
        "ttft_limit_rate": ttft_rate,
        "tpot_limit_rate": tpot_rate,
        "limit_rate": min((rate for rate in (ttft_rate, tpot_rate) if rate is not None), default=None),
        "failing_rate": failing_rate,
    }
    notes = [
        f"first token, p99, above {ttft_limit:g} ms: {_describe_rate(ttft_rate)}",
        f"time per token, mean, above {tpot_limit:g} ms: {_describe_rate(tpot_rate)}",
    ]
    if failing_rate is not None:
        notes.append(f"requests failed: {_describe_rate(failing_rate)}")
    return {"sweep": limits, "notes": notes}


def points_of(report: Report) -> list[RatePoint]:
    """The points of a plot; none for a rate at which no request succeeded."""
    return _points(report.document()["rows"])


def read_points(path: str) -> list[RatePoint]:
    """The points in the JSON document of an earlier sweep. Raises UsageError if there are none."""
    try:
        with open(path, encoding="utf-8") as file:
            points = _points(json.load(file)["rows"])
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "--compare FILE") from None
    except (ValueError, KeyError, TypeError):
        points = []
    if not points:
        hint = f"tcdeploy bench serve --sweep 4,8 --output {path}"
        raise UsageError(f"{path} is not the JSON document of a sweep", hint)
    return points


def merge_points(measured: list[RatePoint], compared: dict[str, list[RatePoint]]) -> list[RatePoint]:
    """All points. A server of a compared file (path: points) whose name is taken gets the path added to its name."""
    merged = list(measured)
    for path, points in compared.items():
        taken = {point.subject for point in merged}
        merged += [
            point._replace(subject=f"{point.subject} ({path})") if point.subject in taken else point for point in points
        ]
    return merged


def _points(rows: Sequence[dict[str, Any]]) -> list[RatePoint]:
    return [_point(row) for row in rows if row["latencies"] and row["request_rate"]]


def _point(row: dict[str, Any]) -> RatePoint:
    tpot, itl = row["latencies"]["request_gap_ms"], row["latencies"]["token_gap_ms"]
    ttft_p99 = row["latencies"]["first_token_ms"]["p99"]
    return RatePoint(row["subject"], row["request_rate"], ttft_p99, tpot and tpot["mean"], itl and itl["p99"])


def _lowest_rate(rows: Sequence[ServeRow], is_above: Callable[[ServeRow], bool]) -> float | None:
    return min((row.request_rate for row in rows if row.request_rate and is_above(row)), default=None)


def _tpot_mean_ms(row: ServeRow) -> float:
    summary = row.latencies and row.latencies.request_gap_ms
    return summary.mean if summary else 0.0


def _describe_rate(rate: float | None) -> str:
    return "at no rate" if rate is None else f"first at {rate:g} requests/s"
