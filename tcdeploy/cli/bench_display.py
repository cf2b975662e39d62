"""The tables of `tcdeploy bench`, as headers and rows of text; display.py draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tcdeploy.bench.report import FailedRow, Report

NO_VALUE = "-"


class BenchTable(NamedTuple):
    headers: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def tables(report: Report) -> list[BenchTable]:
    """The figures of all that could be measured."""
    rows: list[Any] = [row for row in report.rows if not isinstance(row, FailedRow)]
    headers, cells = _TABLES[report.command]
    if any(getattr(row, "price_per_million_tokens", None) is not None for row in rows):
        priced = BenchTable((*headers, "per 1M tok"), [(*cells(row), _price(row)) for row in rows])
        return [priced, *_breakdown_tables(rows)]
    return [BenchTable(headers, [cells(row) for row in rows]), *_breakdown_tables(rows)]


def remarks(report: Report) -> list[str]:
    """What a reader of the tables has to know: the machine's rates, and who is missing."""
    found = [f"{row.subject}: not measured: {row.reason}" for row in report.rows if isinstance(row, FailedRow)]
    found += report.extra.get("notes", [])
    machine = report.extra.get("machine")
    if machine:
        found.append(
            f"floor: copy {machine['copy_bytes_per_second'] / 1e9:.0f} GB/s, "
            f"{machine['dtype']} products {machine['matmul_flop_per_second'] / 1e12:.3g} TFLOP/s, measured in this run"
        )
    return found


def _decode_cells(row: Any) -> tuple[str, ...]:
    return (
        row.subject,
        str(row.batch),
        str(row.context),
        _number(row.step_ms.p50),
        f"{_number(row.step_ms.p10)}-{_number(row.step_ms.p90)}",
        _number(row.tokens_per_second),
        f"{row.bytes_read / 1e9:.3g}",
        _number(row.floor_ms),
        _percent(row.share_of_floor),
        _number(row.host_us),
    )


def _prefill_cells(row: Any) -> tuple[str, ...]:
    return (
        row.subject,
        str(row.tokens),
        _number(row.first_token_ms.p50),
        f"{_number(row.first_token_ms.p10)}-{_number(row.first_token_ms.p90)}",
        _number(row.device_ms.p50 if row.device_ms else None),
        _number(row.floor_ms),
        _percent(row.share_of_floor),
    )


def _throughput_cells(row: Any) -> tuple[str, ...]:
    engine = row.engine
    return (
        row.subject,
        _number(row.output_tokens_per_second),
        _number(row.total_tokens_per_second),
        _number(row.requests_per_second),
        _percentiles(row.latencies.first_token_ms),
        _percentiles(row.latencies.request_gap_ms),
        _percentiles(row.latencies.token_gap_ms),
        *((str(engine.peak_running), str(engine.preemptions)) if engine else (NO_VALUE, NO_VALUE)),
        *((_number(engine.host_us), f"{engine.compiles}/{engine.captures}") if engine else (NO_VALUE, NO_VALUE)),
    )


def _serve_cells(row: Any) -> tuple[str, ...]:
    times = row.latencies
    return (
        row.subject,
        str(row.requests),
        str(sum(row.failures.values())),
        _number(row.output_tokens_per_second),
        _number(row.requests_per_second),
        *(
            (_percentiles(times.first_token_ms), _percentiles(times.request_gap_ms), _percentiles(times.token_gap_ms))
            if times
            else (NO_VALUE, NO_VALUE, NO_VALUE)
        ),
    )


def _startup_cells(row: Any) -> tuple[str, ...]:
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.stage_seconds.items())
    return row.start, f"{row.first_token_seconds:.1f}", f"{row.process_seconds:.1f}", stages


_TABLES: dict[str, tuple[tuple[str, ...], Callable[[Any], tuple[str, ...]]]] = {
    "decode": (
        ("", "batch", "context", "ms per step", "p10-p90", "tok/s", "GB read", "floor ms", "of floor", "host us"),
        _decode_cells,
    ),
    "prefill": (
        ("", "tokens", "first token ms", "p10-p90", "device ms", "floor ms", "of floor"),
        _prefill_cells,
    ),
    "throughput": (
        ("", "out tok/s", "all tok/s", "req/s", "first token ms 50/90/99", "per request ms/tok", "gap ms 50/90/99",
         "peak", "pre-empted", "host us", "compiles/captures"),
        _throughput_cells,
    ),
    "serve": (
        ("", "requests", "failed", "out tok/s", "req/s", "first token ms 50/90/99", "per request ms/tok",
         "gap ms 50/90/99"),
        _serve_cells,
    ),
    "startup": (("start", "first token s", "process s", "stages"), _startup_cells),
}  # fmt: skip


def _breakdown_tables(rows: list[Any]) -> list[BenchTable]:
    """The kinds of each bucket; the longest kernels of the first one (the JSON has those of all)."""
    broken = [row for row in rows if getattr(row, "breakdown", None)]
    if not broken:
        return []
    headers = ("us in a step", "batch", "step", "kernels", "gaps", "GEMM", "attention", "sampling", "other")
    names = ("step_us", "kernel_us", "gap_us", "gemm_us", "attention_us", "sampling_us", "other_us")
    kinds = [
        (row.subject, str(row.batch), *(_number(getattr(row.breakdown, name)) for name in names)) for row in broken
    ]
    top = [
        (one.name[:80], one.kind, f"{one.count:g}", _number(one.us), _number(one.us / one.count))
        for one in broken[0].breakdown.top
    ]
    longest = (f"kernel at batch {broken[0].batch}", "kind", "runs", "us in a step", "us each")
    return [BenchTable(headers, kinds), BenchTable(longest, top)]


def _number(value: float | None) -> str:
    """Three figures that mean something, and thousands in full."""
    if value is None:
        return NO_VALUE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return NO_VALUE if share is None else f"{share:.0%}"


def _percentiles(summary: Any) -> str:
    return NO_VALUE if summary is None else "/".join(_number(one) for one in (summary.p50, summary.p90, summary.p99))


def _price(row: Any) -> str:
    return _number(row.price_per_million_tokens)
