"""Every kind of report can be plotted; skipped if matplotlib is not installed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bench.decode import DecodeRow
from tcdeploy.bench.plot import draw, draw_figure, draw_rates
from tcdeploy.bench.prefill import PrefillRow
from tcdeploy.bench.report import FailedRow, Report, Row
from tcdeploy.bench.serving import ServeRow
from tcdeploy.bench.startup import StartupRow
from tcdeploy.bench.stats import Latencies, RequestTiming, Summary, latencies
from tcdeploy.bench.throughput import ThroughputRow

pytest.importorskip("matplotlib", reason="the plot extra is not installed")
MS = Summary(3, 1.0, 2.0, 3.0, 3.0, 2.0, 3.0)
SERVED = [RequestTiming(0.0, [1.0, 2.0]), RequestTiming(0.5, [1.5, 2.5])]
ROWS: dict[str, list[Row]] = {
    "decode": [
        DecodeRow("tcdeploy", 1, 512, MS, 10**9, 0.5, 0.25, 500.0),
        DecodeRow("tcdeploy", 4, 512, MS, 10**9, 0.6, 0.3, None),
        DecodeRow("eager", 1, 512, MS, 10**9, None, None, 100.0),
        FailedRow("generate", "why"),
    ],
    "prefill": [PrefillRow("tcdeploy", 128, MS, MS, 0.5, 0.25), PrefillRow("eager", 512, MS, None, None, None)],
    "throughput": [
        ThroughputRow(
            "tcdeploy", 2, 2.5, 1.6, 9.6, 0.8, latencies(SERVED), ((0.0, 1.0, 2.0), (0.5, 1.5, 2.5)), None,
            ((1.0, 1, 1), (2.5, 0, 0)),
        )
    ],
    "startup": [
        StartupRow("tcdeploy", "cold", 3.0, None, None, {"import": 1.0, "compile": 2.0}, {}),
        StartupRow("tcdeploy", "warm", None, 0.9, 1.0, {"import": 1.0}, {}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("command", ROWS)
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_every_report_can_be_plotted(command: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"figure{suffix}"
    draw(Report(command, {"gpu": "", "cpu": "AVX512"}, {"model": "m"}, {}, ROWS[command]), str(path))
    begins = path.read_bytes()[:60]
    assert begins.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert path.stat().st_size > 5000


def figure_of(command: str, environment: dict[str, str]) -> Any:
    return draw_figure(Report(command, environment, {"model": "m"}, {}, ROWS[command]))


def labels(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_an_upper_bound_is_a_ceiling_and_a_lower_bound_a_floor() -> None:
    on_gpu = {"gpu": "H100", "cpu": "AVX512"}
    assert labels(figure_of("decode", on_gpu).axes[0]) == ["tcdeploy", "eager", "ceiling"]
    assert labels(figure_of("prefill", on_gpu).axes[0]) == ["tcdeploy", "eager", "floor"]


def test_the_ticks_of_running_requests_are_whole_numbers() -> None:
    axis = figure_of("throughput", {"gpu": "H100", "cpu": "AVX512"}).axes[1]
    ticks = [float(tick) for tick in axis.get_yticks()]
    assert axis.get_ylim()[1] < 2 and all(tick.is_integer() for tick in ticks) and 0 in ticks


def test_the_title_names_the_gpu_or_the_cpu() -> None:
    titles = [
        figure_of("startup", {"gpu": gpu, "cpu": "AVX512", "cpu_name": "AMD EPYC"}).get_suptitle()
        for gpu in ("H100", "")
    ]
    assert titles == ["m on H100", "m on AMD EPYC (AVX512)"]


def test_latencies_of_two_servers_can_be_plotted_over_the_rate(tmp_path: Path) -> None:
    """One point has no time per token: its responses were single tokens."""
    several, single = latencies(SERVED), Latencies(MS, None, None)
    rows = [
        asdict(ServeRow(subject, 9, {}, 1.0, 9, 9.0, 9.0, times, rate))
        for subject, rate, times in (
            ("ours", 8.0, several), ("ours", 4.0, several), ("other", 4.0, single), ("other", 8.0, several),
        )
    ]  # fmt: skip
    path = tmp_path / "rates.svg"
    draw_rates(rows, (500.0, 20.0), str(path))
    assert path.read_bytes().startswith(b"<?xml") and path.stat().st_size > 5000
