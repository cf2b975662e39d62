"""The tables of `tcdeploy bench`, as headers and rows of text; display.py prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from tcdeploy.bench.report import FailedRow, Report
from tcdeploy.import_times import describe_imports

NO_VALUE = "-"
Column: TypeAlias = tuple[str, Callable[[Any], str]]  # header, and the cell of a row


class BenchTable(NamedTuple):
    headers: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def tables(report: Report) -> list[BenchTable]:
    """One table of results, without the subjects that failed, and the tables of a kernel breakdown."""
    rows: list[Any] = [row for row in report.rows if not isinstance(row, FailedRow)]
    if report.command == "serve":
        return [_serve_table(rows)]
    headers, cells = _TABLES[report.command]
    if any(getattr(row, "price_per_million_tokens", None) is not None for row in rows):
        priced = BenchTable((*headers, "per 1M tok"), [(*cells(row), _price(row)) for row in rows])
        return [priced, *_breakdown_tables(rows)]
    return [BenchTable(headers, [cells(row) for row in rows]), *_breakdown_tables(rows)]


def remarks(report: Report) -> list[str]:
    """Lines below the tables: failures with their reasons, notes, and the measured rates of the machine."""
    lines = [f"{row.subject}: not measured: {row.reason}" for row in report.rows if isinstance(row, FailedRow)]
    failures: Counter[str] = Counter()
    for row in report.rows:
        if not getattr(row, "kind", ""):  # rows of a kind repeat requests of the row before
            failures.update(getattr(row, "failures", {}))
    lines += [f"failed requests: {count} x {failure}" for failure, count in failures.items()]
    lines += report.extra.get("notes", [])
    machine = report.extra.get("machine")
    if machine:
        lines.append(
            f"floor: copy {machine['copy_bytes_per_second'] / 1e9:.0f} GB/s, "
            f"{machine['dtype']} matmul {machine['matmul_flop_per_second'] / 1e12:.3g} TFLOP/s, measured in this run"
        )
    return lines


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


def _serve_table(rows: list[Any]) -> BenchTable:
    """The table of `bench serve`, with columns for what only some loads have."""
    columns: list[Column] = [("", lambda row: row.subject)]
    if any(row.request_rate for row in rows):
        columns.append(("rate", lambda row: NO_VALUE if row.request_rate is None else f"{row.request_rate:g}"))
    if any(row.kind for row in rows):
        columns.append(("kind", lambda row: row.kind or "all"))
    columns += _SERVE_COLUMNS
    if any(row.cached_prompt_tokens for row in rows):
        columns.append(("cached", lambda row: _percent(row.cached_prompt_tokens / max(row.prompt_tokens, 1))))
    if any(row.goodput for row in rows):
        columns.append(("good req/s", lambda row: _number(row.goodput.requests_per_second)))
        columns.append(("good", lambda row: _percent(row.goodput.share)))
    return BenchTable(tuple(header for header, _ in columns), [[cell(row) for _, cell in columns] for row in rows])


def _startup_cells(row: Any) -> tuple[str, ...]:
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.stage_seconds.items())
    imports = describe_imports(row.import_seconds)
    return row.start, f"{row.first_token_seconds:.1f}", f"{row.process_seconds:.1f}", stages, imports


_TABLES: dict[str, tuple[tuple[str, ...], Callable[[Any], tuple[str, ...]]]] = {
    "decode": (
        ("", "batch", "context", "ms per step", "p10-p90", "tok/s", "GB read", "floor ms", "of floor", "host us"),
        _decode_cells,
    ),
    "prefill": (
        ("", "tokens", "TTFT ms", "p10-p90", "device ms", "floor ms", "of floor"),
        _prefill_cells,
    ),
    "throughput": (
        ("", "out tok/s", "total tok/s", "req/s", "TTFT ms 50/90/99", "TPOT ms 50/90/99", "ITL ms 50/90/99",
         "peak running", "preemptions", "host us", "compiles/captures"),
        _throughput_cells,
    ),
    "startup": (("start", "first token s", "process s", "stages", "imports, in all stages"), _startup_cells),
}  # fmt: skip


_SERVE_COLUMNS: list[Column] = [
    ("requests", lambda row: str(row.requests)),
    ("failed", lambda row: str(sum(row.failures.values()))),
    ("out tok/s", lambda row: _number(row.output_tokens_per_second)),
    ("req/s", lambda row: _number(row.requests_per_second)),
    ("TTFT ms 50/90/99", lambda row: _latency(row, "first_token_ms", "p50", "p90", "p99")),
    ("TPOT ms mean/99", lambda row: _latency(row, "request_gap_ms", "mean", "p99")),
    ("ITL ms 50/99", lambda row: _latency(row, "token_gap_ms", "p50", "p99")),
]


def _latency(row: Any, population: str, *names: str) -> str:
    return NO_VALUE if row.latencies is None else _values(getattr(row.latencies, population), *names)


def _breakdown_tables(rows: list[Any]) -> list[BenchTable]:
    """Time per kernel kind for each bucket, and the longest kernels of the first bucket. The JSON has those of all."""
    profiled = [row for row in rows if getattr(row, "breakdown", None)]
    if not profiled:
        return []
    kind_headers = ("us per step", "batch", "step", "kernels", "gaps", "GEMM", "attention", "sampling", "other")
    columns = ("step_us", "kernel_us", "gap_us", "gemm_us", "attention_us", "sampling_us", "other_us")
    kind_rows = [
        (row.subject, str(row.batch), *(_number(getattr(row.breakdown, column)) for column in columns))
        for row in profiled
    ]
    kernel_headers = (f"kernel at batch {profiled[0].batch}", "kind", "calls", "us per step", "us per call")
    kernel_rows = [
        (kernel.name[:80], kernel.kind, f"{kernel.count:g}", _number(kernel.us), _number(kernel.us / kernel.count))
        for kernel in profiled[0].breakdown.top
    ]
    return [BenchTable(kind_headers, kind_rows), BenchTable(kernel_headers, kernel_rows)]


def _number(value: float | None) -> str:
    """Three significant digits, or all digits of the integer part."""
    if value is None:
        return NO_VALUE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return NO_VALUE if share is None else f"{share:.0%}"


def _percentiles(summary: Any) -> str:
    return _values(summary, "p50", "p90", "p99")


def _values(summary: Any, *names: str) -> str:
    return NO_VALUE if summary is None else "/".join(_number(getattr(summary, name)) for name in names)


def _price(row: Any) -> str:
    return _number(row.price_per_million_tokens)
