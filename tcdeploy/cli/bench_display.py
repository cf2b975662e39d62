"""The output of a report of `tcdeploy bench`: its document, tables and plot. display.py prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tcdeploy.bench.report import FailedRow, Report
from tcdeploy.cli.tables import NO_VALUE, Cell, Column, Table, optional, shorten, tabulate
from tcdeploy.errors import UsageError
from tcdeploy.host.stages import describe_imports

MAX_KERNEL_NAME = 80  # characters; C++ templates have names of several hundred
BASELINE_MEANINGS = {
    "eager": "transformers' model with its own attention (SDPA) in a plain loop; the uncompiled steps that `compile` "
    "times use the plan's attention instead",
    "generate": "transformers' model with its own attention (SDPA), run by its `generate` with a static cache",
    "region": "attention and MLP compiled as regions of their own, with a CUDA graph for each",
}


def publish(report: Report, plot: str | None, output: str | None, as_json: bool) -> None:
    """Print and write the report, then plot it: an error while plotting must not lose the measurements."""
    publish_document(report, output, as_json)
    if plot is not None:
        from tcdeploy.bench.plot import draw

        draw(report, plot)


def publish_document(report: Report, output: str | None, as_json: bool) -> None:
    """Print the report, and write its document to `output`. If that fails, the document is printed."""
    from tcdeploy.cli import display

    document = display.json_document(f"bench {report.command}", **report.document())
    is_printed = display.show_bench(tables(report), remarks(report), document, as_json)
    if output is None:
        return
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(document + "\n")
    except OSError as error:
        if not is_printed:
            print(document)
        raise UsageError(f"{output} cannot be written: {error.strerror}", "the document is on stdout") from error


def tables(report: Report) -> list[Table]:
    """One table of results, without the subjects that failed, and the tables of a kernel breakdown."""
    rows: list[Any] = [row for row in report.rows if not isinstance(row, FailedRow)]
    columns = [*_COLUMNS[report.command], *_rare_columns(rows)]
    if report.command == "serve":
        columns = [*_load_columns(rows), *columns]
    if report.command != "startup":
        columns = [(Column("", "name"), lambda row: row.subject), *columns]
    return [tabulate(rows, columns), *_breakdown_tables([row for row in rows if getattr(row, "breakdown", None)])]


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


def _load_columns(rows: list[Any]) -> list[Cell]:
    """Columns of `bench serve` that name the load, if there is more than one."""
    columns: list[Cell] = []
    if any(row.request_rate for row in rows):
        columns.append((Column("rate"), lambda row: optional(row.request_rate, "g")))
    if any(row.kind for row in rows):
        columns.append((Column("kind", "name"), lambda row: row.kind or "all"))
    return columns


def _rare_columns(rows: list[Any]) -> list[Cell]:
    """Columns at the end, of values that only some reports have."""
    columns: list[Cell] = []
    if any(getattr(row, "cached_prompt_tokens", 0) for row in rows):
        columns.append(
            (Column("cached", rank=3), lambda row: f"{row.cached_prompt_tokens / max(row.prompt_tokens, 1):.0%}")
        )
    if any(getattr(row, "goodput", None) for row in rows):
        columns.append((Column("good req/s", rank=4), lambda row: _number(row.goodput.requests_per_second)))
        columns.append((Column("good"), lambda row: optional(row.goodput.share, ".0%")))
    return columns


def _breakdown_tables(rows: list[Any]) -> list[Table]:
    """Time per kernel kind for each bucket, and the longest kernels of the first bucket. The JSON has those of all."""
    if not rows:
        return []
    kernel_name = Column(f"kernel at batch {rows[0].batch}", "long name")
    kernel_columns = [(kernel_name, lambda kernel: shorten(kernel.name, MAX_KERNEL_NAME)), *_KERNEL_COLUMNS]
    return [tabulate(rows, _KIND_COLUMNS), tabulate(rows[0].breakdown.top, kernel_columns)]


def _number(value: float | None) -> str:
    """Three significant digits, or all digits of the integer part."""
    if value is None:
        return NO_VALUE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _spread(summary: Any) -> str:
    return f"{_number(summary.p10)}-{_number(summary.p90)}"


def _values(summary: Any, *names: str) -> str:
    return NO_VALUE if summary is None else "/".join(_number(getattr(summary, name)) for name in names)


def _latency(row: Any, population: str, *names: str) -> str:
    return NO_VALUE if row.latencies is None else _values(getattr(row.latencies, population), *names)


def _stages(row: Any) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.stage_seconds.items())


def _of_engine(value: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda row: value(row.engine) if row.engine else NO_VALUE


QUANTILES = ("p50", "p90", "p99")
QUALITY_CELLS: list[Cell] = [
    (Column("perplexity"), lambda row: f"{row.perplexity:.5g}"),
    (Column("nats/token", rank=1), lambda row: f"{row.nats_per_token:.5f}"),
    (Column("KL nats"), lambda row: optional(row.kl_nats, ".3g")),
    (Column("top-1"), lambda row: optional(row.top1_agreement, ".2%")),
    (Column("model", "name", rank=2), lambda row: row.model),
]
_COLUMNS: dict[str, list[Cell]] = {
    "decode": [
        (Column("batch"), lambda row: str(row.batch)),
        (Column("context", rank=5), lambda row: str(row.context)),
        (Column("ms per step"), lambda row: _number(row.step_ms.p50)),
        (Column("p10-p90", rank=3), lambda row: _spread(row.step_ms)),
        (Column("tok/s"), lambda row: _number(row.tokens_per_second)),
        (Column("GB moved", rank=6), lambda row: f"{row.bytes_moved / 1e9:.3g}"),
        (Column("floor ms", rank=4), lambda row: _number(row.floor_ms)),
        (Column("of floor", rank=1), lambda row: optional(row.share_of_floor, ".0%")),
        (Column("host us", rank=2), lambda row: _number(row.host_us)),
    ],
    "prefill": [
        (Column("tokens"), lambda row: str(row.tokens)),
        (Column("TTFT ms"), lambda row: _number(row.first_token_ms.p50)),
        (Column("p10-p90", rank=2), lambda row: _spread(row.first_token_ms)),
        (Column("device ms", rank=3), lambda row: _values(row.device_ms, "p50")),
        (Column("floor ms", rank=4), lambda row: _number(row.floor_ms)),
        (Column("of floor", rank=1), lambda row: optional(row.share_of_floor, ".0%")),
    ],
    "throughput": [
        (Column("out tok/s"), lambda row: _number(row.output_tokens_per_second)),
        (Column("total tok/s", rank=5), lambda row: _number(row.total_tokens_per_second)),
        (Column("req/s", rank=3), lambda row: _number(row.requests_per_second)),
        (Column("TTFT ms 50/90/99"), lambda row: _latency(row, "first_token_ms", *QUANTILES)),
        (Column("TPOT ms 50/90/99", rank=1), lambda row: _latency(row, "request_gap_ms", *QUANTILES)),
        (Column("ITL ms 50/90/99", rank=2), lambda row: _latency(row, "token_gap_ms", *QUANTILES)),
        (Column("peak running", rank=6), _of_engine(lambda engine: str(engine.peak_running))),
        (Column("preemptions", rank=4), _of_engine(lambda engine: str(engine.preemptions))),
        (Column("host us", rank=7), _of_engine(lambda engine: _number(engine.host_us))),
        (Column("compiles/captures", rank=8), _of_engine(lambda engine: f"{engine.compiles}/{engine.captures}")),
    ],
    "quality": QUALITY_CELLS,
    "startup": [
        (Column("start", "name"), lambda row: row.start),
        (Column("process s"), lambda row: optional(row.process_seconds, ".2f")),
        (Column("ready s"), lambda row: optional(row.ready_seconds, ".2f")),
        (Column("first token s"), lambda row: optional(row.first_token_seconds, ".2f")),
        (Column("stages", "text"), _stages),
        (Column("imports in all stages", "text", rank=1), lambda row: describe_imports(row.import_seconds)),
    ],
    "serve": [
        (Column("requests", rank=6), lambda row: str(row.requests)),
        (Column("failed"), lambda row: str(sum(row.failures.values()))),
        (Column("out tok/s"), lambda row: _number(row.output_tokens_per_second)),
        (Column("req/s", rank=5), lambda row: _number(row.requests_per_second)),
        (Column("TTFT ms 50/90/99"), lambda row: _latency(row, "first_token_ms", *QUANTILES)),
        (Column("TPOT ms mean/99", rank=1), lambda row: _latency(row, "request_gap_ms", "mean", "p99")),
        (Column("ITL ms 50/99", rank=2), lambda row: _latency(row, "token_gap_ms", "p50", "p99")),
    ],
}
_KIND_COLUMNS: list[Cell] = [
    (Column("us per step", "name"), lambda row: row.subject),
    (Column("batch"), lambda row: str(row.batch)),
    (Column("step"), lambda row: _number(row.breakdown.step_us)),
    (Column("kernels", rank=1), lambda row: _number(row.breakdown.kernel_us)),
    (Column("gaps", rank=2), lambda row: _number(row.breakdown.gap_us)),
    (Column("GEMM"), lambda row: _number(row.breakdown.gemm_us)),
    (Column("attention"), lambda row: _number(row.breakdown.attention_us)),
    (Column("sampling", rank=4), lambda row: _number(row.breakdown.sampling_us)),
    (Column("other", rank=3), lambda row: _number(row.breakdown.other_us)),
]
_KERNEL_COLUMNS: list[Cell] = [
    (Column("kind", "name"), lambda kernel: kernel.kind),
    (Column("calls", rank=1), lambda kernel: f"{kernel.count:g}"),
    (Column("us per step"), lambda kernel: _number(kernel.us)),
    (Column("us per call", rank=2), lambda kernel: _number(kernel.us / kernel.count)),
]
