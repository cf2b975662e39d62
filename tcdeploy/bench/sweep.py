"""Runs the load of `bench serve`, once or at each rate of a sweep, and says where latencies exceed their limits.

The loads of a sweep run one after another. The limits are on the 99th percentile of the first token and on the mean
time per token, which grow with the length of the run once requests arrive faster than they complete. Does not import
torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from tcdeploy.bench.report import Report
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.serving import LOOP_FACTORY, ServeRow, run_load
from tcdeploy.errors import UsageError


def run(settings: ServeSettings, on_rate: Callable[[float], None]) -> Report:
    """`on_rate` is called before each rate of a sweep. The report has a row per rate."""
    rows: list[ServeRow] = []
    for rate in settings.sweep or (None,):
        if rate is not None:
            on_rate(rate)
        with asyncio.Runner(loop_factory=LOOP_FACTORY) as runner:
            rows += runner.run(run_load(settings if rate is None else settings.at_rate(rate)))
    public_settings = {name: value for name, value in dataclasses.asdict(settings).items() if name != "api_key"}
    extra = describe_limits(rows, settings.ttft_limit, settings.tpot_limit) if settings.sweep else {}
    return Report("serve", {}, {}, public_settings, rows, extra)


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


def read_rows(path: str) -> list[dict[str, Any]]:
    """The rows of the JSON document of an earlier sweep that can be plotted. Raises UsageError if there are none."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = plotted_rows(json.load(file)["rows"])
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "--compare FILE") from None
    except (ValueError, KeyError, TypeError):
        rows = []
    if not rows:
        hint = f"tcdeploy bench serve --sweep 4,8 --output {path}"
        raise UsageError(f"{path} is not the JSON document of a sweep", hint)
    return rows


def plotted_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those of a rate at which no request succeeded. Raises KeyError and TypeError."""
    return [row for row in rows if row["latencies"] and row["request_rate"]]


def merge_rows(measured: list[dict[str, Any]], compared: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All rows. A server of a compared file (path: rows) whose name is taken gets the path added to its name."""
    merged = list(measured)
    for path, rows in compared.items():
        taken = {row["subject"] for row in merged}
        merged += [{**row, "subject": f"{row['subject']} ({path})"} if row["subject"] in taken else row for row in rows]
    return merged


def _lowest_rate(rows: Sequence[ServeRow], is_above: Callable[[ServeRow], bool]) -> float | None:
    return min((row.request_rate for row in rows if row.request_rate and is_above(row)), default=None)


def _tpot_mean_ms(row: ServeRow) -> float:
    summary = row.latencies and row.latencies.request_gap_ms
    return summary.mean if summary else 0.0


def _describe_rate(rate: float | None) -> str:
    return "at no rate" if rate is None else f"first at {rate:g} requests/s"
