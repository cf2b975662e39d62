"""Every table of every command, drawn at the widths of terminals: no number and no name is broken over two lines."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.bench.breakdown import Breakdown, KernelTime
from tcdeploy.bench.decode import DecodeRow
from tcdeploy.bench.prefill import PrefillRow
from tcdeploy.bench.quality import QualityRow
from tcdeploy.bench.report import Report
from tcdeploy.bench.serving import ServeRow
from tcdeploy.bench.startup import StartupRow
from tcdeploy.bench.stats import Goodput, Latencies, Summary
from tcdeploy.bench.throughput import EngineCounts, ThroughputRow
from tcdeploy.bundle.verify import BucketReplay
from tcdeploy.bundle.why import BucketForecast
from tcdeploy.cache.inventory import CachedPlan
from tcdeploy.cli.bench_display import tables
from tcdeploy.cli.cache_display import FORECAST_CELLS, PLAN_CELLS, REPLAY_CELLS, difference_table, usage_table
from tcdeploy.cli.display import draw_table
from tcdeploy.cli.explain_display import kernels_table, payoff_table, regions_table
from tcdeploy.cli.start_tables import COMPILE_CELLS, WARM_CELLS, plan_table
from tcdeploy.cli.tables import CUT, Column, Table, as_blocks, fit, tabulate, wrap
from tcdeploy.explain.break_even import BucketPayoff, Payoff
from tcdeploy.explain.findings import RegionTrace
from tcdeploy.explain.kernels import BucketKernels, KernelRow
from tcdeploy.planning.bucket_record import BucketRecord, Parity
from tcdeploy.planning.decision import Decision
from tcdeploy.planning.environment import Difference

WIDTHS = (60, 80, 100, 120, 200)
MODEL = "meta-llama/Llama-3.2-11B-Vision-Instruct"
BUCKETS = ("prefill:128", "prefill:16384", "decode:256")
KERNEL = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Mainloop, 2>>>"
SUMMARY = Summary(count=1000, p10=1034.2, p50=1203.4, p90=4310.9, p99=12034.5, mean=1403.1, max=20000.0)
LATENCIES = Latencies(SUMMARY, SUMMARY, SUMMARY)
COUNTS = {"prefill": 1, "decode": 1234}
GREEDY: Any = SimpleNamespace()


def record(bucket: str) -> BucketRecord:
    parity = Parity(4, "float64", 1.234e-05, 0.1, 1.1e-09, 1e-9, 2.345e-05, 1.2e-09, 1.0, 1.0, 1.0, 0, 1, False, True)
    return BucketRecord(
        bucket, "unknown", 1234.56, 0.12, 3.45, 4, 12, 3, 4, 2, 0, True, parity, GREEDY, GREEDY, 71 << 30,
        "skinny+pdl+combo", graph_memory_bytes=1 << 30, cold_seconds=987.65, eager_ms=16543.21, compiled_ms=1234.56,
    )  # fmt: skip


def plan() -> Any:
    decisions = (
        Decision("prefill attention", "flash-attention-3", "the fastest backend for this GPU, head size and dtype"),
        Decision("decode buckets", "1,2,4,8,16,32,64,128", "default on a GPU, up to the KV cache's rows"),
        Decision("KV blocks", "123,456 (61.2 GiB)", "what --memory-fraction 0.9 leaves beside weights and workspace"),
        Decision("cache folder", "/home/user/.cache/tcdeploy", "requested"),
    )
    return SimpleNamespace(model=MODEL, decisions=decisions)


def cached_plan(dtype: str) -> CachedPlan:
    return CachedPlan(
        "689c5b5d9c175ad1", MODEL, dtype, "jit", "reduce-overhead", BUCKETS, 12345, 123 << 30, 4 << 30, 2592000.0, True,
        True, False, True, True, 1234.5,
    )  # fmt: skip


def bench_tables(command: str, *rows: Any) -> dict[str, Table]:
    drawn = tables(Report(command, {}, {}, {}, rows))
    return {f"bench {command} {number}": table for number, table in enumerate(drawn)}


def decode_row(subject: str) -> DecodeRow:
    kernels = (KernelTime(KERNEL, "attention", 32.5, 1234.5), KernelTime("triton_red_fused_3", "other", 65, 23.4))
    breakdown = Breakdown(5, 12345.6, 12300.1, 45.6, 10987.6, 1234.5, 23.4, 345.6, kernels)
    return DecodeRow(subject, 256, 131072, SUMMARY, 71 << 30, 1234.5, 0.876, 1234567.8, 1.2, 1234.5, 1.2, breakdown)


def every_table() -> dict[str, Table]:
    """By name, filled with long names and large numbers."""
    records = [record(bucket) for bucket in BUCKETS]
    engine = EngineCounts(12345, 256, 1234, 0, 1234.5, 12, 128)
    forecasts = tuple(
        BucketForecast(bucket, bucket == "decode:256", ("torch 2.11.0 instead of 2.13.1", "plan.region"), 1234.5, True)
        for bucket in BUCKETS
    )
    serve = ServeRow(MODEL, 12345, {"503": 1234}, 60.0, 1, 123456.7, 1234.5, LATENCIES, 12.5, "structured", 200, 100,
                     Goodput(10, 0.987, 1234.5))  # fmt: skip
    replays = [BucketReplay(bucket, 256, 12, 0.123, False, "12 tokens differ") for bucket in BUCKETS]
    torch_versions = Difference("environment.torch", "2.11.0+cu128", "2.13.1+cu130")
    throughput = ThroughputRow("tcdeploy", 1, 1.0, 123456.7, 1234567.8, 1234.5, LATENCIES, (), engine)
    stages = {"import": 12.3, "decide": 0.4, "load": 101.2, "reference": 4.5, "compile": 1234.5, "first token": 1.2}
    return {
        "plan": plan_table(plan()),
        "compile": tabulate(records, COMPILE_CELLS),
        "warm": tabulate(records, WARM_CELLS),
        "cache ls": tabulate([cached_plan("bfloat16"), cached_plan("float32")], PLAN_CELLS),
        "cache du": usage_table({"inductor": (12345, 123 << 30), "triton": (2, 0)}),
        "cache why": tabulate(forecasts, FORECAST_CELLS),
        "cache verify": tabulate(replays, REPLAY_CELLS),
        "cache diff": difference_table([torch_versions], "here", "there"),
        "explain": regions_table([RegionTrace("self_attn/0", "Gemma3DecoderLayer", 128, COUNTS, COUNTS, COUNTS)]),
        "explain kernels": kernels_table(BucketKernels("decode:256", 12345.6, (KernelRow(KERNEL, 128, 12345.6, 1.0),))),
        "explain payoff": payoff_table(
            Payoff(tuple(BucketPayoff(bucket, 256, 16543.21, 1234.56, 987.65, 12.34) for bucket in BUCKETS), GREEDY)
        ),
        **bench_tables("decode", decode_row("tcdeploy"), decode_row("eager")),
        **bench_tables("prefill", PrefillRow("tcdeploy", 131072, SUMMARY, SUMMARY, 1234.5, 0.123)),
        **bench_tables("throughput", throughput),
        **bench_tables("quality", QualityRow("tcdeploy", MODEL, 12345.6, 9.42105, 0.00123456, 0.98765)),
        **bench_tables("serve", serve),
        **bench_tables(
            "startup",
            StartupRow("tcdeploy", "cold", 1240.1, 1233.1, 1234.5, stages, {"torch": 12.3, "transformers": 4.5}),
        ),
    }


TABLES = every_table()


def lines_of(table: Table, width: int | None) -> list[str]:
    out = io.StringIO()
    draw_table(table, width, out)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def omission(lines: list[str]) -> list[str]:
    """The lines that name the omitted columns."""
    return lines[next((number for number, line in enumerate(lines) if line.startswith("omitted at")), len(lines)) :]


def cells(table: Table, headers: set[str]) -> list[tuple[Column, str]]:
    return [
        (column, cell)
        for row in table.rows
        for column, cell in zip(table.columns, row, strict=True)
        if column.header in headers
    ]


def shown_and_omitted(table: Table, lines: list[str]) -> tuple[set[str], set[str]]:
    headers = {column.header for column in table.columns}
    note = " ".join(line.strip() for line in omission(lines))
    omitted = set(note.partition(": ")[2].split(", ")) - {""}
    assert omitted <= headers
    return headers - omitted, omitted


@pytest.mark.parametrize("name", TABLES)
def test_no_number_or_name_is_broken_at_any_width(name: str) -> None:
    """Each cell of a shown column is whole on one line; text has all its words, and shortened names end with a sign."""
    table = TABLES[name]
    for width in (*range(30, 200, 5), *WIDTHS, None):
        lines = lines_of(table, width)
        shown, omitted = shown_and_omitted(table, lines)
        assert all(column.rank for column in table.columns if column.header in omitted)
        words = " ".join(lines).split()
        for column, cell in cells(table, shown):
            if column.kind == "text":
                assert set(cell.split()) <= set(words), (width, cell)
            elif column.kind == "long name" and not any(cell in line for line in lines):
                cut = [word for line in lines for word in [line.partition(CUT)[0]] if CUT in line]
                assert any(len(word) > 10 and cell.startswith(word) for word in cut), (width, cell)
            else:
                assert any(cell in line for line in lines), (width, cell)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    assert max(map(len, lines_of(TABLES[name], width))) <= width


def test_a_table_shows_more_columns_on_a_wider_terminal() -> None:
    for name, table in TABLES.items():
        counts = [len(shown_and_omitted(table, lines_of(table, width))[0]) for width in WIDTHS if fit(table, width)]
        assert counts == sorted(counts), name
        assert counts[-1] == len(table.columns) and shown_and_omitted(table, lines_of(table, None))[1] == set(), name
    assert fit(TABLES["warm"], 80) is not None and fit(TABLES["compile"], 60) is not None


def test_the_least_important_columns_are_omitted_first_and_named() -> None:
    table = Table((Column("a", rank=1), Column("b"), Column("c", rank=2)), [("1000", "2000", "3000")])
    assert lines_of(table, 16) == ["   a     b     c", "1000  2000  3000"]
    assert lines_of(table, 15) == ["   a     b", "1000  2000", "omitted at a", "  width of 15:", "  c"]
    assert " ".join(lines_of(table, 9)[2:]).split() == "omitted at a width of 9: a, c".split()


def test_rows_become_blocks_of_lines_if_the_needed_columns_do_not_fit() -> None:
    columns = (Column("", "name"), Column("MB"), Column("why", "text"))
    table = Table(columns, [("llama", "1,234.56", "one two three four"), ("qwen", "7", "none")])
    assert lines_of(table, 14) == as_blocks(table, 14)
    assert as_blocks(table, 14) == [
        "llama", "MB: 1,234.56", "why: one two", "  three four", "", "qwen", "MB: 7", "why: none"
    ]  # fmt: skip


def test_sentences_wrap_at_spaces_but_not_between_a_number_and_its_unit() -> None:
    stages = "stages: import 3.5 s, load 12.25 s; weights 1.5 GiB read"
    assert wrap(stages, 17) == ["stages: import", "  3.5 s, load", "  12.25 s;", "  weights 1.5 GiB", "  read"]
    assert wrap("folder /home/user/.cache/tcdeploy-2", 12) == ["folder", "  /home/user/.cache/tcdeploy-2"]


def test_output_that_is_not_a_terminal_has_a_line_per_row_up_to_the_plain_width() -> None:
    assert len(lines_of(TABLES["compile"], None)) == 1 + len(BUCKETS)
    assert len(lines_of(TABLES["warm"], None)) == 1 + len(BUCKETS)
    header, *_ = lines_of(TABLES["bench throughput 0"], None)
    assert "ITL ms 50/90/99" in header and "compiles/captures" in header


def test_cells_are_printed_as_they_are() -> None:
    """A cell in brackets is not taken for rich's markup."""
    assert "[bold]x[/bold]" in lines_of(Table((Column("name", "name"),), [("[bold]x[/bold]",)]), 80)[1]
