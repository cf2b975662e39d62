"""A sweep over rates against a fake server, and where it exceeds its limits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tcdeploy.bench import serving
from tcdeploy.bench.report import Report
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.serving import ServeRow
from tcdeploy.bench.stats import RequestTiming, latencies
from tcdeploy.errors import UsageError
from tests.bench.fake_server import FakeServer, run_in_thread


def make_row(rate: float, ttft_ms: float, tpot_ms: float, failures: int = 0) -> ServeRow:
    timing = RequestTiming(0.0, [ttft_ms / 1e3, (ttft_ms + tpot_ms) / 1e3])
    return ServeRow("m", 1, {"HTTP 503": failures} if failures else {}, 1.0, 2, 2.0, 1.0, latencies([timing]), rate)


ROWS = [make_row(4, 100, 8), make_row(8, 200, 21), make_row(12, 501, 30), make_row(16, 900, 40, failures=2)]


def test_the_lowest_rate_above_each_limit_is_reported() -> None:
    described = serving.describe_limits(ROWS, ttft_limit=500, tpot_limit=20)
    assert described["sweep"] == {
        "ttft_limit_ms": 500, "tpot_limit_ms": 20, "ttft_limit_rate": 12, "tpot_limit_rate": 8, "limit_rate": 8,
        "failing_rate": 16,
    }  # fmt: skip
    assert described["notes"] == [
        "first token, p99, above 500 ms: first at 12 requests/s",
        "time per token, mean, above 20 ms: first at 8 requests/s",
        "requests failed: first at 16 requests/s",
    ]


def test_a_limit_may_be_met_at_every_rate() -> None:
    described = serving.describe_limits(ROWS[:1], ttft_limit=500, tpot_limit=20)
    assert described["sweep"]["limit_rate"] is described["sweep"]["failing_rate"] is None
    assert described["notes"][0].endswith(": at no rate")


def test_a_rate_without_a_response_exceeds_both_limits() -> None:
    broken = dataclasses.replace(make_row(2, 1, 1, failures=1), latencies=None)
    limits = serving.describe_limits([broken], ttft_limit=500, tpot_limit=20)["sweep"]
    assert limits["ttft_limit_rate"] == limits["tpot_limit_rate"] == limits["failing_rate"] == 2


def test_rows_of_an_earlier_document_are_those_of_its_report(tmp_path: Path) -> None:
    report = Report("serve", {}, {}, {}, [*ROWS, dataclasses.replace(ROWS[0], latencies=None)])
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(report.document()))
    rows = serving.read_rows(str(path))
    assert rows == serving.plotted_rows(report.document()["rows"]) and len(rows) == 4
    assert (rows[1]["subject"], rows[1]["request_rate"]) == ("m", 8)
    assert rows[1]["latencies"]["first_token_ms"]["p99"] == pytest.approx(200)


def test_servers_of_the_same_name_stay_separate_in_a_plot() -> None:
    ours, other = {"subject": "m", "request_rate": 4.0}, {"subject": "v", "request_rate": 4.0}
    merged = serving.merge_rows([ours], {"a.json": [ours, other], "b.json": [other]})
    assert [row["subject"] for row in merged] == ["m", "m (a.json)", "v", "v (b.json)"]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"rows": []}', '{"rows": [{"subject": "a"}]}',
        '{"rows": [{"subject": "a", "request_rate": 1, "latencies": {"p50": 1}}]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="other.json is not the JSON document of a sweep"):
        serving.read_rows(str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        serving.read_rows(str(tmp_path / "none.json"))


def test_a_saturated_rate_has_a_long_first_token() -> None:
    """The server has one slot of 40 ms per request: the last of eight requests waits for at least 280 ms."""
    rates: list[float] = []
    load = {"requests": 8, "input_length": 4, "output_length": 4, "ttft_limit": 200.0}
    with run_in_thread(FakeServer(token_seconds=0.01, max_running=1)) as url:
        report = serving.run(ServeSettings(url=url, sweep=(5.0, 400.0), **load), rates.append)
    slow, fast = report.rows
    assert isinstance(slow, ServeRow) and isinstance(fast, ServeRow)
    assert rates == [slow.request_rate, fast.request_rate] == [5.0, 400.0]
    assert report.extra["sweep"]["ttft_limit_rate"] in rates
    assert fast.latencies and fast.latencies.first_token_ms.p99 > 200
    assert report.document()["settings"]["sweep"] == (5.0, 400.0)
    assert report.document()["sampling_parameters"]["temperature"] == 1
