"""Reports are valid JSON documents, and include the subjects that failed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest

from tcdeploy.bench.report import FailedRow, Report, Row, rows_or_failure
from tcdeploy.errors import UsageError


def test_rows_before_a_failure_are_kept() -> None:
    def rows() -> Iterator[Row]:
        yield Row("eager")
        raise RuntimeError("CUDA out of memory\nlong story")

    assert rows_or_failure("eager", rows()) == [Row("eager"), FailedRow("eager", "RuntimeError: CUDA out of memory")]


def test_a_baseline_that_fails_at_once_has_a_row() -> None:
    def refuse() -> Iterator[Row]:
        raise UsageError("no arrivals", "hint")
        yield Row("generate")

    assert rows_or_failure("generate", refuse()) == [FailedRow("generate", "no arrivals")]


def test_an_interrupt_is_raised() -> None:
    def interrupted() -> Iterator[Row]:
        raise KeyboardInterrupt
        yield Row("eager")

    with pytest.raises(KeyboardInterrupt):
        rows_or_failure("eager", interrupted())


def test_infinity_is_a_string_in_the_document() -> None:
    report = Report("throughput", {}, {}, {"request_rate": math.inf, "requests": 3}, [FailedRow("eager", "why")])
    document = json.loads(json.dumps(report.document(), allow_nan=False))
    assert document["settings"] == {"request_rate": "inf", "requests": 3}
    assert document["rows"] == [{"subject": "eager", "reason": "why"}]
