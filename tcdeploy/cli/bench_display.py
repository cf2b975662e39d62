"""The tables of `tcdeploy bench`; display.py prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from tcdeploy.bench.report import FailedRow, Report
from tcdeploy.cli.tables import Column, Table, shorten
from tcdeploy.host.stages import describe_imports

NO_VALUE = "-"
MAX_KERNEL_NAME = 80  # characters; C++ templates have names of several hundred
SUBJECT = Column("", "name")
KIND_COLUMNS = (
    Column("us per step", "name"),
    Column("batch"),
    Column("step"),
    Column("kernels", rank=1),
    Column("gaps", rank=2),
    Column("GEMM"),
    Column("attention"),
    Column("sampling", rank=4),
    Column("other", rank=3),
)
BASELINE_MEANINGS = {
    "eager": "transformers' model with its own attention (SDPA) in a plain loop; the uncompiled steps that `compile` "
    "times use the plan's attention instead",
    "generate": "transformers' model with its own attention (SDPA), run by its `generate` with a static cache",
    "region": "attention and MLP compiled as regions of their own, with a CUDA graph for each",
}
ServeColumn: TypeAlias = tuple[Column, Callable[[Any], str]]  # a column, and its cell of a row


def tables(report: Report) -> list[Table]:
    """One table of results, without the subjects that failed, and the tables of a kernel breakdown."""
    rows: list[Any] = [row for row in report.rows if not isinstance(row, FailedRow)]
    if report.command == "serve":
        return [_serve_table(rows)]
    columns, cells = _TABLES[report.command]
    if any(getattr(row, "price_per_million_tokens", None) is not None for row in rows):
        priced = Table((*columns, Column("per 1M tok")), [(*cells(row), _price(row)) for row in rows])
        return [priced, *_breakdown_tables(rows)]
    return [Table(columns, [cells(row) for row in rows]), *_breakdown_tables(rows)]


def remarks(report: Report) -> list[str]:
    """Lines below the tables: failures with their reasons, notes, and the measured rates of the machine."""
    lines = [f"{row.subject}: not measured: {row.reason}" for row in report.rows if isinstance(row, FailedRow)]
    failures: Counter[str] = Counter()
    for row in report.rows:
        if not getattr(row, "kind", ""):  # rows of a kind repeat requests of the row before
            failures.update(getattr(row, "failures", {}))
    lines += [f"failed requests: {count} x {failure}" for failure, count in failures.items()]
    subjects = dict.fromkeys(row.subject for row in report.rows)
    lines += [f"{name}: {BASELINE_MEANINGS[name]}" for name in subjects if name in BASELINE_MEANINGS]
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


def _serve_table(rows: list[Any]) -> Table:
    """The table of `bench serve`, with columns for what only some loads have."""
    columns: list[ServeColumn] = [(SUBJECT, lambda row: row.subject)]
    if any(row.request_rate for row in rows):
        columns.append((Column("rate"), lambda row: NO_VALUE if row.request_rate is None else f"{row.request_rate:g}"))
    if any(row.kind for row in rows):
        columns.append((Column("kind", "name"), lambda row: row.kind or "all"))
    columns += _SERVE_COLUMNS
    if any(row.cached_prompt_tokens for row in rows):
        columns.append(
            (Column("cached", rank=3), lambda row: _percent(row.cached_prompt_tokens / max(row.prompt_tokens, 1)))
        )
    if any(row.goodput for row in rows):
        columns.append((Column("good req/s", rank=4), lambda row: _number(row.goodput.requests_per_second)))
        columns.append((Column("good"), lambda row: _percent(row.goodput.share)))
    return Table(tuple(column for column, _ in columns), [[cell(row) for _, cell in columns] for row in rows])


def _startup_cells(row: Any) -> tuple[str, ...]:
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.stage_seconds.items())
    imports = describe_imports(row.import_seconds)
    return row.start, f"{row.first_token_seconds:.1f}", f"{row.process_seconds:.1f}", stages, imports


_TABLES: dict[str, tuple[tuple[Column, ...], Callable[[Any], tuple[str, ...]]]] = {
    "decode": (
        (
            SUBJECT,
            Column("batch"),
            Column("context", rank=5),
            Column("ms per step"),
            Column("p10-p90", rank=3),
            Column("tok/s"),
            Column("GB read", rank=6),
            Column("floor ms", rank=4),
            Column("of floor", rank=1),
            Column("host us", rank=2),
        ),
        _decode_cells,
    ),
    "prefill": (
        (
            SUBJECT,
            Column("tokens"),
            Column("TTFT ms"),
            Column("p10-p90", rank=2),
            Column("device ms", rank=3),
            Column("floor ms", rank=4),
            Column("of floor", rank=1),
        ),
        _prefill_cells,
    ),
    "throughput": (
        (
            SUBJECT,
            Column("out tok/s"),
            Column("total tok/s", rank=5),
            Column("req/s", rank=3),
            Column("TTFT ms 50/90/99"),
            Column("TPOT ms 50/90/99", rank=1),
            Column("ITL ms 50/90/99", rank=2),
            Column("peak running", rank=6),
            Column("preemptions", rank=4),
            Column("host us", rank=7),
            Column("compiles/captures", rank=8),
        ),
        _throughput_cells,
    ),
    "startup": (
        (
            Column("start", "name"),
            Column("first token s"),
            Column("process s"),
            Column("stages", "text"),
            Column("imports in all stages", "text", rank=1),
        ),
        _startup_cells,
    ),
}


_SERVE_COLUMNS: list[ServeColumn] = [
    (Column("requests", rank=6), lambda row: str(row.requests)),
    (Column("failed"), lambda row: str(sum(row.failures.values()))),
    (Column("out tok/s"), lambda row: _number(row.output_tokens_per_second)),
    (Column("req/s", rank=5), lambda row: _number(row.requests_per_second)),
    (Column("TTFT ms 50/90/99"), lambda row: _latency(row, "first_token_ms", "p50", "p90", "p99")),
    (Column("TPOT ms mean/99", rank=1), lambda row: _latency(row, "request_gap_ms", "mean", "p99")),
    (Column("ITL ms 50/99", rank=2), lambda row: _latency(row, "token_gap_ms", "p50", "p99")),
]


def _latency(row: Any, population: str, *names: str) -> str:
    return NO_VALUE if row.latencies is None else _values(getattr(row.latencies, population), *names)


def _breakdown_tables(rows: list[Any]) -> list[Table]:
    """Time per kernel kind for each bucket, and the longest kernels of the first bucket. The JSON has those of all."""
    profiled = [row for row in rows if getattr(row, "breakdown", None)]
    if not profiled:
        return []
    columns = ("step_us", "kernel_us", "gap_us", "gemm_us", "attention_us", "sampling_us", "other_us")
    kind_rows = [
        (row.subject, str(row.batch), *(_number(getattr(row.breakdown, column)) for column in columns))
        for row in profiled
    ]
    kernel_columns = (
        Column(f"kernel at batch {profiled[0].batch}", "long name"),
        Column("kind", "name"),
        Column("calls", rank=1),
        Column("us per step"),
        Column("us per call", rank=2),
    )
    kernel_rows = [
        (
            shorten(kernel.name, MAX_KERNEL_NAME),
            kernel.kind,
            f"{kernel.count:g}",
            _number(kernel.us),
            _number(kernel.us / kernel.count),
        )
        for kernel in profiled[0].breakdown.top
    ]
    return [Table(KIND_COLUMNS, kind_rows), Table(kernel_columns, kernel_rows)]


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
