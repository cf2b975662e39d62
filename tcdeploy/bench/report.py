"""What a benchmark gives: rows of figures, and all that is needed to say what they are figures of.

Every row names its subject: `tcdeploy`, or a baseline. A baseline that could not be measured is a row as well, with its
reason: a missing bar in a chart would read as "nobody tried".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tcdeploy.errors import TcdeployError
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.plan import Plan

TCDEPLOY = "tcdeploy"
ENVIRONMENT_FIELDS = ("python", "torch", "transformers", "triton", "cuda", "driver", "gpu", "cpu", "cpu_threads")
PLAN_FIELDS = (
    "model", "revision", "load_format", "key", "device", "weight_dtype", "kv_dtype", "compute_dtype", "mode",
    "region", "graphs", "prefill_attention",
    "decode_attention", "context", "block_size", "kv_blocks",
)  # fmt: skip
MAX_REASON_CHARS = 300


@dataclass(frozen=True)
class Row:
    """One line of a table; each benchmark adds its figures."""

    subject: str


@dataclass(frozen=True)
class FailedRow(Row):
    """A subject that gave no figures, and why."""

    reason: str


@dataclass(frozen=True)
class Report:
    """`extra` holds what stands beside the rows: rates of the machine, memory, a breakdown."""

    command: str
    environment: dict[str, Any]
    plan: dict[str, Any]
    settings: dict[str, Any]
    rows: Sequence[Row]
    extra: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON has it. Infinity becomes text: JSON has no such number."""
        return {
            "environment": self.environment,
            "plan": self.plan,
            "settings": {name: str(one) if one == float("inf") else one for name, one in self.settings.items()},
            "rows": [dataclasses.asdict(row) for row in self.rows],
            **self.extra,
        }


def describe_environment(environment: Environment) -> dict[str, Any]:
    return {name: getattr(environment, name) for name in ENVIRONMENT_FIELDS}


def describe_plan(plan: Plan) -> dict[str, Any]:
    buckets = [bucket.name for bucket in plan.buckets]
    return {**{name: getattr(plan, name) for name in PLAN_FIELDS}, "buckets": buckets}


def rows_or_failure(subject: str, measure: Callable[[], Iterator[Row]]) -> list[Row]:
    """The rows of `measure`; where it raises, those it gave before, and a row that says why it stopped."""
    rows: list[Row] = []
    try:
        for row in measure():
            rows.append(row)
    except Exception as error:  # a baseline is foreign code: whatever it raises is its result
        rows.append(FailedRow(subject, failure_reason(error)))
    return rows


def failure_reason(error: Exception) -> str:
    if isinstance(error, TcdeployError):
        return error.message
    text = str(error).strip().split("\n")[0][:MAX_REASON_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def price_per_million(tokens_per_second: float | None, price_per_hour: float | None) -> float | None:
    """What a million output tokens cost on a machine that is busy with nothing else."""
    if tokens_per_second is None or price_per_hour is None:
        return None
    return price_per_hour / 3600 / tokens_per_second * 1e6
