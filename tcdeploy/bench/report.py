"""The report of a benchmark: rows of measurements, with the machine, plan and settings under which they were taken.

Every row names its subject: `tcdeploy` or a baseline. A baseline that could not be measured has a row with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tcdeploy.errors import TcdeployError
from tcdeploy.planning.environment import Environment, cpu_name
from tcdeploy.planning.plan import Bucket

TCDEPLOY = "tcdeploy"
ENVIRONMENT_FIELDS = ("python", "torch", "transformers", "triton", "cuda", "driver", "gpu", "cpu", "cpu_threads")
PLAN_FIELDS = (
    "model", "revision", "load_format", "key", "device", "weight_dtype", "kv_dtype", "compute_dtype",
    "fp8_min_rows", "mode",
    "region", "programs", "graphs", "prefill_attention", "decode_attention", "context", "block_size", "kv_blocks",
)  # fmt: skip
MAX_REASON_CHARS = 300


@dataclass(frozen=True)
class Row:
    """One row of a report. Each benchmark derives its own, with its measurements."""

    subject: str


@dataclass(frozen=True)
class FailedRow(Row):
    """A subject that could not be measured, and the reason."""

    reason: str


@dataclass(frozen=True)
class Report:
    """`extra`: further keys of the document, such as the machine's rates and its memory use."""

    command: str
    environment: dict[str, Any]
    plan: dict[str, Any]
    settings: dict[str, Any]
    rows: Sequence[Row]
    extra: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The report as JSON values. Infinity becomes the string "inf", since JSON has no such number."""
        return {
            "environment": self.environment,
            "plan": self.plan,
            "settings": {name: str(value) if value == float("inf") else value for name, value in self.settings.items()},
            "rows": [dataclasses.asdict(row) for row in self.rows],
            **self.extra,
        }


def describe_environment(environment: Environment) -> dict[str, Any]:
    return {**{name: getattr(environment, name) for name in ENVIRONMENT_FIELDS}, "cpu_name": cpu_name()}


def describe_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """`plan`: as JSON values."""
    buckets = [Bucket(**bucket).name for bucket in plan["buckets"]]
    return {**{name: plan[name] for name in PLAN_FIELDS}, "buckets": buckets}


def rows_or_failure(subject: str, measured: Iterator[Row]) -> list[Row]:
    """The rows of `measured`. If it raises, the rows up to then and a FailedRow with the reason."""
    rows: list[Row] = []
    try:
        for row in measured:
            rows.append(row)
    except Exception as error:  # a baseline is third-party code; any error is its result
        rows.append(FailedRow(subject, failure_reason(error)))
    return rows


def failure_reason(error: Exception) -> str:
    if isinstance(error, TcdeployError):
        return error.message
    text = str(error).strip().split("\n")[0][:MAX_REASON_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
